"""Index: quantised queries and scores over compressed positions."""

from dataclasses import dataclass

import torch

from ._explain import INT32_MAX, explained
from .batch import Batch
from .records import RECORDS, Pages, flat
from .select import Pool
from .sizes import workspace
from .validate import ops as _ops


@dataclass(frozen=True)
class IndexQuery:
    """Quantised index queries of a step.

    FP4: codes u8 [R, Hi, 64], scales i32 [R, Hi] (byte g: UE8M0 of group g). FP8, for IndexFp8
    keys: codes u8 [R, Hi, 128] E4M3, scales f32 [R, Hi].
    """

    codes: torch.Tensor
    scales: torch.Tensor

    @classmethod
    @explained(rows=(0, INT32_MAX), heads=(0, INT32_MAX))
    def empty(
        cls, rows: int, heads: int, record: str = "IndexFp4", device: torch.device | str = "cpu"
    ) -> "IndexQuery":
        """Uninitialised queries in the element and scale of `record`."""
        scale = torch.int32 if RECORDS[record].scale_kind == "UE8M0" else torch.float32
        size = (rows, heads, RECORDS[record].data_bytes)
        return cls(
            torch.empty(size, dtype=torch.uint8, device=device),
            torch.empty(size[:2], dtype=scale, device=device),
        )


@explained()
def quantize_query(
    q: torch.Tensor,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    *,
    record: str = "IndexFp4",
    rotate: bool = False,
    out: IndexQuery | None = None,
) -> IndexQuery:
    """Rotates index queries at their positions and quantises them.

    Args:
        q: bf16 [R, Hi, 128], read only. positions: i32 [R]; a padded row gives zero codes and
            scales.
        cos_sin: f32 [max_pos, 64].
        record: the element and scale of "IndexFp4" or "IndexFp8".
        rotate: Hadamard rotation after RoPE (V4).
        out: where to write; default: new tensors.

    Raises:
        ValueError: dtype, shape, device, stride or record is not as stated.
    """
    if out is None:
        out = IndexQuery.empty(q.shape[0], q.shape[1], record, q.device)
    _ops.quantize_query(
        q,
        positions,
        cos_sin,
        record=RECORDS[record].id,
        rotate=rotate,
        out_codes=out.codes,
        out_scales=out.scales,
    )
    return out


@explained()
def index_scores(
    query: IndexQuery,
    index: Pages,
    weights: torch.Tensor,
    batch: Batch,
    block_table: torch.Tensor,
    schedule: torch.Tensor,
    *,
    ratio: int,
    strict: bool = False,
    pool: Pool | None = None,
    workspace: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """score[t, j] = sum over heads of w[t, h] * max(0, q[t, h] . k[j]), FP32, for visible entries.

    Visible: j < (position + 1) // ratio (strict: position // ratio). Bit-equal on every back end
    for FP4 keys.

    Args:
        query: Hi heads of 128 dims. index: IndexFp4 or IndexFp8 pages.
        weights: f32 or bf16 [R, Hi], all factors included, may be negative.
        block_table: i32 [B, max_pages] of this ratio; -1: entries not here.
        schedule: i32 [size], the index section (with a pool: reindex) of `schedule`.
        pool: score only its blocks: column c is position 8 * blocks[c // 8] + c % 8.
        workspace: u8, see `workspace_bytes`; default: a new one.
        out: f32 [R, columns]; default: a new one.

    Returns:
        f32 [R, max_pages * page_size], or [R, 8 * pool blocks]; columns of entries that are not
        visible, or not here, are undefined.

    Raises:
        ValueError: dtype, shape, device, stride, record, ratio or page size is not as stated; FP8
            queries with FP4 keys; an `out` or `workspace` that is too small.
    """
    if out is None:
        columns = block_table.shape[1] * index.page_size
        columns = columns if pool is None else 8 * pool.blocks.shape[1]
        out = torch.empty(len(weights), columns, dtype=torch.float32, device=weights.device)
    _ops.index_scores(
        query.codes,
        query.scales,
        *flat(index),
        weights,
        *batch.flat(),
        block_table,
        schedule,
        ratio=ratio,
        strict=strict,
        pool_blocks=None if pool is None else pool.blocks,
        pool_counts=None if pool is None else pool.counts,
        workspace=_workspace(workspace, "index_scores", out),
        out=out,
    )
    return out


def _workspace(given: torch.Tensor | None, op: str, like: torch.Tensor) -> torch.Tensor:
    return workspace(op, device=like.device) if given is None else given
