"""Compress: projected kv and gate to main records, index records and tail rows."""

from dataclasses import dataclass

import torch

from ._explain import explained
from .batch import Batch
from .records import Pages, flat
from .validate import ops as _ops


@dataclass(frozen=True)
class Tail:
    """Rows of open groups: f32 [tail_slots, 2, ring, width] (kv, gate).

    The row of position p is p % ring; ring >= span + max_draft, span = ratio, or 8 at overlapping
    ratio 4.
    """

    rows: torch.Tensor


@explained()
def compress(
    kv: torch.Tensor,
    batch: Batch,
    entry_slots: torch.Tensor,
    *,
    ratio: int,
    norm_weight: torch.Tensor,
    eps: float,
    cos_sin: torch.Tensor,
    gate: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    tail: Tail | None = None,
    entry_first: torch.Tensor | None = None,
    main: Pages | None = None,
    index: Pages | None = None,
    key_weight: torch.Tensor | None = None,
    key_norm_weight: torch.Tensor | None = None,
    rotate: bool = False,
    latent_out: torch.Tensor | None = None,
    workspace: torch.Tensor | None = None,
) -> None:
    """Pools the tokens of each group that closes, and stores its main and index records.

    Per channel a softmax over the group's tokens, RMSNorm, then RoPE at the group's first
    position and quantisation; rounded to BF16 at each border. The index key is
    RMSNorm(key_weight @ latent), or at width 128 (V4) the pooled vector itself. The bytes do not
    depend on how the tokens arrive: one call, token by token, or any chunks.

    Args:
        kv, gate: f32 [R, width]; width = d, or 2 d at overlapping ratio 4 (previous-group half
            first). Ratio 1: kv bf16 [R, 512], no gate.
        batch: the rows; a padded row closes nothing.
        entry_slots: i32 [R], slot of the entry that row t closes (step_slots), else -1. A closing
            row with slot -1 computes and skips the store.
        ratio: 1, 2, 4 (overlapping) or 128.
        norm_weight: f32 [d], d = 512, or 128 for V4's index compressor.
        cos_sin: f32 [max_pos, 64] of the layer's theta.
        bias: f32 [ratio, width], added to gate by position mod ratio (V4).
        tail: rows before the batch's, read, then updated. None where no earlier row is needed.
        entry_first: i32 [B]; entries before it are stored already and stay as they are.
        main: MainFp4, WindowFp8 or MixedFp8 pages, written. index: IndexFp4 or IndexFp8 pages.
        key_weight: bf16 [128, 512]; key_norm_weight: f32 [128].
        rotate: Hadamard rotation of the index key (V4).
        latent_out: bf16 [R, d]; row t is written only where t closes an entry.

    Raises:
        ValueError: dtype, shape, device, stride, record, ratio or ring is not as stated.
    """
    main_data, main_record, main_page_size = flat(main)
    index_data, index_record, index_page_size = flat(index)
    _ops.compress(
        kv,
        *batch.flat(),
        entry_slots,
        ratio=ratio,
        norm_weight=norm_weight,
        eps=eps,
        cos_sin=cos_sin,
        gate=gate,
        bias=bias,
        tail_rows=None if tail is None else tail.rows,
        entry_first=entry_first,
        main_pages=main_data,
        main_record=main_record,
        main_page_size=main_page_size,
        index_pages=index_data,
        index_record=index_record,
        index_page_size=index_page_size,
        key_weight=key_weight,
        key_norm_weight=key_norm_weight,
        rotate=rotate,
        latent_out=latent_out,
        workspace=workspace,
    )
