"""Once per step: slots, window lists and visible counts of all rows; the schedule of all ops."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from . import _C
from ._explain import INT32_MAX, explained
from .batch import Batch
from .sizes import schedule_size
from .validate import ops as _ops


@dataclass(frozen=True)
class Window:
    """Window records of each row, oldest first: slots i32 [R, window], lengths i32 [R]."""

    slots: torch.Tensor
    lengths: torch.Tensor


@dataclass(frozen=True)
class StepSlots:
    """What `step_slots` fills; all i32.

    window_store: [R], slot of the row's own window record. lists: window records to read.
    entry_slots: [len(ratios), R], slot of the entry that the row closes, else -1.
    n_vis: [len(ratios), R], visible entries.
    """

    window_store: torch.Tensor
    lists: Window
    entry_slots: torch.Tensor
    n_vis: torch.Tensor

    @classmethod
    @explained(rows=(0, INT32_MAX), num_ratios=(0, 8), window=(0, INT32_MAX))
    def empty(cls, rows: int, num_ratios: int, window: int = 128, device="cpu") -> "StepSlots":
        """Uninitialised results for `rows` rows."""

        def new(*size: int) -> torch.Tensor:
            return torch.empty(size, dtype=torch.int32, device=device)

        lists = Window(new(rows, window), new(rows))
        return cls(new(rows), lists, new(num_ratios, rows), new(num_ratios, rows))


@explained(window=(1, INT32_MAX))
def step_slots(
    batch: Batch,
    block_tables: Sequence[torch.Tensor],
    window_table: torch.Tensor,
    *,
    ratios: Sequence[int],
    page_sizes: Sequence[int],
    window_page_size: int,
    window: int = 128,
    strict: bool = False,
    window_first: torch.Tensor | None = None,
    entry_first: torch.Tensor | None = None,
    out: StepSlots | None = None,
) -> StepSlots:
    """Slots of a step, computed once and shared by all layers.

    Args:
        block_tables: one i32 [B, max_pages] per ratio: entry j is slot table[j // P] * P + j % P.
        window_table: i32 [B, W], a ring: position p is slot table[(p // P) % W] * P + p % P;
            W * P >= window - 1 + max_rows.
        ratios, page_sizes: of each block table. window_page_size: P of the window ring.
        window_first: i32 [B], first position whose window record may be read (bounded replay).
        entry_first: i32 [len(ratios), B], entries already stored, which are not closed again.
        out: results; default: new ones.

    Raises:
        ValueError: dtype, shape or device is not as stated; a ratio or page size is not supported;
            lists of different lengths; a window table that is too narrow.
    """
    if out is None:
        out = StepSlots.empty(len(batch.positions), len(ratios), window, batch.positions.device)
    _ops.step_slots(
        *batch.flat(),
        list(block_tables),
        window_table,
        ratios=list(ratios),
        page_sizes=list(page_sizes),
        window_page_size=window_page_size,
        window=window,
        strict=strict,
        window_first=window_first,
        entry_first=entry_first,
        window_store=out.window_store,
        lists_slots=out.lists.slots,
        lists_lengths=out.lists.lengths,
        entry_slots=out.entry_slots,
        n_vis=out.n_vis,
    )
    return out


@explained(num_sms=(1, _C.MAX_WORKERS))
def schedule(
    batch: Batch,
    *,
    ratios: Sequence[int],
    max_entries: Sequence[int],
    k: int,
    heads: int,
    index_heads: int,
    window: int = 128,
    window_first: torch.Tensor | None = None,
    pool_blocks: int = 0,
    pool_ratio: int = 0,
    contiguous_ratios: Sequence[int] = (),
    strict: bool = False,
    batch_invariant: bool = False,
    num_sms: int,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Deals the rows of a step out to workers, from device-side lengths.

    Args:
        ratios: of the step; max_entries: capacity of each ratio's block table, in entries.
        k: top-k. heads, index_heads: of attention and indexer. window: window records of a row.
        pool_blocks, pool_ratio: width of the candidate pool and the ratio that has one.
        contiguous_ratios: ratios whose layers attend all visible entries (HCA).
        batch_invariant: no row is divided, so that its bits do not depend on its batch.
        num_sms: workers, see `default_num_sms`.
        out: as returned, at least as wide; default: a new one.

    Returns:
        i32 [1 + 4 * len(ratios), schedule_size]. Row 0: window only; of ratio number i: 1 + 4 i
        index, 2 + 4 i reindex, 3 + 4 i attend, 4 + 4 i contiguous. An op takes its row.

    Raises:
        ValueError: dtype, shape or device is not as stated; a number is out of range; pool_ratio or
            a contiguous ratio is none of `ratios`; an `out` that is too small.
    """
    if out is None:
        size = schedule_size(num_sms=num_sms, max_rows_total=len(batch.positions))
        rows = 1 + 4 * len(ratios)
        out = torch.empty(rows, size, dtype=torch.int32, device=batch.positions.device)
    _ops.schedule(
        *batch.flat(),
        ratios=list(ratios),
        max_entries=list(max_entries),
        k=k,
        heads=heads,
        index_heads=index_heads,
        window=window,
        window_first=window_first,
        pool_blocks=pool_blocks,
        pool_ratio=pool_ratio,
        contiguous_ratios=list(contiguous_ratios),
        strict=strict,
        batch_invariant=batch_invariant,
        num_sms=num_sms,
        out=out,
    )
    return out
