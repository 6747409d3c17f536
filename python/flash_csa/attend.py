"""Attend: sparse attention over window and compressed records, and merging of partial results."""

import torch

from ._explain import explained
from .records import Pages, flat
from .select import Selection
from .sizes import workspace as new_workspace
from .step import Window
from .validate import ops as _ops

SOFTMAX_SCALE = 512**-0.5


@explained()
def attend(
    q: torch.Tensor,
    *,
    main: Pages | None = None,
    selection: Selection | None = None,
    window_pages: Pages | None = None,
    window: Window | None = None,
    contiguous: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None,
    sink: torch.Tensor | None = None,
    softmax_scale: float = SOFTMAX_SCALE,
    derotate: tuple[torch.Tensor, torch.Tensor] | None = None,
    batch_invariant: bool = False,
    schedule: torch.Tensor,
    workspace: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
) -> torch.Tensor:
    """softmax(q . k * scale) over window records, then main records, times the same vectors.

    K and V are one dequantised vector. The sink logit enters the denominator alone. A row with
    nothing to attend gives output 0 and lse +inf.

    Args:
        q: bf16 [R, H, 512] after RoPE; any number of heads, any head stride.
        main: MainFp4, WindowFp8 or MixedFp8 pages, with `selection` or `contiguous`.
        selection: slots and lengths; slots outside [0, capacity) are absent.
        window_pages, window: WindowFp8 or MixedFp8 pages and the lists of `step_slots`.
        contiguous: (block_table i32 [B, max_pages], row_request i32 [R], n_vis i32 [R]): all
            visible entries instead of a selection (HCA).
        sink: f32 [H], natural log; +inf gives output 0, -inf has no effect.
        derotate: (positions i32 [R], cos_sin f32 [max_pos, 64]): inverse RoPE of the output.
        batch_invariant: a row's bits do not depend on its batch.
        schedule: i32 [size], the attend (or contiguous, or window) section of `schedule`.
        workspace: u8, see `workspace_bytes`; default: a new one.
        out: bf16 or f32 [R, H, 512]; default: new, bf16.
        lse: f32 [R, H], filled with the log of the sum of exponentials (natural, no sink).

    Returns:
        out.

    Raises:
        ValueError: dtype, shape, device, stride, record or page size is not as stated; no list, or
            both `selection` and `contiguous`; softmax_scale is not finite; a small `workspace`.
    """
    if out is None:
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if workspace is None:
        workspace = new_workspace("attend", device=q.device, heads=q.shape[1])
    main_data, main_record, main_page_size = flat(main)
    window_data, window_record, window_page_size = flat(window_pages)
    table, row_request, n_vis = (None, None, None) if contiguous is None else contiguous
    positions, cos_sin = (None, None) if derotate is None else derotate
    _ops.attend(
        q,
        main_pages=main_data,
        main_record=main_record,
        main_page_size=main_page_size,
        selection_slots=None if selection is None else selection.slots,
        selection_lengths=None if selection is None else selection.lengths,
        window_pages=window_data,
        window_record=window_record,
        window_page_size=window_page_size,
        window_slots=None if window is None else window.slots,
        window_lengths=None if window is None else window.lengths,
        contiguous_block_table=table,
        contiguous_row_request=row_request,
        contiguous_n_vis=n_vis,
        sink=sink,
        softmax_scale=softmax_scale,
        derotate_positions=positions,
        derotate_cos_sin=cos_sin,
        batch_invariant=batch_invariant,
        schedule=schedule,
        workspace=workspace,
        out=out,
        lse=lse,
    )
    return out


@explained()
def merge(
    outs: torch.Tensor,
    lses: torch.Tensor,
    *,
    sink: torch.Tensor | None = None,
    derotate: tuple[torch.Tensor, torch.Tensor] | None = None,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention over the union of several parts' records.

    Args:
        outs: bf16 or f32 [W, R, H, 512] partial outputs, without sink and derotation.
        lses: f32 [W, R, H], natural; +inf or -inf: the part is empty.
        sink, derotate, out, lse: as for `attend`, applied once, to the whole. Default of `out`: the
            dtype of `outs`.

    Returns:
        out.

    Raises:
        ValueError: dtype, shape, device or stride is not as stated.
    """
    if out is None:
        out = torch.empty(outs.shape[1:], dtype=outs.dtype, device=outs.device)
    positions, cos_sin = (None, None) if derotate is None else derotate
    _ops.merge(
        outs,
        lses,
        sink=sink,
        derotate_positions=positions,
        derotate_cos_sin=cos_sin,
        out=out,
        lse=lse,
    )
    return out
