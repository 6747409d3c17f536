"""attend with BF16 output where rows are cut between workers, and where they must stay whole."""

import pytest
import torch

import flash_csa
from attend_data import Case, assert_close, random_case, run, same, selection, spread
from reference_data import randn


@pytest.mark.parametrize("records", ["FP4 and FP8", "MixedFp8"])
@pytest.mark.parametrize(
    ("rows", "heads"),
    [(1, 64), (7, 64), (66, 64), (70, 64), (1, 70), (3, 128), (2, 8), (5, 32), (90, 16)],
)
def test_rows_of_a_small_batch(rows, heads, records, device):
    lengths = [(512, 64, 1, 0, 300, 65, 511)[i % 7] for i in range(rows)]
    windows = [(128, 1, 0, 0, 64, 127, 65)[i % 7] for i in range(rows)]
    lists = {"lengths": lengths, "window_lengths": windows, "width": 512}
    if records == "MixedFp8":
        lists |= {"main": ("MixedFp8", 64), "window": ("MixedFp8", 64)}
    case = random_case(heads=heads, **lists)
    assert_close(case, *run(case, device, dtype=torch.bfloat16))


@pytest.mark.parametrize("width", [250, 512, 580, 2048])
@pytest.mark.parametrize(("rows", "heads"), [(1, 64), (3, 128), (20, 32), (33, 32), (33, 64)])
def test_tiles_that_do_not_divide(rows, heads, width, device):
    """Some CTAs of a row have one tile more than others; holes everywhere."""
    lengths = [width - i % 7 for i in range(rows)]
    windows = [128 - 5 * i % 128 for i in range(rows)]
    case = random_case(heads=heads, lengths=lengths, window_lengths=windows, width=width)
    case.selection.slots[torch.rand(case.selection.slots.shape) < 0.3] = -1
    assert_close(case, *run(case, device, dtype=torch.bfloat16))


@pytest.mark.parametrize("records", ["FP4 and FP8", "MixedFp8"])
@pytest.mark.parametrize("columns", [[], [0], [63], [64], [511], [1, 300]])
def test_pieces_without_records(columns, records, device):
    """One record, or none, in ten tiles: the pieces that find nothing weigh nothing."""
    lists = {"lengths": [512] * 2, "window_lengths": [0, 128], "width": 512}
    if records == "MixedFp8":
        lists |= {"main": ("MixedFp8", 64), "window": ("MixedFp8", 64)}
    case = random_case(heads=64, **lists)
    kept = case.selection.slots[:, columns].clone()
    case.selection.slots.fill_(-1)
    case.selection.slots[:, columns] = kept
    out, lse = run(case, device, dtype=torch.bfloat16)
    assert_close(case, out, lse)
    if not columns:
        assert (out[0] == 0).all() and (lse[0] == torch.inf).all()


@pytest.mark.parametrize("lengths", [(0,), (1,), (0, 0, 0, 1, 1)])
def test_short_rows_follow_each_other(lengths, device):
    """Rows of one tile or none, several for each worker: none runs ahead of those who end it."""
    cycle = [lengths[i % len(lengths)] for i in range(540)]
    case = random_case(heads=64, lengths=cycle, window=None, width=8)
    results = run(case, device, dtype=torch.bfloat16)
    assert_close(case, *results)
    assert same(results, run(case, device, dtype=torch.bfloat16))


@pytest.mark.parametrize("record", ["MainFp4", "MixedFp8"])
@pytest.mark.parametrize("batch_invariant", [False, True])
def test_contiguous_lists_of_all_lengths(record, batch_invariant, device):
    """The schedule foresaw other lengths than the lists have."""
    page_size, columns, requests = 16, 60, 5
    pages = flash_csa.Pages.empty(requests * columns, record, page_size)
    every = torch.arange(pages.num_slots, dtype=torch.int32)
    flash_csa.store(randn(pages.num_slots, 512, seed=1), pages, every)
    table = torch.randperm(requests * columns, dtype=torch.int32).view(requests, columns)
    table[2, 3] = -1
    request = torch.tensor([0, 1, 2, 3, 4, -1, 0], dtype=torch.int32)
    n_vis = torch.tensor([960, 0, 500, 64, 1, 9, 129], dtype=torch.int32)
    case = Case(q=randn(7, 64, 512, seed=2), main=pages, contiguous=(table, request, n_vis))
    out, lse = run(case, device, dtype=torch.bfloat16, batch_invariant=batch_invariant)
    slots = table.repeat_interleave(page_size, 1) * page_size + every[:page_size].repeat(columns)
    slots[table.repeat_interleave(page_size, 1) < 0] = -1
    kept = [0, 1, 2, 3, 4, 6]
    chosen = selection(slots[request[kept].long()], n_vis[kept])
    assert_close(Case(q=case.q[kept], main=pages, selection=chosen), out[kept], lse[kept])
    assert (out[5] == 0).all() and lse[5].isinf().all()


@pytest.mark.parametrize("record", ["MainFp4", "MixedFp8"])
@pytest.mark.parametrize("heads", [40, 64, 128])
def test_contiguous_rows_follow_each_other(heads, record, device):
    """Several rows for each worker, some of one tile or none: bits as with a list of the same."""
    page_size, columns, rows = 16, 9, 500
    pages = flash_csa.Pages.empty(60, record, page_size)
    every = torch.arange(pages.num_slots, dtype=torch.int32)
    flash_csa.store(randn(pages.num_slots, 512, seed=1), pages, every)
    table = torch.randint(60, (rows, columns), dtype=torch.int32)
    n_vis = torch.tensor([(144, 0, 64, 1, 0, 100, 65)[i % 7] for i in range(rows)]).int()
    request = torch.arange(rows, dtype=torch.int32)
    q = randn(rows, heads, 512, seed=2)
    slots = table.repeat_interleave(page_size, 1) * page_size + every[:page_size].repeat(columns)
    options = {"dtype": torch.bfloat16, "batch_invariant": True}
    expected = run(Case(q=q, main=pages, selection=selection(slots, n_vis)), device, **options)
    case = Case(q=q, main=pages, contiguous=(table, request, n_vis))
    for _ in range(3):
        assert same(run(case, device, **options), expected)


@pytest.mark.parametrize("rows", [1, 3, 40])
def test_invariant_rows(rows, device):
    case = random_case(heads=64, lengths=[512] * rows, window_lengths=[128] * rows, width=512)
    options = {"dtype": torch.bfloat16, "batch_invariant": True}
    out, lse = run(case, device, **options)
    assert same(run(case.rows(slice(0, 1)), device, **options), (out[:1], lse[:1]))
    split, _ = run(case, device, dtype=torch.bfloat16)
    assert ((split - out).abs().float() <= 2.0**-7 * (spread(case) + out.abs())).all()


@pytest.mark.parametrize("space", ["counters", "default"])
def test_workspace_of_any_size(space, device):
    """Without room for partial results rows stay whole."""
    case = random_case(heads=64, lengths=[250, 40], window_lengths=[128, 3])
    expected = run(case, device, dtype=torch.bfloat16)
    counters = torch.zeros(flash_csa.SYNC_BYTES, dtype=torch.uint8, device=device)
    workspace = counters if space == "counters" else None
    out, lse = run(case, device, dtype=torch.bfloat16, workspace=workspace)
    assert_close(case, out, lse)
    if space == "default":
        assert same((out, lse), expected)
