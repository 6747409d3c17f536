"""attend with BF16 output where two blocks of 64 heads share the conversion of records."""

from dataclasses import replace

import pytest
import torch

import flash_csa
from attend_data import assert_close, filled_pages, random_case, run, same
from reference_data import randn

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
