"""attend with BF16 output where two blocks of 64 heads share the conversion of records."""

import threading
from dataclasses import replace

import pytest
import torch

import flash_csa
from attend_data import assert_close, bound_call, filled_pages, random_case, run, same
from reference_data import randn, table

ROWS = 70  # with two blocks of heads each enough for whole rows


def expanded_rows(heads: int, device) -> torch.Tensor:
    return randn(1, heads, 512).to(device).expand(ROWS, heads, 512)


def expanded_heads(heads: int, device) -> torch.Tensor:
    return randn(ROWS, 1, 512).to(device).expand(ROWS, heads, 512)


def transposed(heads: int, device) -> torch.Tensor:
    return randn(heads, ROWS, 520).to(device)[..., 8:].transpose(0, 1)


def overlapping(heads: int, device) -> torch.Tensor:
    return randn(8 * (ROWS + heads) + 512).to(device).as_strided((ROWS, heads, 512), (8, 8, 1))


def apart(heads: int, device) -> torch.Tensor:
    return randn(2 * ROWS, heads + 3, 536).to(device)[1::2, 2 : heads + 2, 16:528]


VIEWS = [expanded_rows, expanded_heads, transposed, overlapping, apart]


@pytest.mark.parametrize("heads", [70, 128])
@pytest.mark.parametrize("view", VIEWS, ids=lambda view: view.__name__)
def test_queries_of_any_strides(view, heads, device):
    """They have the bits of a contiguous copy."""
    case = random_case(heads=heads, lengths=[70] * ROWS, window_lengths=[66] * ROWS, width=70)
    q = view(heads, device)
    assert not q.is_contiguous()
    moved = replace(case, q=q)
    copied = replace(case, q=q.contiguous())
    assert same(run(moved, device, dtype=torch.bfloat16), run(copied, device, dtype=torch.bfloat16))


@pytest.mark.parametrize("heads", [70, 128])
@pytest.mark.parametrize("page_size", [4, 64, 61])
@pytest.mark.parametrize("holes", [0, 0.02])
def test_windows_that_lie_together(holes, page_size, heads, device):
    """Window records that follow each other in memory, as those of models do, and page by page."""
    windows = [(128, 64, 8, 7, 9, 63, 65, 0, 1, 127)[i % 10] for i in range(ROWS)]
    lengths = [(5, 0, 70)[i % 3] for i in range(ROWS)]
    case = random_case(heads=heads, lengths=lengths, window_lengths=windows, width=70)
    count = 5 * page_size if page_size > 4 else 160
    pages, _ = filled_pages("WindowFp8", page_size, randn(count, 512), spare=0)
    slots = (torch.arange(ROWS)[:, None] + torch.arange(128)) % count
    slots = torch.where(torch.rand(slots.shape) < holes, -1, slots).int()
    case = replace(case, window_pages=pages, window=flash_csa.Window(slots, case.window.lengths))
    out, lse = run(case, device, dtype=torch.bfloat16)
    assert_close(case, out, lse)
    alone = replace(case, q=case.q[:, :64], sink=case.sink[:64].clone())
    options = {"dtype": torch.bfloat16, "batch_invariant": True}
    assert same(run(alone, device, **options), (out[:, :64], lse[:, :64]))
    for _ in range(3):
        assert same(run(case, device, dtype=torch.bfloat16), (out, lse))


@pytest.mark.parametrize("main", [("MainFp4", 64), None])
def test_rows_that_follow_each_other(main, device):
    """Several rows for each pair of CTAs, empty ones among them, windows of none to two tiles."""
    rows = 300
    windows = [(0, 64, 0, 128, 1, 65, 0, 0, 9, 127, 3)[i % 11] for i in range(rows)]
    lengths = [(0, 0, 70, 1, 130, 0, 64)[i % 7] for i in range(rows)]
    lists = {"lengths": lengths, "window_lengths": windows, "width": 130}
    case = random_case(heads=128, main=main, **lists)
    out, lse = run(case, device, dtype=torch.bfloat16)
    for first in (0, 64):
        block = slice(first, first + 64)
        alone = replace(case, q=case.q[:, block], sink=case.sink[block].clone())
        options = {"dtype": torch.bfloat16, "batch_invariant": True}
        assert same(run(alone, device, **options), (out[:, block], lse[:, block]))


@pytest.mark.parametrize("padded", [range(5), range(0, ROWS, 2), range(ROWS)])
def test_padded_rows_of_two_blocks(padded, device):
    """A position out of range empties a row, also the first one of a pair of CTAs."""
    case = random_case(heads=128, lengths=[70] * ROWS, window_lengths=[70] * ROWS, width=70)
    none = torch.zeros(ROWS, dtype=torch.bool)
    none[list(padded)] = True
    positions = torch.arange(ROWS, dtype=torch.int32)
    options = {"dtype": torch.bfloat16, "batch_invariant": True}
    cos_sin = table(ROWS).to(device)
    expected = run(case, device, derotate=(positions.to(device), cos_sin), **options)
    case.q[none] = torch.nan
    case.selection.slots[none] = case.window.slots[none] = 2**31 - 1
    positions[none] = -1
    out, lse = run(case, device, derotate=(positions.to(device), cos_sin), **options)
    assert same((out[~none], lse[~none]), [x[~none] for x in expected])
    assert (out[none] == 0).all() and (lse[none] == torch.inf).all()


@pytest.mark.parametrize("view", [None, *VIEWS], ids=lambda view: view and view.__name__)
def test_two_blocks_share_records(view, cuda):
    """The kernel for pairs runs, whatever the strides: results are the same without it. Also in a
    thread that has launched nothing yet."""
    case = random_case(heads=128, lengths=[70] * ROWS, window_lengths=[66] * ROWS, width=70)
    if view is not None:
        case = replace(case, q=view(128, cuda))
    call, _, _ = bound_call(case, cuda, dtype=torch.bfloat16)
    torch.cuda.synchronize()
    traced = {"activities": [torch.profiler.ProfilerActivity.CUDA], "acc_events": True}
    with torch.profiler.profile(**traced) as profile:
        thread = threading.Thread(target=call)
        thread.start()
        thread.join()
        torch.cuda.synchronize()
    names = [event.name for event in profile.events() if "many_heads_kernel" in event.name]
    assert len(names) == 1 and "<true," in names[0].replace("(bool)1", "true")
