"""Reindex: what index_select finds inside pools, against the flat scores of the CPU back end."""

from dataclasses import replace

import pytest
import torch

import flash_csa as fc
from index_case import CPU, IndexCase, assert_same_list, index_case


def random_pool(case: IndexCase, width: int) -> fc.Pool:
    """Up to `width` random blocks of every row, the newest among them."""
    blocks = torch.full((case.batch.num_rows, width), -1, dtype=torch.int32)
    counts = torch.zeros(case.batch.num_rows, dtype=torch.int32)
    for row, visible in enumerate(case.n_vis()):
        every = torch.randperm(-(-visible // 8))
        kept = every[every != len(every) - 1][: width - 1]
        kept = torch.cat([kept, torch.tensor([len(every) - 1])]).sort().values
        blocks[row, : len(kept)], counts[row] = kept.int(), len(kept)
    return fc.Pool(blocks, counts)


def spread_scales(case: IndexCase, low: int, high: int) -> None:
    """Exponents of the keys' groups, as bytes from low to high."""
    case.index.data[:, 64 * case.index.page_size :].random_(low, high)


def assert_flat(case: IndexCase) -> None:
    seen = case.visible()
    got, want = case.scores()[seen], replace(case, device=CPU).scores()[seen]
    torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)


def assert_reindex(case: IndexCase, pool: fc.Pool, k: int) -> None:
    flat = replace(case, device=CPU).scores()
    columns = (pool.blocks[:, :, None] * 8 + torch.arange(8)).flatten(1)
    inside = torch.zeros(len(flat), flat.shape[1] + 8, dtype=torch.bool)
    inside.scatter_(
        1, columns.clamp(max=flat.shape[1]).where(columns >= 0, flat.shape[1]).long(), True
    )
    masked = flat.where(inside[:, : flat.shape[1]], torch.nan)
    want, _ = replace(case, device=CPU).select(masked, k)
    got, _ = case.index_select(k, pool=pool)
    assert_same_list(got, want)


@pytest.mark.parametrize("blocks", [1, 6, 300, 2048])
@pytest.mark.parametrize("page_size", [8, 64])
def test_pools_of_any_size(blocks: int, page_size: int, device) -> None:
    case = index_case([20_000, 700], [2, 3], page_size=page_size, device=device)
    assert_reindex(case, random_pool(case, blocks), 512)


@pytest.mark.parametrize("blocks", [6, 300])
@pytest.mark.parametrize(("low", "high"), [(90, 165), (40, 215)])
def test_exponents_far_apart(low: int, high: int, blocks: int, device) -> None:
    """Sums that fit no narrower format than FP32, in any order but the documented one."""
    case = index_case([3000, 700], [2, 1], device=device)
    spread_scales(case, low, high)
    assert_reindex(case, random_pool(case, blocks), 64)
    assert_flat(case)


@pytest.mark.parametrize("of_queries", [(30, 60), (118, 130), (190, 220)])
@pytest.mark.parametrize("of_keys", [(0, 30), (30, 60), (190, 220), (225, 255), (0, 256)])
def test_exponents_at_the_ends(of_keys, of_queries, device) -> None:
    """Sums that are subnormal, or overflow on the way, or hold a NaN scale."""
    case = index_case([3000, 700], [2, 1], device=device)
    spread_scales(case, *of_keys)
    case.query.scales.view(torch.uint8).random_(*of_queries)
    assert_reindex(case, random_pool(case, 300), 64)
    assert_flat(case)


def test_sums_that_overflow_on_the_way(device) -> None:
    """Powers of two that would come last leave sums finite that are not."""
    case = index_case([3000, 700], [2, 1], device=device)
    spread_scales(case, 215, 224)
    case.query.scales.view(torch.uint8).random_(145, 148)
    case.weights.copy_(60 * case.weights.sign())
    scores = replace(case, device=CPU).scores()[case.visible()]
    assert scores.isinf().any() and scores.isfinite().any() and scores.isnan().any()
    assert_flat(case)
    assert_reindex(case, random_pool(case, 300), 64)


# Rows of which a cluster of 16, 8, 2 or 1 takes each.
CLUSTERS = [1, 12, 40, 140]


def fold(case: IndexCase) -> None:
    """Exponents of keys and queries so near that integers hold them."""
    spread_scales(case, 124, 128)
    case.query.scales.view(torch.uint8).random_(124, 128)


@pytest.mark.parametrize("heads", [3, 32, 33, 64])
@pytest.mark.parametrize("rows", CLUSTERS)
def test_exponents_that_fold(rows: int, heads: int, device) -> None:
    case = index_case([3000] * rows, [1] * rows, heads=heads, device=device)
    fold(case)
    assert_reindex(case, random_pool(case, 300), 512)


@pytest.mark.parametrize("rows", CLUSTERS)
def test_a_few_exponents_that_do_not_fold(rows: int, device) -> None:
    case = index_case([3000] * rows, [1] * rows, heads=8, device=device)
    fold(case)
    scales = case.index.data[:, 64 * case.index.page_size :]
    scales[torch.rand(scales.shape) < 0.001] = 119
    assert_reindex(case, random_pool(case, 300), 512)


@pytest.mark.parametrize("kinds", [1, 9])
@pytest.mark.parametrize("rows", CLUSTERS)
def test_keys_of_a_few_kinds(rows: int, kinds: int, device) -> None:
    """Ties of more entries than are compared with each other."""
    case = index_case([3000] * rows, [1] * rows, heads=8, device=device)
    fold(case)
    codes = case.index.data[:, : 64 * case.index.page_size].view(-1, case.index.page_size, 64)
    codes.copy_(torch.randint(0, kinds, codes.shape[:2])[:, :, None] * 17)
    spread_scales(case, 127, 128)
    assert_reindex(case, random_pool(case, 300), 512)


@pytest.mark.parametrize("k", [30, 512])
@pytest.mark.parametrize("rows", CLUSTERS)
def test_scores_near_each_other(rows: int, k: int, device) -> None:
    """More in a bin of keys than are compared with each other, and a few far above it."""
    case = index_case([2000] * rows, [1] * rows, heads=2, device=device)
    spread_scales(case, 127, 128)
    case.query.scales.view(torch.uint8).fill_(127)
    size = case.index.page_size
    codes = case.index.data[:, : 64 * size].view(-1, size, 64)
    codes[:, :, :16] = 0x77  # all of them sixes: with the first head 192
    case.query.codes[:, :, :16] = torch.tensor([0x22, 0], dtype=torch.uint8)[:, None]
    case.query.codes[:, 0, 16:] = 0
    case.weights.copy_(torch.tensor([1, 2**-11]))  # the second head tells them apart
    case.index.data[:, 64 * size :].view(-1, size, 4)[:, ::47, 0] = 128
    assert_reindex(case, random_pool(case, 300), k)


@pytest.mark.parametrize("steps", [2, 3, 24])
@pytest.mark.parametrize("rows", CLUSTERS)
def test_scores_that_rise(rows: int, steps: int, device) -> None:
    """The best entries are neighbours: bounds of blocks that expect their share do not hold."""
    case = index_case([3000] * rows, [1] * rows, heads=8, device=device)
    fold(case)
    scales = case.index.data[:, 64 * case.index.page_size :]
    for pages in case.table:
        for i, page in enumerate(pages.tolist()):
            scales[page] = 127 - steps + steps * i // len(pages)
    case.weights.abs_()
    assert_reindex(case, random_pool(case, 300), 512)


@pytest.mark.parametrize("k", [1, 300, 1000, 2048])
@pytest.mark.parametrize("rows", [1, 40, 140])
def test_selections_of_any_size(rows: int, k: int, device) -> None:
    case = index_case([3000] * rows, [1] * rows, heads=2, device=device)
    fold(case)
    assert_reindex(case, random_pool(case, 300), k)


def test_many_rows_with_long_pools(device) -> None:
    """So many that each has few workers, which go through their stages several times."""
    case = index_case([40_000], [300], heads=2, device=device)
    assert_reindex(case, random_pool(case, 2048), 512)


@pytest.mark.parametrize("blocks", [400, 2048])
@pytest.mark.parametrize("page_size", [8, 64])
def test_many_rows_of_few_entries(blocks: int, page_size: int, device) -> None:
    """Where all entries are scored, and those outside of the pools hidden."""
    case = index_case([4000], [300], heads=2, page_size=page_size, device=device)
    assert_reindex(case, random_pool(case, blocks), 512)
