"""index_scores: the bits of a score, which columns are written, and which bytes are read."""

import mmap
import resource
from dataclasses import replace

import numpy as np
import pytest
import torch

import flash_csa as fc
import golden
from index_case import POISON_SCORE, IndexCase, index_case, random_query, stored_case
from reference_data import KV_SOURCE, RATIOS, STACKS, layer_rows, tensor


def assert_scores(case: IndexCase, pool: fc.Pool | None = None) -> None:
    """Every visible column has the reference's bits, every hidden one its poison."""
    got, want, seen = case.scores(pool), case.expected_scores(pool), case.visible(pool)
    torch.testing.assert_close(got[seen], want[seen], rtol=0, atol=0, equal_nan=True)
    assert (got[~seen] == POISON_SCORE).all()


def pool_of(blocks: list[list[int]], width: int) -> fc.Pool:
    padded = [row + [-1] * (width - len(row)) for row in blocks]
    counts = torch.tensor([len(row) for row in blocks], dtype=torch.int32)
    return fc.Pool(torch.tensor(padded, dtype=torch.int32).view(len(blocks), width), counts)


# ---- Bits


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("ratio", [1, 2, 4, 128])
def test_bits_of_mixed_batches(ratio: int, strict: bool, device) -> None:
    """Decode, prefill and empty requests in one batch, against the exact reference."""
    case = index_case(
        [300, 0, 900, 1, 64 * ratio], [1, 40, 3, 1, 2], ratio=ratio, strict=strict, device=device
    )
    assert_scores(case)


@pytest.mark.case("Head counts and real dispatch")
@pytest.mark.parametrize("heads", [1, 3, 8, 16, 32, 64, 127])
def test_head_counts(heads: int, cpu_level: str) -> None:
    """Any number of heads, in decode and in prefill, at every instruction level."""
    assert_scores(index_case([200, 190], [1, 20], heads=heads))


def test_bits_at_every_level(cpu_level: str) -> None:
    """Scales over their whole range, NaN and overflow included, at every instruction level."""
    case = index_case([130, 70], [2, 9], heads=16)
    form_bytes = 64 * case.index.page_size
    case.index.data[:, form_bytes:].random_(0, 256)
    case.query.scales.view(torch.uint8)[::2].random_(0, 256)
    assert_scores(case)
    assert case.scores().isnan().any()


def test_weights_of_both_dtypes(device) -> None:
    case = index_case([150], [5], device=device)
    rounded = replace(case, weights=case.weights.bfloat16())
    assert_scores(rounded)
    assert torch.equal(replace(case, weights=rounded.weights.float()).scores(), rounded.scores())


def test_nan_is_seen(device) -> None:
    """A NaN weight or scale makes the scores that it enters NaN, and no others."""
    case = index_case([99], [4], device=device)
    case.weights[1, 7] = torch.nan
    case.query.scales[2, 3] |= 0xFF << 8
    key = 64 * case.index.page_size + 4 * (70 % 64) + 2
    case.index.data[case.table[0, 1], key] = 0xFF
    nan = case.scores().isnan() & case.visible()
    assert nan[1].sum() == 101 and nan[2].sum() == 102
    assert nan[0].nonzero().tolist() == [[70]] and nan[3].nonzero().tolist() == [[70]]


@pytest.mark.case("Score formula")
def test_score_formula(device) -> None:
    """ReLU before the weight, weights of both signs, a sum over heads; nothing else."""
    case = index_case([0], [1], heads=32, device=device)
    case.weights.fill_(0)
    case.weights[0, 4], case.weights[0, 9] = 1.0, -2.0
    case.query.codes.fill_(0)
    case.query.codes[0, 4, 0] = 0x0A  # -1 in channel 0
    case.query.codes[0, 9, 20] = 0x50  # 3 in channel 41
    case.query.scales.fill_(0x7F7F7F7F)
    page, size = case.table[0, 0], case.index.page_size
    case.index.data[page].fill_(0)
    case.index.data[page, 0], case.index.data[page, 20] = 0x02, 0x70  # 1 and 6
    case.index.data[page, 64 * size : 64 * size + 4] = 0x7F
    assert case.scores()[0, 0] == -2.0 * (3 * 6)  # the head of weight 1 has dot -1
    case.query.codes[0, 9, 20] = 0xD0  # -3: both dots are negative
    assert case.scores()[0, 0] == 0.0


@pytest.mark.parametrize("layer", [1, 3, 4])
@pytest.mark.parametrize("stack", STACKS)
def test_golden_scores(stack: str, layer: int, device) -> None:
    """Golden keys and queries of each source layer: within 1e-6 of the row's maximum."""
    archive = golden.load(stack)
    names = (f"L{KV_SOURCE[layer]}.index_k_rotated", f"L{layer}.index_q_rotated")
    keys, q = (tensor(archive, name) for name in names)
    weights, want = tensor(archive, f"L{layer}.index_weights"), archive[f"L{layer}.index_scores"]
    rows, _ = layer_rows(archive, layer)
    case = stored_case(keys, q, weights, rows, ratio=RATIOS[layer], device=device)
    assert_golden(case, torch.from_numpy(want))


@pytest.mark.parametrize("name", ["full", "reindex"])
def test_golden_scores_at_real_size(name: str, device) -> None:
    archive = golden.load("pool_real")
    keys, q = tensor(archive, "k_dequant"), tensor(archive, f"{name}_q_dequant")
    positions = tensor(archive, "visible") - 1
    case = stored_case(keys, q, tensor(archive, f"{name}_weights"), positions, device=device)
    assert_golden(case, tensor(archive, f"{name}_scores"))


def assert_golden(case: IndexCase, want: torch.Tensor) -> None:
    got, seen = case.scores()[:, : want.shape[1]], case.visible()[:, : want.shape[1]]
    bound = 1e-6 * want.masked_fill(~seen, 0).abs().amax(1, keepdim=True)
    assert ((got - want).abs() <= bound)[seen].all()
    assert seen.any()


# ---- FP8 keys


def test_fp8_keys(cpu_level: str) -> None:
    """FP8 keys with FP8 and FP4 queries: sum of w * max(0, q_scale * k_scale * dot), bounded."""
    for query_record in ("IndexFp8", "IndexFp4"):
        case = index_case([700, 80], [1, 12], record="IndexFp8", query_record=query_record)
        seen, want = case.visible(), case.expected_scores(exact=False)
        bound = replace(case, weights=case.weights.abs()).expected_scores(exact=False)
        error = (case.scores() - want).abs()[seen]
        assert (error <= 1e-5 * bound[seen].abs().amax()).all()


def test_fp8_bits_do_not_depend_on_the_level() -> None:
    from flash_csa import _C

    case = index_case([700], [3], record="IndexFp8")
    best = _C.cpu_level()
    want = case.scores()
    try:
        for level in ("baseline", "avx2", "avx512"):
            try:
                _C.set_cpu_level(level)
            except ValueError:
                continue
            assert torch.equal(case.scores(), want), level
    finally:
        _C.set_cpu_level(best)


# ---- Which columns are written and which bytes are read


@pytest.mark.case("Page geometry")
@pytest.mark.parametrize("page_size", [1, 2, 8, 16, 32, 61, 64, 69, 128, 256])
def test_page_sizes(page_size: int, device) -> None:
    """Every page size; lengths that end inside, at and just after a page."""
    last = 3 * page_size
    case = index_case([last - 1, last, last - 2, 0], [1, 1, 3, 1], page_size=page_size)
    assert_scores(replace(case, device=device))


@pytest.mark.case("Page geometry")
@pytest.mark.parametrize("shift", [4, 8])
def test_misaligned_pages_raise(shift: int, device) -> None:
    case = index_case([100], [1], device=device)
    bytes_ = torch.nn.functional.pad(case.index.data.flatten(), (shift, 0))
    data = bytes_[shift:].view_as(case.index.data)
    with pytest.raises(ValueError, match="16"):
        replace(case, index=replace(case.index, data=data)).scores()


@pytest.mark.case("Padded page stride")
@pytest.mark.parametrize("padding", [576, 4096, 68 * 64])
def test_padded_pages(padding: int, device) -> None:
    """The page stride is the view's, not the record's: equal to a packed copy."""
    case = index_case([500], [3], padding=padding, device=device)
    packed = replace(case.index, data=case.index.data.clone())
    assert torch.equal(case.scores(), replace(case, index=packed).scores())
    strided = replace(case.index, data=case.index.data.repeat_interleave(2, 1)[:, ::2])
    with pytest.raises(ValueError, match=r"index_scores: index.pages"):
        replace(case, index=strided).scores()


@pytest.mark.case("NaN poison in unused cache")
@pytest.mark.parametrize("fill", [0xFF, 0x7F, 0x80])
@pytest.mark.parametrize(("rows", "length"), [(1, 1), (64, 127), (65, 128), (129, 129), (1, 13)])
def test_unused_bytes_do_not_matter(fill: int, rows: int, length: int, device) -> None:
    """Bytes beyond the visible entries change nothing, in and out of the last page."""
    case = index_case([length - 1], [rows], page_size=4 if length == 13 else 64, device=device)
    size, used = case.index.page_size, case.index.data.clone()
    poisoned = torch.full_like(used, fill)
    for entry in range(length - 1 + rows):
        page, at = case.table[0, entry // size], entry % size
        for part in (
            slice(64 * at, 64 * at + 64),
            slice(64 * size + 4 * at, 64 * size + 4 * at + 4),
        ):
            poisoned[page, part] = used[page, part]
    other = replace(case, index=replace(case.index, data=poisoned))
    assert torch.equal(other.scores(), case.scores())


def test_absent_pages_are_not_read(device) -> None:
    """-1 and out-of-range pages: never dereferenced, other columns as ever."""
    case = index_case([1000, 640], [2, 1], device=device)
    for page in (-1, -(2**31), 2**31 - 1, len(case.index.data)):
        table = case.table.clone()
        table[0, 3], table[0, 15], table[1, 0] = page, page, page
        holed = replace(case, table=table)
        got, want, seen = holed.scores(), case.scores(), case.visible()
        present = (table >= 0) & (table < len(case.index.data))
        kept = present[case.batch.row_request.long()].repeat_interleave(64, 1) & seen
        assert torch.equal(got[kept], want[kept])
        assert kept.sum() < seen.sum()


@pytest.mark.case("Output offset and stride")
def test_output_stride(device) -> None:
    """`out` may be a view with any row stride; bytes around it stay."""
    case = index_case([1500, 300], [2, 3], device=device)
    want = case.scores()
    buffer = torch.full((5 + 2, case.entries + 40), POISON_SCORE, device=device)
    out = buffer[1:6, 16 : 16 + case.entries]
    assert torch.equal(case.scores(out=out), want)
    out.fill_(POISON_SCORE)
    assert (buffer == POISON_SCORE).all()


def zeros(rows: int, columns: int, dtype: torch.dtype, device) -> torch.Tensor:
    """Zeros of which, on the CPU, only what is touched is backed by memory."""
    if device.type == "cpu":
        size = rows * columns * dtype.itemsize
        return torch.from_numpy(np.zeros(size, np.uint8)).view(dtype).view(rows, columns)
    return torch.zeros(rows, columns, dtype=dtype, device=device)


@pytest.mark.case("2 GiB byte offset")
def test_pages_beyond_2_gib(device) -> None:
    """Page number times page stride passes 2^31 at page 246,724."""
    case = index_case([600], [2], page_size=128, device=device)
    far = torch.tensor([0, 246723, 246724, 246725, 246799])
    pages = zeros(246800, case.index.data.shape[1], torch.uint8, device)
    pages[far.to(device)] = case.index.data[case.table[0].long()].to(device)
    moved = replace(case, index=replace(case.index, data=pages), table=far[None].int())
    seen = case.visible()
    assert torch.equal(moved.scores()[seen], case.scores()[seen])


@pytest.mark.case("Output offset and stride")
def test_output_beyond_2_gib(device) -> None:
    """Rows 0, 511, 512, 513 and 599 of a million columns: 512 begins 2^31 bytes behind row 0."""
    owned = [511, 1, 1, 86, 1]  # with padded rows, which stay as they are
    case = index_case([60] * 5, [1] * 5, owned=owned, heads=8, device=device)
    out = zeros(600, 1 << 20, torch.float32, device)
    case.scores(out=out)
    seen = case.visible()
    assert seen.sum() == 5 * 61
    assert torch.equal(out[:, : case.entries].cpu()[seen], case.scores()[seen])
    assert not out[:, : case.entries].cpu()[~seen].any()


@pytest.mark.case("Output offset and stride")
@pytest.mark.parametrize("rows", [65, 96])
def test_more_rows_than_heads(rows: int, device) -> None:
    assert_scores(index_case([70] * rows, [1] * rows, heads=64, device=device))


@pytest.mark.case("Padded query rows")
def test_padded_rows(device) -> None:
    """Padded rows in the middle and at the end, their queries NaN: the others as without."""
    case = index_case([400, 90], [4, 20], device=device)
    padded = fc.Batch.build([400, 90], [4, 20], owned=[9, 20], num_rows=34)
    real = padded.positions >= 0
    query = random_query(34, 32)
    query.scales.fill_(-1)
    query.codes[real], query.scales[real] = case.query.codes, case.query.scales
    weights = torch.full((34, 32), torch.nan)
    weights[real] = case.weights
    got = replace(case, query=query, weights=weights, batch=padded).scores()
    assert torch.equal(got[real], case.scores())
    assert (got[~real] == POISON_SCORE).all()


def test_nothing_to_score(device) -> None:
    """No rows, no requests, an empty table, a request without entries."""
    empty = index_case([], [], entries=1, device=device)
    assert replace(empty, table=torch.empty(0, 4, dtype=torch.int32)).scores().shape == (0, 256)
    no_table = replace(index_case([5], [1]), table=torch.empty(1, 0, dtype=torch.int32))
    assert no_table.scores().shape == (1, 0)
    assert (index_case([0], [1], ratio=2, device=device).scores() == POISON_SCORE).all()


# ---- Pools


def test_pool_columns(device) -> None:
    """Column c is position 8 * blocks[c // 8] + c % 8; hidden and padded columns stay."""
    case = index_case([200, 77, 3], [1, 2, 1], page_size=20, device=device)
    pool = pool_of([[0, 3, 25], [1, 2, 3, 9], [4, 9], [0]], width=5)
    assert_scores(case, pool)
    flat, got = case.scores(), case.scores(pool)
    for row, blocks in enumerate(pool.blocks.tolist()):
        for column in range(40):
            position = 8 * blocks[column // 8] + column % 8
            if 0 <= position < case.n_vis()[row]:
                assert got[row, column] == flat[row, position]


def test_pool_of_everything_is_the_flat_index(cpu_level: str) -> None:
    case = index_case([515], [3])
    pool = pool_of([list(range(65))] * 3, width=65)
    seen = case.visible()
    got, want = case.scores(pool)[:, : case.entries], case.scores()
    assert torch.equal(got[:, : seen.shape[1]][seen[:, : got.shape[1]]], want[seen])


@pytest.mark.case("Pool must save work")
def test_pool_bounds_the_bytes_read(device) -> None:
    """A Reindex row reads its pool's records only: the others may be anything, or nowhere."""
    case = index_case([40_000], [1], page_size=8, device=device)
    blocks = sorted(torch.randperm(5000)[:60].tolist())
    pool = pool_of([blocks], width=64)
    want = case.scores(pool)
    table = torch.full_like(case.table, 2**31 - 1)  # a page that no cache has
    table[0, blocks] = case.table[0, blocks]
    data = torch.full_like(case.index.data, 0xFF)
    data[table[0, blocks].long()] = case.index.data[table[0, blocks].long()]
    bare = replace(case, table=table, index=replace(case.index, data=data))
    assert torch.equal(bare.scores(pool)[:, :480], want[:, :480])


@pytest.mark.case("Pool must save work")
def test_pool_bounds_the_memory_touched() -> None:
    """A row with a pool of 64 blocks touches a few pages of memory for each, not the whole index;
    a row without one does (control)."""
    entries = 1 << 18
    case = index_case([entries - 1], [1], entries=64)
    size = entries // 64 * case.index.data.shape[1]
    memory = mmap.mmap(-1, size)
    memory.madvise(mmap.MADV_NOHUGEPAGE)
    data = torch.frombuffer(memory, dtype=torch.uint8).view(-1, case.index.data.shape[1])
    table = torch.randperm(len(data))[None].int()
    case = replace(case, index=replace(case.index, data=data), table=table)
    pool = pool_of([sorted(torch.randperm(entries // 8)[:64].tolist())], width=64)
    assert page_faults(lambda: case.scores(pool)) < 64 * 4 + 300
    assert page_faults(case.scores) > size // mmap.PAGESIZE - 500


def page_faults(call) -> int:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    call()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


# ---- Runs, batches and threads


@pytest.mark.case("Self-consistency")
def test_twenty_runs(device) -> None:
    case = index_case([4100 - 129], [129], device=device)
    want = case.scores()
    assert all(torch.equal(case.scores(), want) for _ in range(19))


@pytest.mark.case("Batch invariance")
@pytest.mark.parametrize("mates", [1, 31, 127])
def test_batch_mates_do_not_matter(mates: int, device) -> None:
    """A row's bits do not depend on the batch, on the rows around it, or on the threads."""
    lengths = [1200, *torch.randint(0, 600, (mates,)).tolist()]
    case = index_case(lengths, [2] * len(lengths), page_size=32, device=device)
    query = fc.IndexQuery(case.query.codes[:2], case.query.scales[:2])
    alone = replace(
        case,
        query=query,
        weights=case.weights[:2],
        batch=fc.Batch.build([1200], [2]),
        table=case.table[:1],
    )
    want = alone.scores()
    assert torch.equal(case.scores()[:2], want)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        assert torch.equal(case.scores()[:2], want)
    finally:
        torch.set_num_threads(threads)
