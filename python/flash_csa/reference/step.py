"""Bookkeeping of a step: what a query sees, which entry a token closes, which slots are touched.

Formula source: DeepSeek-V4 and V4.1 sparse attention (inclusive visibility, sliding window); the
paged tables are this project's.
"""

from typing import NamedTuple

import torch
from torch import Tensor


def visible_entries(positions: Tensor, ratio: int, strict: bool = False) -> Tensor:
    """Number of entries each query sees: entry j is visible iff j < (position + 1) // ratio.

    The token that closes a group sees its entry; with `strict` (position // ratio) only the next
    one does. A padded row (position -1) sees none.
    """
    return (positions if strict else positions + 1).clamp(min=0) // ratio


def window_positions(position: int, window: int = 128, first: int = 0) -> range:
    """Positions of a query's window, itself included, oldest first.

    `first` > 0 is bounded replay: layers re-run from there on have no older window records.
    """
    return range(max(first, position - window + 1, 0), position + 1)


def window_lists(positions: Tensor, window: int = 128, first: int = 0) -> tuple[Tensor, Tensor]:
    """Window positions i32[T, window], -1 padded, and lengths i32[T] of `positions` i32[T]."""
    lists = torch.full((len(positions), window), -1, dtype=torch.int32)
    lengths = torch.zeros(len(positions), dtype=torch.int32)
    for t, position in enumerate(positions.tolist()):
        seen = torch.tensor(window_positions(position, window, first), dtype=torch.int32)
        lists[t, : len(seen)] = seen
        lengths[t] = len(seen)
    return lists, lengths


class SlotLists(NamedTuple):
    """Lists that attention reads: `slots` i32[R, columns], the first `lengths` i32[R] of each."""

    slots: Tensor
    lengths: Tensor


class StepSlots(NamedTuple):
    """Result of `step_slots`."""

    window_store: Tensor  # i32[R] slot that row t's window record is written to
    lists: SlotLists  # i32[R, window] slots of its window records, oldest first
    entry_slots: Tensor  # i32[len(ratios), R] slot of the entry that row t closes, else -1
    n_vis: Tensor  # i32[len(ratios), R] entries that row t sees


def _slot(table_row: list[int], page_index: int, offset: int, page_size: int) -> int:
    page = table_row[page_index] if page_index < len(table_row) else -1
    return page * page_size + offset if page >= 0 else -1


def step_slots(
    batch,
    block_tables: list[Tensor],
    window_table: Tensor,
    *,
    ratios: list[int],
    page_sizes: list[int],
    window_page_size: int,
    window: int = 128,
    strict: bool = False,
    window_first: Tensor | None = None,
    entry_first: Tensor | None = None,
) -> StepSlots:
    """Slots of one step, from `batch.positions` i32[R] and `batch.row_request` i32[R].

    `block_tables` one i32[B, pages] per ratio: entry j is slot table[j // P] * P + j % P.
    `window_table` i32[B, W]: position p is slot table[(p // P) % W] * P + p % P, a paged ring.
    -1 in a table: no page, so -1 in the result. Entries before `entry_first` i32[len(ratios), B]
    are already stored and get no slot; `window_first` i32[B] truncates the windows.
    """
    rows = len(batch.positions)
    store = torch.full((rows,), -1, dtype=torch.int32)
    lists = torch.full((rows, window), -1, dtype=torch.int32)
    lengths = torch.zeros(rows, dtype=torch.int32)
    entry_slots = torch.full((len(ratios), rows), -1, dtype=torch.int32)
    n_vis = torch.zeros(len(ratios), rows, dtype=torch.int32)

    rings = window_table.tolist()
    tables = [table.tolist() for table in block_tables]
    for t, (p, r) in enumerate(
        zip(batch.positions.tolist(), batch.row_request.tolist(), strict=True)
    ):
        if p < 0:
            continue

        def window_slot(q: int, ring: list[int] = rings[r]) -> int:
            page_index = q // window_page_size % len(ring)
            return _slot(ring, page_index, q % window_page_size, window_page_size)

        seen = window_positions(p, window, 0 if window_first is None else int(window_first[r]))
        store[t] = window_slot(p)
        lists[t, : len(seen)] = torch.tensor([window_slot(q) for q in seen], dtype=torch.int32)
        lengths[t] = len(seen)
        for k, (ratio, page_size) in enumerate(zip(ratios, page_sizes, strict=True)):
            entry, row = p // ratio, tables[k][r]
            stored = 0 if entry_first is None else int(entry_first[k, r])
            if (p + 1) % ratio == 0 and entry >= stored:
                entry_slots[k, t] = _slot(row, entry // page_size, entry % page_size, page_size)
            capacity = len(row) * page_size
            n_vis[k, t] = min((p if strict else p + 1) // ratio, capacity)
    return StepSlots(store, SlotLists(lists, lengths), entry_slots, n_vis)
