"""Select: exact top-k by a total order, candidate pools, and merging of shards.

Order: larger score first, then lower position; -0.0 equals +0.0; NaN is never selected.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from . import _C
from ._explain import INT32_MAX, explained
from .batch import Batch
from .records import Pages, flat
from .sizes import workspace as new_workspace
from .validate import ops as _ops

if TYPE_CHECKING:
    from .index import IndexQuery


def _i32(device, *size: int) -> torch.Tensor:
    return torch.empty(size, dtype=torch.int32, device=device)


def _f32(wanted: bool, device, *size: int) -> torch.Tensor | None:
    return torch.empty(size, dtype=torch.float32, device=device) if wanted else None


@dataclass(frozen=True)
class Selection:
    """Selected entries of each row, by position ascending, -1 padded.

    positions, slots: i32 [R, K]. lengths: i32 [R], columns to read; a -1 inside is skipped.
    scores: f32 [R, K] or None.
    """

    positions: torch.Tensor
    slots: torch.Tensor
    lengths: torch.Tensor
    scores: torch.Tensor | None = None

    @classmethod
    @explained(rows=(0, INT32_MAX), k=(0, _C.MAX_TOP_K))
    def empty(cls, rows: int, k: int, device="cpu", *, scores: bool = False) -> "Selection":
        """Uninitialised selection of `rows` rows of `k`."""
        return cls(
            _i32(device, rows, k),
            _i32(device, rows, k),
            _i32(device, rows),
            _f32(scores, device, rows, k),
        )


@dataclass(frozen=True)
class Pool:
    """Candidate blocks of 8 positions of each row, ascending, unique, -1 padded.

    blocks: i32 [R, width]. counts: i32 [R]. scores: f32 [R, width] (block maxima) or None.
    """

    blocks: torch.Tensor
    counts: torch.Tensor
    scores: torch.Tensor | None = None

    @classmethod
    @explained(rows=(0, INT32_MAX), width=(0, _C.MAX_POOL_BLOCKS))
    def empty(cls, rows: int, width: int, device="cpu", *, scores: bool = False) -> "Pool":
        """Uninitialised pool of `rows` rows of `width` blocks."""
        return cls(_i32(device, rows, width), _i32(device, rows), _f32(scores, device, rows, width))


def _outputs(
    out: Selection | tuple[Selection, Pool | None] | None,
    rows: int,
    k: int,
    pool_blocks: int,
    device,
) -> tuple[Selection, Pool | None]:
    """The caller's outputs, or new ones."""
    if out is None:
        built = Pool.empty(rows, pool_blocks, device) if pool_blocks > 0 else None
        return Selection.empty(rows, k, device), built
    return (out, None) if isinstance(out, Selection) else out


def _flat(selection: Selection, built: Pool | None) -> dict[str, torch.Tensor | None]:
    return {
        "out_positions": selection.positions,
        "out_slots": selection.slots,
        "out_lengths": selection.lengths,
        "out_scores": selection.scores,
        "pool_out_blocks": None if built is None else built.blocks,
        "pool_out_counts": None if built is None else built.counts,
        "pool_out_scores": None if built is None else built.scores,
    }


def _check_pool_blocks(op: str, pool_blocks: int, built: Pool | None) -> None:
    width = 0 if built is None or built.blocks is None else built.blocks.shape[-1]
    if pool_blocks not in (0, width):
        raise ValueError(
            f"flash_csa.{op}: pool_out.blocks must have {pool_blocks} columns (pool_blocks), "
            f"got {width}"
        )


@explained(k=(1, _C.MAX_TOP_K), pool_blocks=(0, _C.MAX_POOL_BLOCKS))
def select(
    scores: torch.Tensor,
    batch: Batch,
    k: int,
    schedule: torch.Tensor,
    *,
    block_table: torch.Tensor,
    ratio: int,
    page_size: int,
    strict: bool = False,
    pool_blocks: int = 0,
    pool: Pool | None = None,
    workspace: torch.Tensor | None = None,
    out: Selection | tuple[Selection, Pool | None] | None = None,
) -> tuple[Selection, Pool | None]:
    """The min(k, visible) best entries of each row, and optionally the pool of best blocks.

    Args:
        scores: f32 [R, columns] of `index_scores`, with the same pool.
        block_table, ratio, page_size, strict: as for `index_scores`; entries of -1 pages are
            never selected.
        pool_blocks: > 0 builds a pool of as many blocks: the best by block maximum, ties to the
            lower block, the newest block always in.
        pool: restricts the selection to its blocks. Not both.
        out: a Selection, or (Selection, Pool); their optional scores are filled where present.

    Returns:
        Selection, Pool or None.

    Raises:
        ValueError: dtype, shape, device, stride, ratio or page size is not as stated; k not in
            [1, 65536]; a pool to build and one to stay in; too few columns; a small `workspace`.
    """
    selection, built = _outputs(out, len(scores), k, pool_blocks, scores.device)
    _check_pool_blocks("select", pool_blocks, built)
    _ops.select(
        scores,
        *batch.flat(),
        k,
        schedule,
        block_table=block_table,
        ratio=ratio,
        page_size=page_size,
        strict=strict,
        pool_blocks=None if pool is None else pool.blocks,
        pool_counts=None if pool is None else pool.counts,
        workspace=_workspace(workspace, "select", scores.device, k, pool_blocks),
        **_flat(selection, built),
    )
    return selection, built


@explained(k=(1, _C.MAX_TOP_K), pool_blocks=(0, _C.MAX_POOL_BLOCKS))
def index_select(
    query: "IndexQuery",
    index: Pages,
    weights: torch.Tensor,
    batch: Batch,
    block_table: torch.Tensor,
    schedule: torch.Tensor,
    k: int,
    *,
    ratio: int,
    strict: bool = False,
    pool_blocks: int = 0,
    pool: Pool | None = None,
    workspace: torch.Tensor | None = None,
    out: Selection | tuple[Selection, Pool | None] | None = None,
) -> tuple[Selection, Pool | None]:
    """`index_scores` and `select` in one, with the same bits and without a score matrix.

    Arguments, results and errors as of the two.
    """
    selection, built = _outputs(out, len(weights), k, pool_blocks, weights.device)
    _check_pool_blocks("index_select", pool_blocks, built)
    _ops.index_select(
        query.codes,
        query.scales,
        *flat(index),
        weights,
        *batch.flat(),
        block_table,
        schedule,
        k,
        ratio=ratio,
        strict=strict,
        pool_blocks=None if pool is None else pool.blocks,
        pool_counts=None if pool is None else pool.counts,
        workspace=_workspace(
            workspace,
            "index_select",
            weights.device,
            k,
            pool_blocks,
            max_rows=len(weights),
            max_entries=block_table.shape[1] * index.page_size,
        ),
        **_flat(selection, built),
    )
    return selection, built


@explained()
def normalize_pool(
    blocks: torch.Tensor,
    positions: torch.Tensor,
    *,
    ratio: int,
    max_entries: int,
    strict: bool = False,
    out: Pool | None = None,
) -> Pool:
    """A pool from a foreign list: sorted, unique, without blocks < 0 or without a visible position.

    Args:
        blocks: i32 [R, n], any order, duplicates and -1 anywhere. positions: i32 [R].
        max_entries: entries a request can have (max_pages * page_size).
        out: Pool of at least n columns; default: a new one of n.

    Raises:
        ValueError: dtype, shape, device or ratio is not as stated; n exceeds the width of `out`.
    """
    if out is None:
        out = Pool.empty(*blocks.shape, blocks.device)
    _ops.normalize_pool(
        blocks,
        positions,
        ratio=ratio,
        max_entries=max_entries,
        strict=strict,
        pool_out_blocks=out.blocks,
        pool_out_counts=out.counts,
    )
    return out


@explained(k=(1, _C.MAX_TOP_K))
def merge_selections(
    positions: torch.Tensor,
    scores: torch.Tensor,
    k: int,
    *,
    row_request: torch.Tensor,
    block_table: torch.Tensor,
    page_size: int,
    out: Selection | None = None,
) -> Selection:
    """The k best of several shards' selections, by the total order.

    Args:
        positions: i32 [W, R, K], -1 padded. scores: f32 [W, R, K].
        row_request: i32 [R]. block_table: i32 [B, max_pages], gives the slots.

    Raises:
        ValueError: dtype, shape, device, k or page size is not as stated.
    """
    if out is None:
        out = Selection.empty(positions.shape[1], k, positions.device)
    _ops.merge_selections(
        positions,
        scores,
        k,
        row_request=row_request,
        block_table=block_table,
        page_size=page_size,
        out_positions=out.positions,
        out_slots=out.slots,
        out_lengths=out.lengths,
        out_scores=out.scores,
    )
    return out


@explained(pool_blocks=(0, _C.MAX_POOL_BLOCKS))
def merge_pools(
    blocks: torch.Tensor,
    scores: torch.Tensor,
    positions: torch.Tensor,
    *,
    ratio: int,
    strict: bool = False,
    pool_blocks: int = 0,
    out: Pool | None = None,
) -> Pool:
    """The best blocks of several shards' pools; the newest block is forced in once.

    Args:
        blocks: i32 [W, R, n], -1 padded. scores: f32 [W, R, n] block maxima. positions: i32 [R].
        pool_blocks: blocks to keep where `out` is not given; default n.

    Raises:
        ValueError: dtype, shape, device or ratio is not as stated.
    """
    if out is None:
        out = Pool.empty(blocks.shape[1], pool_blocks or blocks.shape[2], blocks.device)
    _ops.merge_pools(
        blocks,
        scores,
        positions,
        ratio=ratio,
        strict=strict,
        pool_out_blocks=out.blocks,
        pool_out_counts=out.counts,
        pool_out_scores=out.scores,
    )
    return out


def _workspace(given, op: str, device, k: int, pool_blocks: int, **bounds: int) -> torch.Tensor:
    if given is not None:
        return given
    return new_workspace(op, device=device, k=k, pool_blocks=pool_blocks, **bounds)
