"""index_scores of decode batches: rows that share no keys have a kernel of their own on CUDA."""

from dataclasses import replace

import pytest
import torch

from index_case import CPU, assert_same_list, index_case
from test_index_shapes import _needs_cuda, same_scores, with_exponents  # noqa: F401

LENGTHS = [300, 1, 0, 64, 5000, 65, 255, 256, 257, 31, 1023, 9, 128, 2049]


def decode_case(lengths: list[int], **options):
    """A request of one row for each number of visible entries; 0: a padded row."""
    start = [max(length - 1, 0) for length in lengths]
    rows = [int(length > 0) for length in lengths]
    return index_case(start, rows, owned=[1] * len(lengths), **options)


@pytest.mark.parametrize("count", [2, 3, 14, 200])
@pytest.mark.parametrize("heads", [1, 8, 13, 16, 24, 32, 40, 64])
def test_lengths(heads: int, count: int, device) -> None:
    case = decode_case([LENGTHS[i % len(LENGTHS)] for i in range(count)], heads=heads)
    same_scores(case, device)
    same_scores(with_exponents(case, range(126, 129), range(124, 127)), device)


def test_more_rows_than_threads(device) -> None:
    same_scores(decode_case([i * 7 % 90 for i in range(1500)], heads=8), device)


@pytest.mark.case("Page geometry")
@pytest.mark.parametrize("page_size", [8, 16, 32, 64, 128, 256])
def test_page_sizes(page_size: int, device) -> None:
    case = decode_case(LENGTHS, page_size=page_size, heads=16)
    chance = torch.rand(case.table.shape)
    case.table[chance < 0.3] = -1
    case.table[chance > 0.95] = 2**31 - 1
    same_scores(case, device)


@pytest.mark.parametrize("heads", [8, 64])
@pytest.mark.parametrize("keys", range(1, 6))
@pytest.mark.parametrize("queries", range(1, 6))
def test_exponents(queries: int, keys: int, heads: int, device) -> None:
    """Rows and chunks that fold lie beside those that do not."""
    case = decode_case([3000, 700, 1, 900], heads=heads)
    query = case.query.scales.clone()
    with_exponents(case, range(127, 127 + keys), range(120, 120 + queries))
    same_scores(case, device)
    case.query.scales[1] = query[1]
    same_scores(case, device)
    case.query.codes[0] = 0x77  # sums of the most bits
    same_scores(case, device)


@pytest.mark.parametrize("lengths", [(700_001, 300, 64_000), (3, 1_048_576)])
def test_rings_go_round(lengths: tuple[int, ...], device) -> None:
    """More entries than all warps hold at once, rows that begin inside a group's run."""
    case = with_exponents(decode_case(list(lengths), heads=8), range(126, 129), range(125, 127))
    same_scores(case, device)
    got, want = (
        replace(case, device=where).index_select(512, pool_blocks=128) for where in (device, CPU)
    )
    for here, there in zip(got, want, strict=True):
        assert_same_list(here, there)
