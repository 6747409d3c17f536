"""Sizes on the host: schedules and workspaces.

Plain Python, so that torch.compile can trace it; core/schedule.h says the same to the kernels, and
a test compares the two.
"""

import torch

from . import _C
from ._explain import explained

SYNC_BYTES: int = _C.SYNC_BYTES


_WORKSPACE_OPS = ("attend", "index_scores", "select", "index_select", "compress")


def _round_up(n: int, multiple: int) -> int:
    return (n + multiple - 1) // multiple * multiple


def _not_negative(function: str, **counts: int) -> None:
    for name, count in counts.items():
        if count < 0:
            raise ValueError(f"flash_csa.{function}: {name} must be at least 0, got {count}")


@explained()
def default_num_sms(device: torch.device | str = "cpu") -> int:
    """Workers of a device: the SMs of a GPU, PyTorch's threads on the CPU."""
    device = torch.device(device)
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).multi_processor_count
    return torch.get_num_threads()


@explained()
def schedule_size(*, num_sms: int, max_rows_total: int) -> int:
    """int32 words of one section of a schedule, of `num_sms` workers and as many rows at most.

    Raises:
        ValueError: a negative number.
    """
    _not_negative("schedule_size", num_sms=num_sms, max_rows_total=max_rows_total)
    header, one_range = 8, 4
    return _round_up(header + one_range * num_sms + max_rows_total + 1, 4)


@explained()
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
    """Bytes of workspace that an op needs, at full speed, for any batch within these bounds.

    An op takes less, down to SYNC_BYTES (index_select: and the scores of one row), and then cuts
    rows into fewer pieces: slower on a GPU, the same results where they are exact.

    Args:
        op: attend, index_scores, select, index_select or compress.
        max_rows: query rows of a step. heads: attention heads. k: top-k.
        max_entries: entries of the longest request. pool_blocks: width of the pool to build.
        num_sms: as given to `schedule`.

    Raises:
        ValueError: an unknown op, a negative number.
    """
    if op not in _WORKSPACE_OPS:
        raise ValueError(
            f"flash_csa.workspace_bytes: op must be one of {', '.join(_WORKSPACE_OPS)}, got {op}"
        )
    _not_negative(
        "workspace_bytes",
        max_rows=max_rows,
        heads=heads,
        k=k,
        max_entries=max_entries,
        pool_blocks=pool_blocks,
        num_sms=num_sms,
    )
    scratch = 0
    if op == "attend":  # partial outputs and their lse, two per worker
        scratch = 2 * num_sms * min(heads, 64) * (_C.HEAD_DIM + 1) * 4
    if op in ("select", "index_select"):  # a histogram and the winners of one row per worker
        scratch = num_sms * (16384 + 8 * (k + pool_blocks))
    if op == "index_select":  # scores and block maxima of the rows that fit, at least of one
        columns = _round_up(max_entries, 256)
        row = 4 * (columns + columns // _C.POOL_BLOCK)
        scratch += min(max_rows * row, max(240 << 20, row))
    return _round_up(SYNC_BYTES + scratch, 256)


@explained()
def workspace(op: str, *, device: torch.device | str = "cpu", **bounds: int) -> torch.Tensor:
    """A workspace, u8 [workspace_bytes(op, **bounds)]. One per stream, shared by all ops (take the
    largest).

    The counters are zero, the scratch behind them is not touched. max_rows defaults to 1, num_sms
    to a GPU's own; the CPU's ops use no scratch.
    """
    if torch.device(device).type == "cuda":
        bounds = {"num_sms": default_num_sms(device), **bounds}
    size = workspace_bytes(op, **{"max_rows": 1, **bounds})
    space = torch.empty(size, dtype=torch.uint8, device=device)
    space[:SYNC_BYTES].zero_()
    return space
