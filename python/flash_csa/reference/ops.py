"""The stages with the arguments of the library's ops: pages, tables and slots of many requests.

Each function resolves slots, calls the position-space stage of one request or one row, and puts
the result back. Arguments are those of `flash_csa`, less `schedule`, `workspace` and `out`:
results are returned, while pages, tails and q are written in place. Structs are read by field
name, so the library's own can be passed. A padded row (position or request -1) does nothing.
"""

from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from . import attend as core
from . import compress as compressor
from . import index as indexer
from . import pages as paged
from . import select as selector
from .group import Model, rotated_query
from .quant import dequantize
from .rope import rotate
from .step import step_slots, visible_entries

__all__ = [
    "attend",
    "attend_lists",
    "compress",
    "index_scores",
    "index_select",
    "load",
    "merge",
    "merge_pools",
    "merge_selections",
    "normalize_pool",
    "quantize_query",
    "rope_store",
    "select",
    "step_slots",
    "store",
]


class SlotSelection(NamedTuple):
    """positions, slots i32[R, K], -1 padded; lengths i32[R]; scores f32[R, K]."""

    positions: Tensor
    slots: Tensor
    lengths: Tensor
    scores: Tensor


def store(rows: Tensor, pages, slots: Tensor) -> None:
    """Quantises bf16[n, dims] into `slots` i32[n] of `pages`."""
    paged.store(rows, pages.data, slots, pages.record, pages.page_size)


def load(pages, slots: Tensor) -> Tensor:
    """f32[n, dims] of `slots` i32[n]; 0 for absent ones."""
    return paged.load(pages.data, slots, pages.record, pages.page_size)


def rope_store(
    q: Tensor,
    kv: Tensor,
    window,
    slots: Tensor,
    positions: Tensor,
    cos_sin: Tensor,
    *,
    q_norm_eps: float | None = None,
) -> None:
    """Rotates q bf16[R, H, 512] in place (V4: norms it first); rotates and stores the window KV."""
    real = positions >= 0
    model = Model(cos_sin, q_norm_eps=q_norm_eps)
    q[real] = rotated_query(q[real], positions[real], model)
    store(rotate(kv, positions, cos_sin), window, slots)


def quantize_query(
    q: Tensor, positions: Tensor, cos_sin: Tensor, *, record="IndexFp4", rotate: bool = False
) -> indexer.IndexQuery:
    """Index query of q bf16[R, Hi, 128]; codes and scales of padded rows are 0."""
    query = indexer.quantize_query(q, positions, cos_sin, record, rotate)
    padded = positions < 0
    query.codes[padded] = 0
    query.scales[padded] = 0
    return query


def compress(
    kv: Tensor,
    batch,
    entry_slots: Tensor,
    *,
    ratio: int,
    norm_weight: Tensor,
    eps: float,
    cos_sin: Tensor,
    gate: Tensor | None = None,
    bias: Tensor | None = None,
    tail=None,
    entry_first: Tensor | None = None,
    main=None,
    index=None,
    key_weight: Tensor | None = None,
    key_norm_weight: Tensor | None = None,
    rotate: bool = False,
) -> Tensor:
    """Compresses each request's rows into `main` and `index` pages; returns the latents bf16[R, d].

    Latents of rows that close no entry are 0. A row that closes one without a slot is computed and
    not stored. Afterwards `tail` holds the rows that the next step needs.
    """
    stage = compressor.Compressor(
        ratio, norm_weight, eps, bias, overlap=kv.shape[1] == 2 * len(norm_weight)
    )
    latents = torch.zeros(len(kv), stage.dim, dtype=torch.bfloat16)
    bounds = batch.cu_tokens.tolist()
    for r, (begin, end) in enumerate(pairwise(bounds)):
        end = begin + int((batch.positions[begin:end] >= 0).sum())
        start, stored = int(batch.start[r]), 0 if entry_first is None else int(entry_first[r])
        own_kv, own_gate = kv[begin:end], None if gate is None else gate[begin:end]
        slot = int(batch.tail_slot[r])
        ring = tail.rows[slot] if tail is not None and slot >= 0 else None
        entry, pooled = stage.pool_step(own_kv, own_gate, start, ring, stored)
        if ring is not None:
            compressor.write_tail(ring, own_kv, own_gate, start, stored * ratio)
        latent = stage.latent(pooled)
        closing = begin - start - 1 + ratio * torch.arange(entry + 1, entry + 1 + len(latent))
        latents[closing] = latent
        slots, rows = entry_slots[closing], stage.main_rows(latent, cos_sin, entry)
        if main is not None:
            store(rows, main, slots)
        if key_weight is not None:
            keys = compressor.index_keys(
                compressor.project_keys(latent, key_weight),
                key_norm_weight,
                eps,
                stage.entry_positions(len(latent), entry),
                cos_sin,
            )
            store(compressor.hadamard(keys) if rotate else keys, index, slots)
        elif index is not None:  # V4's own index compressor
            store(compressor.hadamard(rows) if rotate else rows, index, slots)
    return latents


def _visible(batch, block_table: Tensor, page_size: int, ratio: int, strict: bool) -> Tensor:
    """n_vis i32[R], clipped to what a block table row can address."""
    n_vis = visible_entries(batch.positions, ratio, strict)
    return n_vis.clamp(max=block_table.shape[1] * page_size)


def _entry_slots(table_row: Tensor, page_size: int) -> Tensor:
    """Slots i64[max_pages * page_size] of one request's entries, -1 where there is no page."""
    slots = table_row.long()[:, None] * page_size + torch.arange(page_size)
    return torch.where(table_row[:, None] < 0, -1, slots).flatten()


def _pool_columns(blocks: Tensor) -> Tensor:
    """Position i64[8 * width] of each column of a pool's score row; negative where no block is."""
    block = selector.BLOCK
    positions = blocks.long()[:, None] * block + torch.arange(block)
    return torch.where(blocks[:, None] < 0, -1, positions).flatten()


def index_scores(
    query,
    index,
    weights: Tensor,
    batch,
    block_table: Tensor,
    *,
    ratio: int,
    strict: bool = False,
    pool=None,
    exact: bool = False,
) -> Tensor:
    """Scores f32[R, max_pages * P], or with a pool f32[R, 8 * pool_blocks]; NaN where undefined.

    `exact` (FP4 only): the bits of the library (`index.index_scores_exact`), else FP64.
    """
    size = index.page_size
    dense = torch.full((len(batch.positions), block_table.shape[1] * size), torch.nan)
    n_vis = _visible(batch, block_table, size, ratio, strict)
    parts = indexer.IndexQuery(query.codes, query.scales)
    for r in batch.row_request[batch.row_request >= 0].unique().tolist():
        rows = torch.nonzero(batch.row_request == r).flatten()
        slots = _entry_slots(block_table[r], size)[: int(n_vis[rows].max())]
        data, scales = paged.read_rows(index.data, slots, index.record, size)
        own = indexer.IndexQuery(*(part[rows] for part in parts))
        if exact:
            scores = indexer.index_scores_exact(own, data, scales, weights[rows])
        else:
            keys = dequantize(data, scales, index.record)
            scores = indexer.index_scores(indexer.dequantize_query(own), keys, weights[rows])
        unseen = (torch.arange(len(slots)) >= n_vis[rows, None]) | (slots < 0)
        dense[rows, : len(slots)] = scores.masked_fill(unseen, torch.nan)
    if pool is None:
        return dense
    columns = torch.stack([_pool_columns(row) for row in pool.blocks])
    inside = (columns >= 0) & (columns < dense.shape[1])
    scores = dense.gather(1, torch.where(inside, columns, 0))
    return scores.masked_fill(~inside, torch.nan)


def select(
    scores: Tensor,
    batch,
    k: int,
    *,
    block_table: Tensor,
    ratio: int,
    page_size: int,
    strict: bool = False,
    pool_blocks: int = 0,
    pool=None,
) -> tuple[SlotSelection, selector.Pool | None]:
    """Selection, and the pool where `pool_blocks` > 0, from scores as `index_scores` lays them."""
    n_vis = _visible(batch, block_table, page_size, ratio, strict)
    entries = block_table.shape[1] * page_size
    dense = torch.full((len(scores), entries), torch.nan)
    for t, r in enumerate(batch.row_request.tolist()):
        if r < 0:
            continue
        if pool is None:
            seen = torch.arange(int(n_vis[t]))
            dense[t, seen] = scores[t, seen]
        else:
            columns = _pool_columns(pool.blocks[t])
            inside = (columns >= 0) & (columns < n_vis[t])
            dense[t, columns[inside]] = scores[t, : len(columns)][inside]
        dense[t, _entry_slots(block_table[r], page_size) < 0] = torch.nan
    chosen = selector.select(dense, n_vis, k, pool)
    built = selector.build_pool(dense, n_vis, pool_blocks) if pool_blocks else None
    return _with_slots(chosen, batch.row_request, block_table, page_size), built


def _with_slots(
    chosen: selector.Selection, row_request: Tensor, block_table: Tensor, page_size: int
) -> SlotSelection:
    positions, lengths, scores = chosen
    slots = torch.full_like(positions, -1)
    for t, r in enumerate(row_request.tolist()):
        found = positions[t][: int(lengths[t])].long()
        if r >= 0:
            slots[t, : len(found)] = _entry_slots(block_table[r], page_size)[found].int()
    return SlotSelection(positions, slots, lengths, scores)


def index_select(
    query,
    index,
    weights: Tensor,
    batch,
    block_table: Tensor,
    k: int,
    *,
    ratio: int,
    strict: bool = False,
    pool_blocks: int = 0,
    pool=None,
    exact: bool = False,
) -> tuple[SlotSelection, selector.Pool | None]:
    """`index_scores`, then `select`."""
    scores = index_scores(
        query,
        index,
        weights,
        batch,
        block_table,
        ratio=ratio,
        strict=strict,
        pool=pool,
        exact=exact,
    )
    return select(
        scores,
        batch,
        k,
        block_table=block_table,
        ratio=ratio,
        page_size=index.page_size,
        strict=strict,
        pool_blocks=pool_blocks,
        pool=pool,
    )


def normalize_pool(
    blocks: Tensor,
    positions: Tensor,
    *,
    ratio: int,
    max_entries: int,
    strict: bool = False,
) -> selector.Pool:
    """Pool of n blocks from foreign lists i32[R, n], for queries at `positions` i32[R]."""
    n_vis = visible_entries(positions, ratio, strict).clamp(max=max_entries)
    return selector.normalize_pool(blocks, n_vis, blocks.shape[1])


def merge_selections(
    positions: Tensor,
    scores: Tensor,
    k: int,
    *,
    row_request: Tensor,
    block_table: Tensor,
    page_size: int,
) -> SlotSelection:
    """The best k of W shards' selections, i32 and f32[W, R, K], with slots of `block_table`."""
    chosen = selector.merge_selections(positions, scores, k)
    return _with_slots(chosen, row_request, block_table, page_size)


def merge_pools(
    blocks: Tensor,
    scores: Tensor,
    positions: Tensor,
    *,
    ratio: int,
    strict: bool = False,
    pool_blocks: int = 0,
) -> selector.Pool:
    """The best `pool_blocks` (default n) of W shards' pools, i32 and f32[W, R, n]; the block of
    the newest visible position is forced in once."""
    n_vis = visible_entries(positions, ratio, strict)
    return selector.merge_pools(blocks, scores, n_vis, pool_blocks or blocks.shape[2])


def _list(pages, slots: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
    """Records f32[n, 512] that any row reads, and lists i64[R, columns] of them."""
    capacity = pages.data.shape[0] * pages.page_size
    read = torch.arange(slots.shape[1]) < lengths[:, None]
    read &= (slots >= 0) & (slots < capacity)
    unique, inverse = slots[read].unique(return_inverse=True)
    lists = torch.full(slots.shape, -1)
    lists[read] = inverse
    return load(pages, unique), lists


def attend_lists(
    *, main=None, selection=None, window_pages=None, window=None, contiguous=None
) -> tuple[Tensor, Tensor]:
    """What each row reads, as `attend.attend` takes it: records f32[n, 512], lists i64[R, L]."""
    parts = []
    if window is not None:
        parts.append(_list(window_pages, window.slots, window.lengths))
    if selection is not None:
        parts.append(_list(main, selection.slots, selection.lengths))
    if contiguous is not None:
        block_table, row_request, n_vis = contiguous
        tables = [
            _entry_slots(block_table[max(r, 0)], main.page_size) for r in row_request.tolist()
        ]
        parts.append(_list(main, torch.stack(tables), n_vis))
    if len(parts) == 2:
        return core.join(*parts[0], *parts[1])
    return parts[0]


def attend(
    q: Tensor,
    *,
    sink: Tensor | None = None,
    softmax_scale: float = core.SOFTMAX_SCALE,
    derotate: tuple[Tensor, Tensor] | None = None,
    **lists,
) -> tuple[Tensor, Tensor]:
    """Output f64[R, H, 512] (with `derotate` = (positions, cos_sin) bf16) and lse f64[R, H].

    `lists`: the keywords of `attend_lists`.
    """
    records, rows = attend_lists(**lists)
    out, lse = core.attend(q, records, rows, sink=sink, softmax_scale=softmax_scale)
    return (core.derotated_output(out, *derotate) if derotate else out), lse


def merge(
    outs: Tensor,
    lses: Tensor,
    *,
    sink: Tensor | None = None,
    derotate: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Joins W partial results [W, R, H, 512] and [W, R, H]; as `attend` returns them."""
    out, lse = core.merge(outs, lses, sink)
    return (core.derotated_output(out, *derotate) if derotate else out), lse
