"""normalize_pool, merge_selections, merge_pools: foreign pools and lists of several shards."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import flash_csa as fc
from flash_csa.reference import ops as ref
from index_case import assert_same_list, index_case, moved, random_table, select

CPU = torch.device("cpu")


def normalized(blocks: torch.Tensor, positions: torch.Tensor, width: int, device=CPU, **options):
    out = fc.Pool(
        *(
            torch.full(size, -777, dtype=torch.int32, device=device)
            for size in ((len(blocks), width), (len(blocks),))
        )
    )
    options = {"ratio": 1, "max_entries": 1 << 20, **options}
    fc.normalize_pool(blocks.to(device), positions.to(device), out=out, **options)
    return moved(out, CPU)


@pytest.mark.case("Block list contract")
@pytest.mark.parametrize("n", [0, 1, 8, 9, 100, 5000])
def test_foreign_lists(n: int, device) -> None:
    """Shuffled, repeated, padded by -1 or by repetition: the ascending unique visible blocks."""
    visible = -(-n // 8)
    base = torch.randint(0, max(visible, 1) + 3, (40,))
    lists = torch.stack(
        [
            base[torch.randperm(40)],
            torch.cat([base[:20], torch.full((20,), -1)]),
            torch.cat([base[:20].sort().values, base[:20].max().expand(20)]),
            torch.full((40,), -1),
            torch.tensor([2**31 - 1, -(2**31)] * 20),
        ]
    ).int()
    got = normalized(lists, torch.full((5,), n - 1, dtype=torch.int32), 50, device)
    for row, blocks in enumerate(lists.tolist()):
        want = sorted({b for b in blocks if 0 <= b < visible})
        assert got.blocks[row].tolist() == want + [-1] * (50 - len(want))
        assert got.counts[row] == len(want)


@pytest.mark.case("Block list contract")
def test_own_pools_are_normal(device) -> None:
    """A pool from select stays as it is; strict and capacity decide what is visible."""
    batch = fc.Batch.decode([999, 70, 3])
    table = random_table(batch, 1000, 64)
    _, pool = select(torch.randn(3, 1024), batch, 16, table=table, pool_blocks=20, device=device)
    again = normalized(pool.blocks, batch.positions, 20, device)
    assert torch.equal(again.blocks, pool.blocks) and torch.equal(again.counts, pool.counts)
    lists = torch.arange(8, dtype=torch.int32)[None]
    at = torch.tensor([31], dtype=torch.int32)
    assert normalized(lists, at, 8, device, ratio=2).counts == 2  # 16 entries
    assert normalized(lists, at + 2, 8, device, ratio=2).counts == 3
    assert normalized(lists, at + 2, 8, device, ratio=2, strict=True).counts == 2
    assert normalized(lists, at, 8, device, max_entries=9).counts == 2
    with pytest.raises(ValueError, match="blocks must have at most 7 columns"):
        normalized(lists, at, 7, device)


@pytest.mark.case("Block list contract")
def test_foreign_lists_of_long_contexts(device) -> None:
    """Block numbers far apart: no part of the context starts the list anew."""
    lists = torch.tensor([[500_000, 3, 262_144, 262_143, 500_000, 1_000_000]], dtype=torch.int32)
    at = torch.tensor([(1 << 22) - 1], dtype=torch.int32)
    got = normalized(lists, at, 6, device, max_entries=1 << 22)
    assert got.blocks.tolist() == [[3, 262_143, 262_144, 500_000, -1, -1]]
    assert got.counts.tolist() == [4]


def test_a_pool_is_for_its_row_alone(device) -> None:
    """Rows of one request with pools of their own: scores and lists are the flat ones inside."""
    case = index_case([300, 500], [5, 3], heads=8, device=device)
    blocks = torch.stack([torch.randperm(37)[:6].sort().values for _ in range(8)]).int()
    pool = fc.Pool(blocks, torch.full((8,), 6, dtype=torch.int32))
    flat = case.scores()
    columns = (blocks[:, :, None] * 8 + torch.arange(8)).flatten(1).long()
    inside = case.scores(pool)
    assert torch.equal(inside, flat.gather(1, columns))
    masked = torch.full_like(flat, torch.nan).scatter(1, columns, inside)
    want, _ = case.select(masked, 16)
    assert_same_list(case.select(inside, 16, pool=pool)[0], want)
    assert_same_list(case.index_select(16, pool=pool)[0], want)


def assert_merges(ids: torch.Tensor, width: int, batch: fc.Batch, entries: int, device) -> None:
    """Of lists i32 [parts, R, n] with ties, infinities and NaN: those of the reference."""
    values = torch.tensor([0.0, -0.0, 1, 2, -1, torch.inf, -torch.inf, torch.nan])
    scores = values[torch.randint(0, 8, ids.shape)]
    table = random_table(batch, entries, 8)
    table[0, 1] = -1
    here = {"row_request": batch.row_request, "block_table": table}
    there = {name: tensor.to(device) for name, tensor in here.items()}
    out = fc.Selection.empty(ids.shape[1], width, device, scores=True)
    lists = (ids.to(device), scores.to(device))
    got = fc.merge_selections(*lists, width, **there, page_size=8, out=out)
    want = ref.merge_selections(ids, scores, width, **here, page_size=8)
    assert_same_list(moved(got, CPU), want)
    options = {"ratio": 1, "pool_blocks": width}
    out = fc.Pool.empty(ids.shape[1], width, device, scores=True)
    got = fc.merge_pools(*lists, batch.positions.to(device), **options, out=out)
    want = ref.merge_pools(ids, scores, batch.positions, **options)
    assert_same_list(moved(got, CPU), want)


@given(st.integers(1, 4), st.integers(1, 12), st.integers(1, 12), st.integers(0, 10**6))
@settings(max_examples=60, deadline=None)
def test_merges_are_the_reference(device, parts: int, n: int, width: int, seed: int) -> None:
    """Lists with holes and repeated ids."""
    torch.manual_seed(seed)
    batch = fc.Batch.build([159, 50], [1, 1], num_rows=3)  # the last row is padding
    ids = torch.randint(-2, 20, (parts, 3, n), dtype=torch.int32)
    assert_merges(ids, width, batch, 160, device)


def test_merges_of_long_contexts(device) -> None:
    """Ids far apart, and neighbours."""
    batch = fc.Batch.decode([299_999, 70_000])
    ids = torch.randint(0, 300_000, (3, 2, 100), dtype=torch.int32)
    ids[1] = ids[0] + 1
    assert_merges(ids, 64, batch, 300_001, device)


@pytest.mark.parametrize("shards", [1, 2, 7])
def test_shards_give_the_whole(shards: int, device) -> None:
    """Pages dealt out to shards, -1 where a page is elsewhere: merged lists equal one selection."""
    batch = fc.Batch.build([6000, 900, 4], [2, 1, 3], num_rows=8)
    table = random_table(batch, 6100, 16)
    scores = torch.randn(8, table.shape[1] * 16).mul(8).round()  # ties across shards
    options = {"page_size": 16, "pool_blocks": 64, "device": device}
    want, want_pool = select(scores, batch, 200, table=table, **options)
    owner = torch.randint(0, shards, table.shape)
    lists, pools = zip(
        *(
            select(scores, batch, 200, table=table.masked_fill(owner != s, -1), **options)
            for s in range(shards)
        ),
        strict=True,
    )

    def stacked(parts, name):
        return torch.stack([getattr(part, name) for part in parts]).to(device)

    got = fc.merge_selections(
        stacked(lists, "positions"),
        stacked(lists, "scores"),
        200,
        row_request=batch.row_request.to(device),
        block_table=table.to(device),
        page_size=16,
        out=fc.Selection.empty(8, 200, device, scores=True),
    )
    assert_same_list(moved(got, CPU), want)
    pool = fc.merge_pools(
        stacked(pools, "blocks"),
        stacked(pools, "scores"),
        batch.positions.to(device),
        ratio=1,
        out=fc.Pool.empty(8, 64, device, scores=True),
    )
    assert_same_list(moved(pool, CPU), want_pool)
