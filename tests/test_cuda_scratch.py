"""Scratch of index_select on the device: the peak of one call beyond its inputs and outputs. Run
with --device=cuda."""

import pytest
import torch

import flash_csa as fc
from index_case import index_case, outputs

MIB = 1 << 20

pytestmark = pytest.mark.usefixtures("_needs_cuda")


@pytest.fixture
def _needs_cuda(device):
    if device.type != "cuda":
        pytest.skip("the device's allocations: --device=cuda")


def measured(start: int, rows: int, pool_blocks: int, device: torch.device) -> tuple[int, int]:
    """Bytes of a call's peak beyond its inputs and outputs, and bytes of the outputs."""
    case = index_case([start], [rows], heads=8, device=device)
    arguments = case._arguments(False)
    before = torch.cuda.memory_allocated()
    out = outputs(rows, 512, pool_blocks, device)
    filled = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    fc.index_select(*arguments, 512, ratio=1, pool_blocks=pool_blocks, out=out)
    return torch.cuda.max_memory_allocated() - filled, filled - before


def test_a_long_prefill_takes_256_mib(device: torch.device) -> None:
    """131,072 queries in one call: 32 GiB of scores if they were kept (control)."""
    scratch, _ = measured(0, 131_072, 0, device)
    assert MIB < scratch <= 256 * MIB < 131_072 * 65_536 * 4


def test_a_chunk_takes_one_gib_with_its_pools(device: torch.device) -> None:
    """4096 rows over 262,144 entries: scratch, selections and pools; the scores alone would be
    4 GiB (control)."""
    scratch, outputs_of = measured(262_144 - 4096, 4096, 2048, device)
    assert scratch + outputs_of <= 1024 * MIB < 4096 * 262_144 * 4
