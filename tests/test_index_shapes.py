"""index, select and pools on CUDA, at the shapes that decide how a launch is cut, against the CPU.

Run with --device=cuda; the stage tests take the device fixture and hold for the rest.
"""

from dataclasses import replace

import pytest
import torch

import flash_csa as fc
from index_case import assert_same_list, index_case, moved, random_table, section, select

CPU = torch.device("cpu")
SEEDS = range(6)


@pytest.fixture(autouse=True)
def _needs_cuda(device):
    if device.type != "cuda":
        pytest.skip("compares CUDA with the CPU: --device=cuda")


def rows_of(lengths: list[int], page_size: int = 64) -> tuple[fc.Batch, torch.Tensor]:
    """A request of one row for each number of visible entries, which is positive."""
    batch = fc.Batch.decode([n - 1 for n in lengths])
    return batch, random_table(batch, max(lengths), page_size)


def same_on_both(run, device) -> None:
    """run(device) gives lists; those of the device are the CPU's."""
    for got, want in zip(run(device), run(CPU), strict=True):
        if want is not None:
            assert_same_list(moved(got, CPU), want)


def same_scores(case, device, pool: fc.Pool | None = None) -> None:
    got, want = replace(case, device=device).scores(pool), case.scores(pool)
    assert torch.equal(got.view(torch.int32), want.view(torch.int32))


def near_scores(case, device) -> torch.Tensor:
    """FP8 scores on the device, within the rounding of FP32 sums of those of the CPU; bits that do
    not change."""
    there, seen = replace(case, device=device), case.visible()
    got, want = there.scores(), case.scores()
    largest = replace(case, weights=case.weights.abs()).scores()[seen].abs().amax()
    assert ((got - want).abs()[seen] <= 1e-5 * largest).all()
    assert torch.equal(got[~seen], want[~seen])  # poison
    assert torch.equal(there.scores().view(torch.int32), got.view(torch.int32))
    return got


# ---- index_scores


@pytest.mark.case("Head counts and real dispatch")
@pytest.mark.parametrize("heads", [1, 3, 8, 31, 51, 64, 93, 128])
def test_heads(heads: int, device) -> None:
    """Blocks of eight rows, fewer where the queries of many heads would not fit."""
    same_scores(index_case([500, 40, 0, 190], [1, 21, 9, 2], heads=heads), device)


@pytest.mark.parametrize("heads", [1, 3, 8, 9, 31, 51, 64, 93, 128])
@pytest.mark.parametrize("query_record", ["IndexFp4", "IndexFp8"])
def test_fp8_heads(heads: int, query_record: str, device) -> None:
    options = {"heads": heads, "record": "IndexFp8", "query_record": query_record}
    near_scores(index_case([500, 40, 0, 190], [1, 21, 9, 2], **options), device)


@pytest.mark.parametrize("page_size", [1, 16, 61, 256])
def test_fp8_bits_do_not_depend_on_the_cut(page_size: int, device) -> None:
    """Rows alone, together and in pools, pages of any size: a score is that of its key and row."""
    case = index_case([700, 90], [3, 17], record="IndexFp8", page_size=page_size, device=device)
    scores, seen = near_scores(replace(case, device=CPU), device), case.visible()
    for row in (0, 2, 3, 19):
        request = int(case.batch.row_request[row])
        query = case.query
        alone = replace(
            case,
            query=fc.IndexQuery(query.codes[row : row + 1], query.scales[row : row + 1]),
            weights=case.weights[row : row + 1],
            batch=fc.Batch.decode([int(case.batch.positions[row])]),
            table=case.table[request : request + 1],
        )
        assert torch.equal(alone.scores()[0][seen[row]], scores[row][seen[row]])
    pool = fc.Pool(torch.arange(0, 60, 3, dtype=torch.int32).repeat(20, 1), torch.full((20,), 20))
    pool = replace(pool, counts=pool.counts.int())
    columns = (pool.blocks[:, :, None] * 8 + torch.arange(8)).flatten(1).long()
    inside = case.visible(pool)
    want = scores.gather(1, columns)
    assert torch.equal(case.scores(pool)[inside], want[inside])


@pytest.mark.parametrize("spread", [0, 20, 60, 200])
def test_fp8_keys_with_wide_queries(spread: int, device) -> None:
    """FP4 queries whose groups' exponents differ by as much, beyond what FP16 holds, and NaN."""
    case = index_case([300], [2], record="IndexFp8", query_record="IndexFp4")
    case.query.scales.view(torch.uint8).random_(120 - spread // 2, 121 + spread // 2)
    near_scores(case, device)
    case.query.scales.view(torch.uint8)[0, 5] = 0xFF
    scores = replace(case, device=device).scores()
    assert scores[0][case.visible()[0]].isnan().all() and not scores[1].isnan().any()


def test_scales_of_every_size(device) -> None:
    """NaN, zero, overflow and underflow of scale products."""
    case = index_case([700, 70], [2, 9], heads=16)
    case.index.data[:, 64 * case.index.page_size :].random_(0, 256)
    case.query.scales.view(torch.uint8)[::2].random_(0, 256)
    same_scores(case, device)
    assert case.scores().isnan().any()


def with_exponents(case, keys: range, queries: range):
    """The case with UE8M0 scales drawn from the ranges."""
    first = 64 * case.index.page_size
    payload = case.index.data[:, first : first + 4 * case.index.page_size]
    payload.copy_(torch.randint(keys.start, keys.stop, payload.shape, dtype=torch.uint8))
    case.query.scales.view(torch.uint8).random_(queries.start, queries.stop)
    return case


@pytest.mark.parametrize("rows", [1, 2, 3, 15, 40])
@pytest.mark.parametrize(
    "keys, queries", [(1, 1), (2, 3), (4, 4), (5, 4), (4, 5), (12, 12), (17, 1)]
)
def test_largest_sums(keys: int, queries: int, rows: int, device) -> None:
    """Codes of 6 and one of 0.5: sums of the most bits, with exponents that differ ever more.

    An accumulator that keeps fewer bits than the sum, or folds what it may not, loses the 0.5.
    """
    case = index_case([700], [rows])
    case.index.data[:, : 64 * 64] = 0x77
    case.index.data[:, 5 : 64 * 64 : 64] = 0x71
    case.query.codes.fill_(0x77)
    case.query.codes[:, ::3, 7] = 0x17
    case.query.codes[:, 1::3, 16:32] = 0xFF
    case.weights.abs_()
    same_scores(with_exponents(case, range(127, 127 + keys), range(120, 120 + queries)), device)


@pytest.mark.parametrize("border", [95, 96, 159, 160])
@pytest.mark.parametrize("query_border", [106, 107, 147, 148])
def test_borders_of_plain_scales(border: int, query_border: int, device) -> None:
    """Scales from which on powers of two no longer leave the sums of a score, and both weights."""
    keys, queries = range(border - 1, border + 2), range(query_border - 1, query_border + 2)
    for size in (0.0, 2.0**-41, 2.0**-40, 1.0, 2.0**6, 2.0**7, torch.inf, torch.nan):
        case = with_exponents(index_case([300, 90], [1, 4]), keys, queries)
        case.weights.copy_(torch.randn_like(case.weights).sign())
        case.weights[:, 3] = size
        same_scores(case, device)


@pytest.mark.parametrize("page_size", [8, 16, 32, 64, 128, 256])
@pytest.mark.parametrize("rows", [1, 5, 33])
def test_units_at_every_border(rows: int, page_size: int, device) -> None:
    """Lengths around units of 128 keys, holes in the table, requests of one row beside others."""
    for length in (1, 7, 8, 31, 32, 127, 128, 129, 255, 257, 1025):
        case = index_case([length - 1, 700, 0], [rows, 1, 2], page_size=page_size, heads=20)
        case.table[:, 1::3] = -1
        same_scores(case, device)


@pytest.mark.parametrize("page_size", [1, 2, 61, 69, 256])
def test_page_sizes_in_pools(page_size: int, device) -> None:
    case = index_case([3000, 1500], [1, 5], page_size=page_size, heads=8)
    case.table[:, ::5] = -1
    blocks = torch.arange(375, dtype=torch.int32).repeat(6, 1)
    blocks[:, 300:] = -1
    same_scores(case, device, fc.Pool(blocks, torch.full((6,), 300, dtype=torch.int32)))


def test_rows_beyond_a_grid_dimension(device) -> None:
    """70,001 rows of one request and of 70,001 requests."""
    same_scores(index_case([0], [70_001], entries=192, heads=1), device)
    same_scores(index_case([9] * 70_001, [1] * 70_001, page_size=4, heads=1), device)


@pytest.mark.case("Output offset and stride")
def test_scores_beyond_4_gib(device) -> None:
    """Rows 2^30 elements apart."""
    case = index_case([3000], [3], device=device)
    wide = torch.empty(3 << 30, device=device)
    out = wide.view(3, 1 << 30)[:, : case.entries]
    out.fill_(-12345.0)
    assert torch.equal(case.scores(out=out), case.scores())
    batch, table = rows_of([case.entries] * 3)
    want, _ = select(out.cpu(), batch, 64, table=table)
    got, _ = select(out, batch, 64, table=table, device=device)
    assert_same_list(got, want)


# ---- select


@pytest.mark.parametrize("pool_blocks", [0, 2048])
@pytest.mark.parametrize("num_sms", [0, 1, 20, 132, 1000])
def test_pieces_of_a_row(num_sms: int, pool_blocks: int, device) -> None:
    """Rows of very different lengths, cut into as many pieces as the workspace has room for."""
    lengths = [300_001, 9000, 1, 123_456]
    batch, table = rows_of(lengths)
    table[0, 100:110] = -1
    scores = torch.randn(4, table.shape[1] * 64).mul(50).round()  # ties across pieces
    options = {"k": 512, "pool_blocks": pool_blocks}

    def run(where):
        return fc.select(
            scores.to(where),
            moved(batch, where),
            schedule=section(moved(batch, where), table.shape[1] * 64, 1),
            block_table=table.to(where),
            ratio=1,
            page_size=64,
            workspace=fc.workspace("select", device=where, num_sms=num_sms, **options),
            **options,
        )

    same_on_both(run, device)


@pytest.mark.parametrize("k", [1, 65_535, 65_536])
def test_extreme_k(k: int, device) -> None:
    batch, table = rows_of([200_000, 65_536, 70_000, 5])
    scores = torch.randn(4, table.shape[1] * 64)
    same_on_both(
        lambda where: select(scores, batch, k, table=table, pool_blocks=k, device=where), device
    )


@pytest.mark.parametrize("columns", [1 << 21, (1 << 21) + 8 * 512 + 1])
def test_two_million_columns(columns: int, device) -> None:
    batch, table = rows_of([columns, columns - 1, columns // 3])
    scores = torch.randn(3, table.shape[1] * 64)
    same_on_both(
        lambda where: select(scores, batch, 512, table=table, pool_blocks=2048, device=where),
        device,
    )


@pytest.mark.parametrize("first", [0, 1, 3])
@pytest.mark.parametrize("page_size", [1, 3, 8, 61, 256])
def test_pages_and_unaligned_rows(page_size: int, first: int, device) -> None:
    """Blocks of eight cut by pages, holes, rows of scores that start anywhere."""
    lengths = torch.randint(1, 5000, (50,)).tolist()
    batch, table = rows_of(lengths, page_size)
    table[torch.rand(table.shape) < 0.2] = -1
    table[torch.rand(table.shape) < 0.02] = 2**31 - 1
    scores = torch.randn(50, table.shape[1] * page_size + 11)[:, first:]
    options = {"table": table, "page_size": page_size, "pool_blocks": 77}
    same_on_both(lambda where: select(scores, batch, 99, device=where, **options), device)


def test_many_rows(device) -> None:
    """70,001 rows, most of them padding."""
    batch = fc.Batch.build([200, 63], [1000, 1], num_rows=70_001)
    table = random_table(batch, 1300, 64)
    scores = torch.randn(70_001, table.shape[1] * 64)
    same_on_both(
        lambda where: select(scores, batch, 16, table=table, pool_blocks=9, device=where), device
    )


@pytest.mark.case("Rank-identical top-k")
def test_fifty_runs_beside_other_work(device) -> None:
    """60 % ties, in pieces and whole, while another stream keeps the GPU busy."""
    batch, table = rows_of([131_072, 40_000])
    scores = torch.randn(2, 131_072)
    scores[torch.rand(scores.shape) < 0.6] = 0.5
    want = select(scores, batch, 512, table=table, pool_blocks=512)
    side, busy = torch.cuda.Stream(), torch.randn(4096, 4096, device=device)
    for _ in range(50):
        with torch.cuda.stream(side):
            busy @ busy
        got = select(scores, batch, 512, table=table, pool_blocks=512, device=device)
        for one, other in zip(got, want, strict=True):
            assert_same_list(one, other)


# ---- index_select


@pytest.mark.parametrize("rows", [1, 2, 7, 1000])
@pytest.mark.parametrize("record", ["IndexFp4", "IndexFp8"])
def test_tiles_of_rows(rows: int, record: str, device) -> None:
    """Workspaces for one, a few or all rows; requests and rows sharing keys cut anywhere. FP8: the
    same lists as of the two ops."""
    case = index_case([2500, 0, 777], [3, 40, 1], num_rows=50, heads=8, record=record)
    options = {"pool_blocks": 50, "ratio": 1}
    bounds = {"max_rows": rows, "max_entries": case.entries, "k": 64, "pool_blocks": 50}

    def run(where, pool=None, **more):
        there = replace(case, device=where)
        return fc.index_select(
            *there._arguments(pool is not None),
            64,
            workspace=fc.workspace("index_select", device=where, **bounds, num_sms=0),
            pool=pool and moved(pool, where),
            **more,
        )

    if record == "IndexFp8":
        there = replace(case, device=device)
        built, pool = run(device, **options)
        want, want_pool = there.select(there.scores(), 64, pool_blocks=50)
        assert_same_list(moved(built, CPU), replace(want, scores=None))
        assert_same_list(moved(pool, CPU), replace(want_pool, scores=None))
        inside, _ = run(device, pool, ratio=1)
        want, _ = there.select(there.scores(moved(pool, CPU)), 64, pool=moved(pool, CPU))
        assert_same_list(moved(inside, CPU), replace(want, scores=None))
        return
    same_on_both(lambda where: run(where, **options), device)
    _, pool = run(CPU, **options)
    same_on_both(lambda where: run(where, pool, ratio=1), device)


def test_captured_at_one_length_replayed_at_others(device) -> None:
    """index_select in a graph, cut into pieces by capacity: equal to the CPU at every length."""
    case = index_case([99_999], [2], heads=8)
    here = replace(case, device=device)
    arguments = here._arguments(False)
    lists = fc.Selection.empty(2, 512, device, scores=True), fc.Pool.empty(2, 300, device)
    bounds = {"max_rows": 2, "max_entries": case.entries, "k": 512, "pool_blocks": 300}
    workspace = fc.workspace("index_select", device=device, num_sms=132, **bounds)

    def run():
        fc.index_select(*arguments, 512, ratio=1, pool_blocks=300, workspace=workspace, out=lists)

    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    for start in (0, 7, 511, 513, 8192, 50_000, 99_998):
        batch = fc.Batch.build([start], [2])
        arguments[3].copy_(moved(batch, device))
        graph.replay()
        want = replace(case, batch=batch).index_select(512, pool_blocks=300)
        assert_same_list(moved(lists[0], CPU), want[0])
        assert torch.equal(lists[1].blocks.cpu(), want[1].blocks)
        assert not workspace[: fc.SYNC_BYTES].any()


# ---- Pools and shards


@pytest.mark.parametrize("spread", [10, 5000, 600_000, 2**31 - 1])
@pytest.mark.parametrize("n", [0, 1, 2048, 100_000])
def test_foreign_pools(n: int, spread: int, device) -> None:
    """Ids within one bitmap and beyond; positions up to the last."""
    blocks = torch.randint(-3, spread, (5, n), dtype=torch.int64).int()
    positions = torch.tensor([2**31 - 1, 4_000_000, 9000, 7, -1], dtype=torch.int32)

    def run(where):
        out = fc.Pool.empty(5, n + 3, where)
        options = {"ratio": 1, "max_entries": 2**31 - 1, "out": out}
        return [fc.normalize_pool(blocks.to(where), positions.to(where), **options)]

    same_on_both(run, device)


@pytest.mark.parametrize("seed", SEEDS)
def test_shards_in_any_order(seed: int, device) -> None:
    """Lists with holes, repeated ids, ids beyond the table, ties, infinities and NaN."""
    torch.manual_seed(seed)
    parts, n, width = (int(torch.randint(1, high, ())) for high in (9, 3000, 2500))
    spread = [50, 3000, 200_000, 2**31 - 1][seed % 4]
    ids = torch.randint(-spread // 8 - 1, spread, (parts, 7, n)).int()
    values = torch.randn(parts, 7, n).mul(3).round()
    values[torch.rand(values.shape) < 0.05] = torch.inf
    values[torch.rand(values.shape) < 0.05] = torch.nan
    batch = fc.Batch.build([4000, 50, 160_000], [1, 2, 3], num_rows=7)
    table = random_table(batch, 4001, 8)
    table[0, 1] = -1

    def run(where):
        selection = fc.Selection.empty(7, width, where, scores=True)
        pool = fc.Pool.empty(7, width, where, scores=True)
        lists = ids.to(where), values.to(where)
        fc.merge_selections(
            *lists,
            width,
            row_request=batch.row_request.to(where),
            block_table=table.to(where),
            page_size=8,
            out=selection,
        )
        fc.merge_pools(*lists, batch.positions.to(where), ratio=1, out=pool)
        return selection, pool

    same_on_both(run, device)


@pytest.mark.parametrize(("parts", "rows", "n"), [(16, 1, 65_536), (2, 70_001, 4)])
def test_wide_merges(parts: int, rows: int, n: int, device) -> None:
    ids = torch.rand(parts, rows, 4 * n).argsort(-1)[..., :n].sort().values.int()
    values = torch.randn(parts, rows, n)
    positions = torch.randint(-1, 32 * n, (rows,)).int()

    def run(where):
        out = fc.Pool.empty(rows, n, where, scores=True)
        lists = ids.to(where), values.to(where)
        return [fc.merge_pools(*lists, positions.to(where), ratio=1, out=out)]

    same_on_both(run, device)
