"""Top-k selection, candidate pools, and merging over shards.

Formula source: DeepSeek-V4 and V4.1 top-k selection, V4.1 candidate pool (made by the layer with
ratio 1 in the middle of the model, read by the Reindex layers above it). The order is total:
larger score first, then lower position; -0.0 equals 0.0; NaN is never selected.
"""

from typing import NamedTuple

import torch
from torch import Tensor

BLOCK = 8  # positions per candidate block of the published model


class Selection(NamedTuple):
    """Entries to attend: ascending `positions` i32[T, K], -1 padded; `lengths` i32[T]; `scores`
    f32[T, K] of the same entries, NaN where there is none."""

    positions: Tensor
    lengths: Tensor
    scores: Tensor


class Pool(NamedTuple):
    """Candidate blocks: ascending `blocks` i32[T, width], -1 padded; `counts` i32[T]; `scores`
    f32[T, width] of the same blocks, NaN where there is none. Block b holds the positions
    b * block ... b * block + block - 1."""

    blocks: Tensor
    counts: Tensor
    scores: Tensor


def _best(ids: Tensor, scores: Tensor, count: int, forced: int | None = None) -> Tensor:
    """Which of `ids` i64[n] (unique) the total order puts first, ascending: indices i64[<= count].

    NaN scores are passed over; the id `forced` comes before all others, whatever its score.
    """
    is_forced = ids == (-1 if forced is None else forced)
    usable = torch.nonzero(~scores.isnan() | is_forced).flatten()
    usable = usable[ids[usable].argsort()]
    keys = torch.where(is_forced, torch.inf, scores)[usable] + 0.0  # -0.0 becomes 0.0
    # Stable sorts keep the ascending ids among equals: first by score, then forced before all.
    order = keys.argsort(descending=True, stable=True)
    order = order[(~is_forced[usable][order]).to(torch.uint8).argsort(stable=True)]
    return usable[order[:count].sort().values]


def _row(ids: Tensor, scores: Tensor, chosen: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """The chosen ids i32[width] and their scores f32[width], padded."""
    padding = width - len(chosen)
    pad = torch.nn.functional.pad
    return (
        pad(ids[chosen].int(), (0, padding), value=-1),
        pad(scores[chosen].float(), (0, padding), value=torch.nan),
    )


def _stack(rows: list[tuple[Tensor, Tensor]], width: int) -> tuple[Tensor, Tensor, Tensor]:
    if not rows:
        empty = torch.empty(0, width)
        return empty.int(), empty.new_empty(0).int(), empty
    ids, scores = (torch.stack(parts) for parts in zip(*rows, strict=True))
    return ids, (ids >= 0).sum(-1).int(), scores


def pool_positions(blocks: Tensor, n_vis: int, block: int = BLOCK) -> Tensor:
    """Visible positions i64[n], ascending, of one query's `blocks` i32[width]."""
    blocks = blocks[blocks >= 0].long().unique()
    positions = (blocks[:, None] * block + torch.arange(block)).flatten()
    return positions[positions < n_vis]


def select(
    scores: Tensor, n_vis: Tensor, k: int, pool: Pool | None = None, block: int = BLOCK
) -> Selection:
    """The best min(k, visible) entries of each query, in ascending position.

    scores f32[T, N], n_vis i32[T]. With `pool` only its positions compete; a Reindex layer scores
    no others.
    """
    rows = []
    for t, visible in enumerate(n_vis.tolist()):
        if pool is None:
            positions = torch.arange(visible)
        else:
            positions = pool_positions(pool.blocks[t], visible, block)
        competing = scores[t, positions]
        rows.append(_row(positions, competing, _best(positions, competing, k), k))
    return Selection(*_stack(rows, k))


def build_pool(scores: Tensor, n_vis: Tensor, num_blocks: int, block: int = BLOCK) -> Pool:
    """The best min(num_blocks, ceil(n_vis / block)) blocks of each query.

    scores f32[T, N], n_vis i32[T]. A block's score is the best of its visible positions, ties go
    to the lower block. The block of the newest visible position is forced in and counts.
    """
    rows = []
    for t, visible in enumerate(n_vis.tolist()):
        blocks = torch.arange(-(-visible // block))
        padding = len(blocks) * block - visible
        padded = torch.nn.functional.pad(scores[t, :visible], (0, padding), value=torch.nan)
        best = _max_of_numbers(padded.view(-1, block))
        newest = (visible - 1) // block if visible else None
        rows.append(_row(blocks, best, _best(blocks, best, num_blocks, newest), num_blocks))
    return Pool(*_stack(rows, num_blocks))


def _max_of_numbers(x: Tensor) -> Tensor:
    """Maximum over the last dim, NaN only where all are NaN."""
    best = torch.where(x.isnan(), -torch.inf, x).amax(-1)
    return torch.where(x.isnan().all(-1), torch.nan, best)


def normalize_pool(blocks: Tensor, n_vis: Tensor, width: int, block: int = BLOCK) -> Pool:
    """A pool from foreign lists i32[T, n]: sorted, without duplicates, and without blocks below 0
    or without a visible position. Adds nothing. ValueError if n > width."""
    if blocks.shape[1] > width:
        raise ValueError(f"flash_csa.normalize_pool: {blocks.shape[1]} blocks exceed {width}")
    rows = []
    for row, visible in zip(blocks, n_vis.tolist(), strict=True):
        kept = row[(row >= 0) & (row.long() * block < visible)].long().unique()
        unknown = torch.full(kept.shape, torch.nan)
        rows.append(_row(kept, unknown, torch.arange(len(kept)), width))
    return Pool(*_stack(rows, width))


def _gather_shards(ids: Tensor, scores: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Per query the ids present in any of W shards, each once, with its best score."""
    rows = []
    for t in range(ids.shape[1]):
        present = ids[:, t] >= 0
        unique, group = ids[:, t][present].long().unique(return_inverse=True)
        found = scores[:, t][present]
        number = ~found.isnan()
        best = torch.full((len(unique),), torch.nan)
        best.scatter_reduce_(0, group[number], found[number], "amax", include_self=False)
        rows.append((unique, best))
    return rows


def merge_selections(positions: Tensor, scores: Tensor, k: int) -> Selection:
    """The best k entries of W shards' selections: positions i32[W, T, K], scores f32[W, T, K].

    Equal to one selection over all entries if each shard kept its own best k.
    """
    rows = [
        _row(ids, best, _best(ids, best, k), k) for ids, best in _gather_shards(positions, scores)
    ]
    return Selection(*_stack(rows, k))


def merge_pools(
    blocks: Tensor, scores: Tensor, n_vis: Tensor, num_blocks: int, block: int = BLOCK
) -> Pool:
    """The best blocks of W shards' pools: blocks i32[W, T, n], scores f32[W, T, n], n_vis i32[T].

    Equal to one pool over all entries if no block is split between shards; the block of the newest
    visible position is forced in once.
    """
    rows = []
    for (ids, best), visible in zip(_gather_shards(blocks, scores), n_vis.tolist(), strict=True):
        newest = (visible - 1) // block if visible else None
        if newest is not None and newest not in ids:
            ids = torch.cat([ids, torch.tensor([newest])])
            best = torch.cat([best, torch.tensor([torch.nan])])
        rows.append(_row(ids, best, _best(ids, best, num_blocks, newest), num_blocks))
    return Pool(*_stack(rows, num_blocks))
