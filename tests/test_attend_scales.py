"""attend: scales of FP8 records that no encoder writes, at both ends of what a byte can say."""

import pytest
import torch

from attend_data import assert_close, random_case, run
from flash_csa.reference import pages as reference_pages
from flash_csa.reference import quant
from reference_data import randn


@pytest.mark.parametrize("record", ["WindowFp8", "MixedFp8"])
def test_scales_that_no_encoder_writes(record, device):
    """From 2^-127 to 2^-8: one too small to matter may count as 0, within the bounds."""
    case = random_case(heads=4, main=(record, 16), window=None, entries=100)
    rows = quant.quantize(randn(case.main.num_slots, 512, seed=1), record)
    groups = 512 // 32 if record == "WindowFp8" else 448 // 64
    rows.scales[:, :groups] = torch.randint(0, 120, (len(rows.scales), groups))
    every = torch.arange(case.main.num_slots)
    reference_pages.write_rows(rows, case.main.data, every, record, 16)
    for dtype in (torch.float32, torch.bfloat16):
        assert_close(case, *run(case, device, dtype=dtype))


@pytest.mark.parametrize("most", [144, 220])
@pytest.mark.parametrize("heads", [4, 32, 64, 128])
@pytest.mark.parametrize("record", ["WindowFp8", "MixedFp8"])
def test_large_scales(record, heads, most, device):
    """2^17 or 2^93, in half of the groups. Queries are 0 there, so that no logit is of them."""
    case = random_case(heads=heads, main=(record, 16), window=None, entries=100)
    rows = quant.quantize(randn(case.main.num_slots, 512, seed=1), record)
    group = 32 if record == "WindowFp8" else 64
    for first in range(0, 448 // group, 2):
        rows.scales[:, first] = torch.randint(most - 4, most + 1, (len(rows.scales),))
        case.q[..., first * group : (first + 1) * group] = 0
    every = torch.arange(case.main.num_slots)
    reference_pages.write_rows(rows, case.main.data, every, record, 16)
    for dtype in (torch.float32, torch.bfloat16):
        assert_close(case, *run(case, device, dtype=dtype))
