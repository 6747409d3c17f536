"""Sizes on the host: schedules, workspaces, rotation tables."""

import torch

from . import _C

SYNC_BYTES: int = _C.SYNC_BYTES


def default_num_sms(device: torch.device | str = "cpu") -> int:
    """Workers of a device: the SMs of a GPU, PyTorch's threads on the CPU."""
    device = torch.device(device)
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).multi_processor_count
    return torch.get_num_threads()


def schedule_size(*, num_sms: int, max_rows_total: int) -> int:
    """int32 words of one section of a schedule."""
    return _C.schedule_size(num_sms, max_rows_total)


def workspace_bytes(
    op: str,
    *,
    max_rows: int,
    heads: int = 0,
    k: int = 0,
    max_entries: int = 0,
    pool_blocks: int = 0,
    num_sms: int = 1,
) -> int:
    """Bytes of workspace that an op needs for any batch within these bounds.

    Args:
        op: attend, index_scores, select, index_select or compress.
        max_rows: query rows of a step. heads: attention heads. k: top-k.
        max_entries: entries of the longest request. pool_blocks: width of the pool to build.
        num_sms: as given to `schedule`.
    """
    return _C.workspace_bytes(op, max_rows, heads, k, max_entries, pool_blocks, num_sms)


def workspace(op: str, *, device: torch.device | str = "cpu", **bounds: int) -> torch.Tensor:
    """A workspace, u8, counters zeroed. One per stream, shared by all ops (take the largest)."""
    size = workspace_bytes(op, **{"max_rows": 1, **bounds})
    return torch.zeros(size, dtype=torch.uint8, device=device)
