"""select and index_select: exact top-k by the total order, candidate pools, bounded scratch."""

import hashlib
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import flash_csa as fc
import golden
from flash_csa.reference import ops as ref
from index_case import (
    assert_same_list,
    in_new_process,
    index_case,
    moved,
    random_table,
    section,
    select,
    stored_case,
)
from reference_data import RATIOS, STACKS, layer_rows, tensor

INF = torch.inf


def rows_of(lengths: list[int], page_size: int = 64) -> tuple[fc.Batch, torch.Tensor]:
    """One row for each number of visible entries, and its table, at ratio 1."""
    batch = fc.Batch.build(
        [max(n - 1, 0) for n in lengths], [int(n > 0) for n in lengths], owned=[1] * len(lengths)
    )
    return batch, random_table(batch, max([*lengths, 1]), page_size)


def check(scores: torch.Tensor, batch: fc.Batch, k: int, pool_blocks: int, **options) -> None:
    """The op's lists, without and with a pool to build, are the reference's."""
    plain = {name: value for name, value in options.items() if name not in ("table", "device")}
    for blocks in (0, pool_blocks):
        got, pool = select(scores, batch, k, pool_blocks=blocks, **options)
        want, want_pool = ref.select(
            scores, batch, k, pool_blocks=blocks, block_table=options["table"], **plain
        )
        assert_same_list(got, want)
        assert (pool is None) == (blocks == 0)
    assert_same_list(pool, want_pool)


def by_topk(scores: torch.Tensor, k: int) -> torch.Tensor:
    """Positions of the k best of each row, ties to the lower position, by a stable sort."""
    order = scores.sort(dim=1, descending=True, stable=True).indices
    return order[:, :k].sort(dim=1).values.int()


# ---- The total order


PATTERNS = {
    "one bin": lambda n: torch.empty(n).uniform_(1.0, 1.245),
    "ramp": lambda n: torch.arange(n, dtype=torch.float32),
    "two neighbours": lambda n: torch.where(
        torch.arange(n) < n // 2, 1.0, torch.nextafter(torch.tensor(1.0), torch.tensor(2.0))
    ),
    "falling": lambda n: -torch.arange(n, dtype=torch.float32),
    "normal": torch.randn,
    "relu": lambda n: torch.randn(n).sub(2).relu(),
    # Whoever takes a sample of the row's beginning, or of its parts', expects too much.
    "high starts": lambda n: torch.randn(n) + 100 * (torch.arange(n) % max(n // 16, 1) < 20),
}


@pytest.mark.case("Top-k bucket overflow")
@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("width", [4095, 4096, 4097, 16383, 16384, 16385, 16512, 32768, 262144])
def test_bucket_overflow(width: int, pattern: str, device) -> None:
    """However many scores share leading bits, the values are those of torch.topk."""
    rows = 33 if width < 10_000 else 5 if width < 100_000 else 2
    scores = torch.stack([PATTERNS[pattern](width) for _ in range(rows)])
    batch, table = rows_of([width] * rows)
    scores = torch.nn.functional.pad(scores, (0, table.shape[1] * 64 - width), value=9e9)
    for k in (512, 2048):
        for values in (scores, scores.bfloat16().float()):
            got, pool = select(values, batch, k, table=table, pool_blocks=2048, device=device)
            seen = values[:, :width]
            assert torch.equal(got.positions, by_topk(seen, k))
            best = seen.topk(k, dim=1).values
            assert torch.equal(got.scores.sort(dim=1, descending=True).values, best)
            blocks = torch.nn.functional.pad(seen, (0, -width % 8), value=-INF)
            blocks = blocks.view(rows, -1, 8).amax(2)
            blocks[:, -1] = INF
            assert torch.equal(pool.blocks[:, : blocks.shape[1]], by_topk(blocks, 2048))


@pytest.mark.case("Top-k bucket overflow")
@pytest.mark.parametrize("pattern", [*PATTERNS, "ties"])
@pytest.mark.parametrize("width", [131_072, 1_048_576])
def test_long_rows(width: int, pattern: str, device) -> None:
    """A single long row, shared by the threads: 512 entries, 2048 blocks of 131,072."""
    patterns = {**PATTERNS, "ties": lambda n: torch.randn(n).mul(4).round()}  # some ten values
    scores = patterns[pattern](width)[None]
    batch, table = rows_of([width])
    got, pool = select(scores, batch, 512, table=table, pool_blocks=2048, device=device)
    assert torch.equal(got.positions, by_topk(scores, 512))
    blocks = scores.view(1, -1, 8).amax(2)
    blocks[:, -1] = INF
    assert torch.equal(pool.blocks, by_topk(blocks, 2048))


@pytest.mark.case("Top-k bucket overflow")
@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("width", [16384, 262144])
def test_crowded_rows_of_absent_pages(width: int, pattern: str, device) -> None:
    """Every other page is elsewhere, in the middle of what is read at once."""
    scores = PATTERNS[pattern](width)[None]
    table = torch.randperm(width // 2, dtype=torch.int32)[None]
    absent = torch.rand(table.shape) < 0.5
    table[absent] = -1
    batch = fc.Batch.decode([width - 1])
    got, _ = select(scores, batch, 512, table=table, page_size=2, device=device)
    present = scores.masked_fill(absent.repeat_interleave(2, 1), -INF)
    assert torch.equal(got.positions, by_topk(present, 512))


@pytest.mark.case("Tie overflow and infinities")
@pytest.mark.parametrize("k", [512, 2048])
def test_ties(k: int, device) -> None:
    """100 winners and 8220 zeros: every winner, then the lowest positions; no hole."""
    scores = torch.zeros(3, 8320)
    for row in scores:
        row[torch.randperm(8320)[:100]] = torch.rand(100) + 1
    scores[1] = torch.where(scores[1] == 0, -0.0, scores[1])
    scores[2, ::2] *= -1  # half of the winners lose, zeros of both signs
    batch, table = rows_of([8320] * 3)
    got, _ = select(scores, batch, k, table=table, device=device)
    assert torch.equal(got.positions, by_topk(scores, k))
    assert (got.lengths == k).all()


@pytest.mark.case("Tie overflow and infinities")
@pytest.mark.parametrize("k", [512, 2048])
@pytest.mark.parametrize("width", [511, 512, 513, 16384])
def test_constant_rows(width: int, k: int, device) -> None:
    """min(visible, k) of the lowest positions, whatever the value; the tail is -1."""
    values = [0.0, -0.0, 1.5, -INF, INF, 2.0**-149]
    batch, table = rows_of([width] * len(values))
    scores = torch.tensor(values)[:, None].expand(-1, table.shape[1] * 64).contiguous()
    got, _ = select(scores, batch, k, table=table, device=device)
    n = min(width, k)
    assert (got.lengths == n).all()
    assert torch.equal(got.positions[:, :n], torch.arange(n, dtype=torch.int32).expand(6, -1))
    assert (got.positions[:, n:] == -1).all() and (got.slots[:, n:] == -1).all()


@pytest.mark.case("Tie overflow and infinities")
@pytest.mark.parametrize("k", [512, 2048])
def test_infinities(k: int, device) -> None:
    counts = [1, k - 1, k, k + 1]
    batch, table = rows_of([16384] * 4)
    scores = torch.randn(4, 16384)
    for row, count in zip(scores, counts, strict=True):
        row[torch.randperm(16384)[:count]] = INF
        row[torch.randperm(16384)[:2000]] = -INF
    got, _ = select(scores, batch, k, table=table, device=device)
    assert torch.equal(got.positions, by_topk(scores, k))


special = st.sampled_from([0.0, -0.0, 1.0, -1.0, INF, -INF, torch.nan, 2.0**-149, 1.0000001])


@given(
    st.lists(special, min_size=1, max_size=90),
    st.integers(1, 40),
    st.integers(1, 9),
    st.sampled_from([1, 3, 8, 16]),
)
@settings(max_examples=80, deadline=None)
def test_any_scores(values: list[float], k: int, pool_blocks: int, page_size: int) -> None:
    """NaN is never selected and every tie falls as in the reference; so for blocks."""
    batch, table = rows_of([len(values)], page_size)
    scores = torch.full((1, table.shape[1] * page_size), 7.0)
    scores[0, : len(values)] = torch.tensor(values)
    check(scores, batch, k, pool_blocks, table=table, page_size=page_size, ratio=1)


@pytest.mark.case("Rank-identical top-k")
def test_identical_everywhere(cpu_level: str) -> None:
    """60 % exact ties: the same lists in every run, at every level, with any number of threads."""
    want = by_topk(tied_scores()[:1], 512)
    assert 0 < (tied_scores()[0, want[0].long()] > 2.5).sum() < 400
    threads = torch.get_num_threads()
    try:
        for run in range(12):
            torch.set_num_threads(1 + run % 3)
            assert torch.equal(tied_lists()[:1], want)
    finally:
        torch.set_num_threads(threads)


@pytest.mark.case("Rank-identical top-k")
def test_identical_in_another_process() -> None:
    program = "from test_select import digest, tied_lists; print(digest(tied_lists()))"
    assert in_new_process(program) == digest(tied_lists())


def digest(lists: torch.Tensor) -> str:
    return hashlib.sha256(lists.numpy().tobytes()).hexdigest()


def tied_scores() -> torch.Tensor:
    generator = torch.Generator().manual_seed(7)
    scores = torch.randn(4, 65536, generator=generator)
    scores[torch.rand(scores.shape, generator=generator) < 0.6] = 2.5  # fewer than 512 are larger
    return scores


def tied_lists() -> torch.Tensor:
    batch = fc.Batch.decode([65535, 40000, 12345, 700])
    table = torch.arange(4 * 1024, dtype=torch.int32).view(4, 1024)
    return select(tied_scores(), batch, 512, table=table)[0].positions


# ---- What may be selected


@pytest.mark.case("Visibility at group edges")
@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("ratio", [1, 2, 4, 128])
def test_visibility(ratio: int, strict: bool, device) -> None:
    """Entry g is allowed iff its last token, (g + 1) * ratio - 1, is not after the query's."""
    positions = sorted({0, ratio - 2, ratio - 1, ratio, 2 * ratio - 1, 2 * ratio} - {-1})
    scores = torch.full((len(positions), 64), 1e30)
    batch = fc.Batch.build(positions, [1] * len(positions))
    table = random_table(batch, 64, 64)
    options = {"table": table, "ratio": ratio, "strict": strict, "device": device}
    got, pool = select(scores, batch, 8, pool_blocks=4, **options)
    for row, p in enumerate(positions):
        allowed = [g for g in range(64) if (g + 1) * ratio <= p + (0 if strict else 1)]
        assert got.positions[row].tolist() == allowed + [-1] * (8 - len(allowed))
        assert got.lengths[row] == len(allowed)
        assert pool.counts[row] == (1 if allowed else 0)
    chunk = fc.Batch.build([0], [2 * ratio + 1])  # the same positions in one chunk
    options["table"] = table[:1]
    together, _ = select(torch.full((chunk.num_rows, 64), 1e30), chunk, 8, **options)
    assert torch.equal(together.positions[positions], got.positions)


@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_absent_pages_are_never_selected(page_size: int, device) -> None:
    """Entries of -1 pages compete nowhere, not even the newest; a block of them is not kept."""
    lengths = [3000, 130, 64]
    batch, table = rows_of(lengths, page_size)
    table[torch.rand(table.shape) < 0.4] = -1
    table[1] = -1
    scores = torch.randn(3, table.shape[1] * page_size)
    options = {"table": table, "page_size": page_size, "ratio": 1, "device": device}
    check(scores, batch, 512, 100, **options)


@pytest.mark.case("Width from arguments")
@pytest.mark.parametrize("k", [1, 64, 511, 512, 513, 1024, 2048, 8192])
def test_width(k: int, device) -> None:
    """Lists are k wide: padded where fewer are visible; buffers of another width raise."""
    lengths = [0, 1, min(k, 600), 700, 5000]
    batch, table = rows_of(lengths)
    scores = torch.randn(5, table.shape[1] * 64)
    check(scores, batch, k, k, table=table, ratio=1, page_size=64, device=device)
    batch, table = moved(batch, device), table.to(device)
    schedule = section(batch, table.shape[1] * 64, 1)
    options = {"block_table": table, "ratio": 1, "page_size": 64}
    with pytest.raises(ValueError, match=r"select: out\.positions must be int32 \[5, "):
        fc.select(
            scores.to(device),
            batch,
            k,
            schedule,
            **options,
            out=fc.Selection.empty(5, k + 1, device),
        )


@pytest.mark.case("Padded query rows")
def test_padded_rows(device) -> None:
    """Padded rows, their scores NaN or huge: lists -1, length 0; the others as without them."""
    batch = fc.Batch.build([400, 90], [4, 20])
    table = random_table(batch, 500, 64)
    scores = torch.randn(24, 512)
    want, want_pool = select(scores, batch, 64, table=table, pool_blocks=16, device=device)
    padded = fc.Batch.build([400, 90], [4, 20], owned=[9, 20], num_rows=34)
    real = padded.positions >= 0
    wide = torch.full((34, 512), torch.nan)
    wide[30:] = 3e38
    wide[real] = scores
    got, pool = select(wide, padded, 64, table=table, pool_blocks=16, device=device)
    for name in ("positions", "slots", "lengths", "scores"):
        assert torch.equal(getattr(got, name)[real], getattr(want, name))
    assert torch.equal(pool.blocks[real], want_pool.blocks)
    assert (got.positions[~real] == -1).all() and (got.slots[~real] == -1).all()
    assert (pool.blocks[~real] == -1).all()
    assert not got.lengths[~real].any() and not pool.counts[~real].any()


def test_strided_scores_and_outputs(device) -> None:
    """Scores and lists may be views with any row stride; bytes around the lists stay."""
    batch, table = rows_of([500, 300, 64])
    scores = torch.randn(3, 512)
    want, _ = select(scores, batch, 64, table=table, device=device)
    wide = torch.full((3, 600), torch.nan, device=device)
    wide[:, 44:556] = scores.to(device)
    buffers = [torch.full((5, 100), -9, dtype=torch.int32, device=device) for _ in range(2)]
    views = [buffer[1:4, 20:84] for buffer in buffers]
    lengths = torch.empty(3, dtype=torch.int32, device=device)
    batch = moved(batch, device)
    fc.select(
        wide[:, 44:556],
        batch,
        64,
        section(batch, 512, 1),
        block_table=table.to(device),
        ratio=1,
        page_size=64,
        out=fc.Selection(*views, lengths),
    )
    assert torch.equal(views[0].cpu(), want.positions) and torch.equal(views[1].cpu(), want.slots)
    for buffer, view in zip(buffers, views, strict=True):
        view.fill_(-9)
        assert (buffer == -9).all()


# ---- Pools


@pytest.mark.case("Candidate pinning and shortage")
@pytest.mark.parametrize("n", [0, 1, 7, 8, 9, 16383, 16384, 16385, 20000])
def test_newest_block_is_pinned(n: int, device) -> None:
    """All old scores 100, the newest 0: its block is in; a small context is its own pool."""
    batch, table = rows_of([n])
    scores = torch.full((1, table.shape[1] * 64), 1e9)
    scores[0, :n] = 100
    scores[0, max(n - 1, 0)] = 0
    _, pool = select(scores, batch, 512, table=table, pool_blocks=2048, device=device)
    count = min(2048, -(-n // 8))
    assert pool.counts.tolist() == [count]
    assert (pool.blocks[0, count:] == -1).all()
    assert n == 0 or pool.blocks[0, count - 1] == (n - 1) // 8
    assert pool.scores[0, :count].tolist() == [100.0] * (count - 1) + [
        0.0 if n % 8 == 1 else 100.0
    ] * (n > 0)
    flat, reindex = torch.randn(1, table.shape[1] * 64), torch.full((1, 8 * 2048), torch.nan)
    for column, block in enumerate(pool.blocks[0, :count].tolist()):
        reindex[0, 8 * column : 8 * column + 8] = flat[0, 8 * block : 8 * block + 8]
    inside, _ = select(reindex, batch, 512, table=table, pool=pool, device=device)
    everything, _ = select(flat, batch, 512, table=table, device=device)
    assert (inside.positions < max(n, 1)).all()
    if n <= 16384:
        assert_same_list(inside, everything)
    else:
        kept = torch.isin(torch.arange(n) // 8, pool.blocks[0])
        best = by_topk(flat[:, :n].masked_fill(~kept, -INF), 512)
        assert torch.equal(inside.positions, best)


@pytest.mark.parametrize("page_size", [5, 64])
def test_selection_inside_pools(page_size: int, device) -> None:
    """Restricted selections against the reference: short pools, blocks cut by pages, holes."""
    lengths = [900, 333, 40, 8, 0]
    batch, table = rows_of(lengths, page_size)
    table[torch.rand(table.shape) < 0.2] = -1
    blocks = torch.full((5, 30), -1, dtype=torch.int32)
    counts = torch.tensor([30, 12, 5, 1, 0], dtype=torch.int32)
    for row, (n, count) in enumerate(zip(lengths, counts.tolist(), strict=True)):
        blocks[row, :count] = torch.randperm(-(-n // 8))[:count].sort().values
    pool = fc.Pool(blocks, counts)
    scores = torch.randn(5, 240).mul(3).round()
    for k in (1, 64, 240):
        options = {"ratio": 1, "page_size": page_size, "pool": pool}
        got, _ = select(scores, batch, k, table=table, device=device, **options)
        want, _ = ref.select(scores, batch, k, block_table=table, **options)
        assert_same_list(got, want)


# ---- Golden selections


@pytest.mark.parametrize("layer", [1, 3])
@pytest.mark.parametrize("stack", STACKS)
def test_golden_selection(stack: str, layer: int, device) -> None:
    """Golden FP32 scores give the selection that sorting them gives, and the golden candidates."""
    archive = golden.load(stack)
    scores = tensor(archive, f"L{layer}.index_scores")
    rows, n_vis = layer_rows(archive, layer)
    meta = {"csa2_small": (32, 8), "csa2_short": (8, 2)}[stack]
    batch = fc.Batch.build(rows.tolist(), [1] * len(rows))
    table = random_table(batch, scores.shape[1], 1)
    options = {"table": table, "ratio": RATIOS[layer], "page_size": 1, "device": device}
    got, pool = select(scores, batch, meta[0], pool_blocks=meta[1], **options)
    for row, n in enumerate(n_vis.tolist()):
        assert torch.equal(
            got.positions[row, : min(n, meta[0])],
            by_topk(scores[row : row + 1, :n], meta[0])[0],
        )
    if layer == 3:
        golden_candidates = archive["L3.candidates"][rows.numpy()]
        for blocks, n, want in zip(pool.blocks, n_vis.tolist(), golden_candidates, strict=True):
            inside = torch.isin(torch.arange(len(want)) // 8, blocks[blocks >= 0])
            inside[n:] = False
            assert np.array_equal(inside.numpy(), want)


def test_golden_pool_at_real_size(device) -> None:
    """20,005 entries, 2048 blocks, top-512: Full, Reindex inside its pool, and without one."""
    archive = golden.load("pool_real")
    lengths = tensor(archive, "visible").tolist()
    batch = fc.Batch.build([n - 1 for n in lengths], [1] * len(lengths))
    table = random_table(batch, 20005, 1)
    full, flat = tensor(archive, "full_scores"), tensor(archive, "reindex_scores")
    options = {"table": table, "page_size": 1, "device": device}
    got, pool = select(full, batch, 512, pool_blocks=2048, **options)
    assert torch.equal(got.positions, tensor(archive, "full_topk"))
    want = torch.from_numpy(np.unpackbits(archive["candidates"], axis=1))[:, :20005].bool()
    for blocks, n, row in zip(pool.blocks, lengths, want, strict=True):
        inside = torch.isin(torch.arange(20005) // 8, blocks)
        assert torch.equal(inside & (torch.arange(20005) < n), row)
    columns = (pool.blocks[:, :, None] * 8 + torch.arange(8)).flatten(1).clamp(0, 20004)
    inside, _ = select(flat.gather(1, columns.long()), batch, 512, pool=pool, **options)
    assert torch.equal(inside.positions, tensor(archive, "reindex_topk"))
    without, _ = select(flat, batch, 512, **options)
    assert torch.equal(without.positions, tensor(archive, "reindex_topk_without_pool"))


# ---- index_select


@pytest.mark.parametrize("ratio", [1, 2])
def test_fused_pair(ratio: int, cpu_level: str) -> None:
    """index_select is index_scores, then select: lists, pools and scores, also inside a pool."""
    case = index_case([9000, 0, 5000, 63], [1, 70, 3, 1], ratio=ratio, heads=8, page_size=32)
    case.table[0, ::7] = -1
    case.table[2, 3] = 2**31 - 1  # beyond the cache
    got, pool = case.index_select(512, pool_blocks=100)
    want, want_pool = case.select(case.scores(), 512, pool_blocks=100)
    assert_same_list(got, want)
    assert_same_list(pool, want_pool)
    inside, _ = case.index_select(64, pool=pool)
    assert_same_list(inside, case.select(case.scores(pool), 64, pool=pool)[0])


@pytest.mark.parametrize("width", [2048, 60, 0])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("entries, rows", [(600_000, 1), (150_001, 2), (30_000, 9), (20_000, 70)])
def test_pool_beside_entries(entries: int, rows: int, tied: bool, width: int, device) -> None:
    """Both selections of a call, by clusters of all sizes and by blocks alone: those of the CPU.

    tied: a third of the pages are one page, so that its scores come thousands of times."""
    case = index_case([entries - 1] * rows, [1] * rows, heads=8, device=device)
    case.table[:, 5::7] = -1
    if tied:
        case.table[:, ::3] = case.table[0, 0].item()
    got, pool = case.index_select(512, pool_blocks=width)
    on_cpu = replace(case, device=torch.device("cpu"))
    want, want_pool = on_cpu.select(on_cpu.scores(), 512, pool_blocks=width)
    assert_same_list(got, want)
    if width:
        assert_same_list(pool, want_pool)


def test_workspace(device) -> None:
    """It has to hold one row of scores, and to start where wide loads may."""
    case = index_case([2500], [1], device=device)
    arguments = case._arguments(False)
    bounds = {"max_rows": 1, "max_entries": case.entries, "num_sms": 0}
    needed = fc.workspace_bytes("index_select", **bounds)
    space = torch.zeros(needed + 4, dtype=torch.uint8, device=device)
    fc.index_select(*arguments, 64, ratio=1, workspace=space[:needed])
    for workspace, message in (
        (space[: needed - 1], f"must hold at least {needed} bytes, got {needed - 1}"),
        (space[4:], "must start at a multiple of 16 bytes, got an address 4 past one"),
    ):
        with pytest.raises(ValueError, match=f"index_select: workspace {message}"):
            fc.index_select(*arguments, 64, ratio=1, workspace=workspace)


def test_fused_fp8(device) -> None:
    case = index_case([5000, 63], [2, 1], record="IndexFp8", heads=8, device=device)
    got, pool = case.index_select(512, pool_blocks=100)
    want, want_pool = case.select(case.scores(), 512, pool_blocks=100)
    assert_same_list(got, want)
    assert_same_list(pool, want_pool)


@pytest.mark.case("Realistic sizes")
@pytest.mark.parametrize("n", [511, 512, 513, 4096, 16384, 16385, 131_072])
def test_planted_keys(n: int, device) -> None:
    """Heavy-tailed keys with outlier channels: keys planted along the query are always found."""
    keys = torch.randn(n, 128) * torch.exp(torch.randn(n, 1))
    keys[:, [5, 77]] *= 50
    q = torch.randn(1, 32, 128)
    q[:, :, [5, 77]] = 0
    planted = sorted({0, n // 2, n // 2 // 8 * 8, n - 1})
    keys[planted] = 30 * q[0].mean(0)
    case = stored_case(
        keys,
        q.abs() * q.mean(1, keepdim=True).sign(),
        torch.ones(1, 32),
        torch.tensor([n - 1]),
        device=device,
    )
    got, pool = case.index_select(128, pool_blocks=64)
    assert set(planted) <= set(got.positions[0].tolist())
    assert {p // 8 for p in planted} <= set(pool.blocks[0].tolist())
    inside, _ = case.index_select(128, pool=pool)
    assert set(planted) <= set(inside.positions[0].tolist())
    if n <= 16384:  # control: turned against the query, none of them is found
        keys[planted] *= -1
        other = stored_case(keys, q, case.weights, torch.tensor([n - 1]))
        case = replace(case, index=other.index, table=other.table)
        missed, _ = case.index_select(128)
        assert not set(planted) & set(missed.positions[0].tolist())


@pytest.mark.case("Prefill scratch")
def test_scratch_is_bounded() -> None:
    """1024 rows over 65,536 entries: the workspace, which does not grow with them, and the lists;
    not the 256 MiB of their scores (control)."""
    sizes = {"k": 512, "pool_blocks": 2048, "max_entries": 262_144, "num_sms": 2}
    workspace = fc.workspace_bytes("index_select", max_rows=1024, **sizes)
    assert workspace == fc.workspace_bytes("index_select", max_rows=4096, **sizes) < 256 << 20
    grown, control = in_new_process("from test_select import prefill; print(*prefill())").split()
    assert int(grown) < 200 << 20 < int(control)


def prefill() -> tuple[int, int]:
    """Bytes by which the peak of this process grows, and would grow with a matrix of scores; checks
    rows against the unfused pair."""
    case = index_case([64 << 10], [1024], heads=8)
    before = peak()
    got, pool = case.index_select(512, pool_blocks=2048)
    grown = peak() - before
    torch.ones(1024, 64 << 10)
    control = peak() - before
    some = torch.arange(0, 1024, 200)
    alone = replace(
        case,
        query=fc.IndexQuery(case.query.codes[some], case.query.scales[some]),
        weights=case.weights[some],
        batch=fc.Batch.build((some + (64 << 10)).tolist(), [1] * len(some)),
        table=case.table.repeat(len(some), 1),
    )
    want, want_pool = alone.select(alone.scores(), 512, pool_blocks=2048)
    assert torch.equal(got.positions[some], want.positions)
    assert torch.equal(pool.blocks[some], want_pool.blocks)
    return grown, control


def peak() -> int:
    """Most bytes that this program has had resident (ru_maxrss begins with its parent's)."""
    return 1024 * int(re.search(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text())[1])
