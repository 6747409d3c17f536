"""Store: records in and out of pages; rotation and store of the window."""

import torch

from ._explain import explained
from .records import RECORDS, Pages, flat
from .validate import ops as _ops


@explained()
def store(rows: torch.Tensor, pages: Pages, slots: torch.Tensor) -> None:
    """Quantises rows and writes them to slots.

    Args:
        rows: bf16 [N, dims of the record].
        pages: written in place, any record.
        slots: i32 [N]; a slot outside [0, capacity) is skipped. No two rows may have the same one:
            whose bytes it then holds is undefined.

    Raises:
        ValueError: dtype, shape, device, stride, record or page size is not as stated.
    """
    _ops.store(rows, *flat(pages), slots)


@explained()
def load(
    pages: Pages,
    slots: torch.Tensor,
    out: torch.Tensor | None = None,
    dtype: torch.dtype = torch.bfloat16,
) -> torch.Tensor:
    """Decodes the records of slots; exact, also in BF16 (IndexFp8: FP32 alone).

    Args:
        pages: any record.
        slots: i32 [N]; an absent slot gives zeros.
        out: bf16 or f32 [N, dims]; default: a new tensor of `dtype`.

    Raises:
        ValueError: dtype, shape, device, stride, record or page size is not as stated.
    """
    if out is None:
        out = torch.empty(len(slots), RECORDS[pages.record].dims, dtype=dtype, device=slots.device)
    _ops.load(*flat(pages), slots, out)
    return out


@explained()
def rope_store(
    q: torch.Tensor,
    kv: torch.Tensor,
    window: Pages,
    slots: torch.Tensor,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    *,
    q_norm_eps: float | None = None,
) -> None:
    """Rotates q in place; rotates, quantises and stores the window vector of each row.

    Args:
        q: bf16 [R, H, 512], any head stride; the last 64 dims rotate at the row's position. With
            `q_norm_eps` (V4) each head is first divided by its RMS, which touches all dims.
        kv: bf16 [R, 512], read only.
        window: WindowFp8 or MixedFp8 pages.
        slots: i32 [R] (step_slots' window_store), no two the same; -1 skips the store, not the
            rotation.
        positions: i32 [R]; -1 leaves the row alone.
        cos_sin: f32 [max_pos, 64], see `cos_sin_table`.

    Raises:
        ValueError: dtype, shape, device, stride, record or page size is not as stated; q_norm_eps
            is negative or not finite.
    """
    _ops.rope_store(q, kv, *flat(window), slots, positions, cos_sin, q_norm_eps=q_norm_eps)
