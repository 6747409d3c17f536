"""index_scores of the only row of a launch, which has a kernel of its own on CUDA."""

from dataclasses import replace

import pytest
import torch

from index_case import CPU, assert_same_list, index_case
from test_index_shapes import _needs_cuda, same_scores, with_exponents  # noqa: F401


@pytest.mark.parametrize("heads", [1, 5, 8, 13, 16, 21, 32])
@pytest.mark.parametrize("length", [1, 63, 64, 65, 300, 1023, 40_000])
def test_lengths(length: int, heads: int, device) -> None:
    same_scores(index_case([length - 1], [1], heads=heads), device)


@pytest.mark.case("Page geometry")
@pytest.mark.parametrize("page_size", [8, 16, 32, 64, 128, 256])
def test_page_sizes(page_size: int, device) -> None:
    """Pages that are parts of what is copied at once, and whole ones; some are absent."""
    for length in (7, 257, 2000):
        case = index_case([length - 1], [1], page_size=page_size, heads=16)
        same_scores(case, device)
        case.table[0, torch.rand(case.table.shape[1]) < 0.4] = -1
        case.table[0, torch.rand(case.table.shape[1]) < 0.1] = 2**31 - 1
        same_scores(case, device)


@pytest.mark.parametrize("heads", [8, 32])
@pytest.mark.parametrize("keys", range(1, 6))
@pytest.mark.parametrize("queries", range(1, 6))
def test_exponents(queries: int, keys: int, heads: int, device) -> None:
    """Of a few kinds: chunks that fold lie beside those that do not."""
    case = index_case([3000], [1], heads=heads)
    scales = case.index.data[:, 64 * 64 :].clone()
    with_exponents(case, range(127, 127 + keys), range(120, 120 + queries))
    same_scores(case, device)
    case.index.data[::3, 64 * 64 :] = scales[::3]
    same_scores(case, device)


@pytest.mark.parametrize("entries", [600_001, 1_048_576])
def test_rings_go_round(entries: int, device) -> None:
    """More entries than all warps hold at once."""
    case = index_case([entries - 1], [1], heads=8)
    with_exponents(case, range(126, 129), range(125, 127))
    same_scores(case, device)
    got, want = (
        replace(case, device=where).index_select(512, pool_blocks=128) for where in (device, CPU)
    )
    for here, there in zip(got, want, strict=True):
        assert_same_list(here, there)
