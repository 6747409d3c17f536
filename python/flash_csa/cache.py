"""Where records live: formats and page sizes, the pages of a model, and who owns which page.

    spec = CacheSpec.for_plan(plan)                       formats and page sizes
    layout = spec.layout(plan, max_tokens=..., ...)       every size, nothing allocated
    cache = layout.allocate(device)                       pages and tails
    pool = BlockPool(layout, device=device)               page ids per request, as tables

Pages are handed out in spans of tokens: a span is the shortest run that fills whole pages at every
ratio, and ratio m owns n = span / (m * page size) consecutive page ids of it. All groups of one
ratio share ids and block table.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from . import _C
from ._explain import explained
from ._fakes import describe
from .compress import Tail
from .plan import HEAD_DIM, INDEX_DIM, RATIOS, GroupPlan, LayerPlan
from .records import RECORDS, Pages

MAX_PAGE_SIZE: int = _C.MAX_PAGE_SIZE
_PAGE_SIZES = {1: 64, 2: 64, 4: 64, 128: 8}


@dataclass(frozen=True)
class CacheSpec:
    """Record formats and page sizes of a cache. Formats are names of `RECORDS`.

    page_sizes: entries of a main or index page, per ratio; window_page_size: tokens of a window
    page. Any size from 1 to 256.
    """

    main: str = "MainFp4"
    index: str = "IndexFp4"
    window: str = "WindowFp8"
    page_sizes: Mapping[int, int] = field(default_factory=_PAGE_SIZES.copy)
    window_page_size: int = 64

    def __post_init__(self) -> None:
        main, index = (
            [record.name for record in RECORDS.values() if record.dims == dims]
            for dims in (HEAD_DIM, INDEX_DIM)
        )
        window = [name for name in main if RECORDS[name].element == "E4M3"]  # of rope_store
        for name, fitting in (("main", main), ("index", index), ("window", window)):
            if getattr(self, name) not in fitting:
                raise _error(f"CacheSpec: {name}", f"one of {fitting}", getattr(self, name))
        if not isinstance(self.page_sizes, Mapping):
            raise _error("CacheSpec: page_sizes", "a mapping by ratio", describe(self.page_sizes))
        sizes = [(f"page_sizes[{ratio}]", size) for ratio, size in self.page_sizes.items()]
        for name, size in (*sizes, ("window_page_size", self.window_page_size)):
            if not isinstance(size, int) or not 1 <= size <= MAX_PAGE_SIZE:
                raise _error(f"CacheSpec: {name}", f"1 to {MAX_PAGE_SIZE}", size)

    @classmethod
    @explained()
    def for_plan(cls, plan: LayerPlan, *, page_size: int | None = None, **fields) -> "CacheSpec":
        """The model's own formats. `page_size`, if given, holds for every ratio and the window;
        `fields` replaces single ones."""
        defaults: dict = {}
        if plan.family == "v4":
            defaults = {"main": "MixedFp8", "window": "MixedFp8"}
        if page_size is not None:
            sizes = dict.fromkeys(RATIOS[1:], page_size)
            defaults |= {"page_sizes": sizes, "window_page_size": page_size}
        return cls(**(defaults | fields))

    @explained()
    def layout(
        self,
        plan: LayerPlan,
        *,
        max_tokens: int,
        max_requests: int = 1,
        max_rows: int = 1,
        max_draft: int = 0,
        num_spans: int | None = None,
        window_pages: int | None = None,
    ) -> "CacheLayout":
        """Every size of a cache, without allocating.

        Args:
            plan: the model.
            max_tokens: longest request.
            max_requests: requests that are open at once: rows of every table, tail slots.
            max_rows: most rows of one request in a step, at least 1 + max_draft; the window ring
                holds them beside the window.
            max_draft: most draft tokens of a step that may be rolled back.
            num_spans: spans of the pool; default: every request may grow to `max_tokens`.
            window_pages: pages of each layer's window storage; default: a whole ring for every
                request. Fewer suffice where prefill chunks are long and few at a time: a ring
                hands back the pages that hold no live token.

        Raises:
            ValueError: a size below 1 (`max_draft` below 0), or a ratio without a page size.
        """
        missing = [ratio for ratio in plan.ratios if ratio not in self.page_sizes]
        if missing:
            raise _error("CacheSpec: page_sizes", f"given for ratio {missing[0]}", self.page_sizes)
        for name, value, least in (
            ("max_tokens", max_tokens, 1),
            ("max_requests", max_requests, 1),
            ("max_rows", max_rows, 1),
            ("max_draft", max_draft, 0),
            ("num_spans", num_spans, 0),
            ("window_pages", window_pages, 0),
        ):
            if value is not None and not isinstance(value, int):
                raise _error(f"CacheSpec: {name}", "an int", describe(value))
            if value is not None and value < least:
                raise _error(f"CacheSpec: {name}", f"at least {least}", value)
        span = math.lcm(*(ratio * self.page_sizes[ratio] for ratio in plan.ratios))
        spans_per_request = ceil_div(max_tokens, span)
        max_rows = max(max_rows, 1 + max_draft)
        columns = ceil_div(plan.window - 1 + max_rows, self.window_page_size)
        return CacheLayout(
            plan=plan,
            spec=self,
            span_tokens=span,
            spans_per_request=spans_per_request,
            num_spans=max_requests * spans_per_request if num_spans is None else num_spans,
            max_requests=max_requests,
            max_rows=max_rows,
            max_draft=max_draft,
            window_columns=columns,
            window_pages=max_requests * columns if window_pages is None else window_pages,
        )

    @explained()
    def allocate(self, plan: LayerPlan, *, device: torch.device | str = "cpu", **sizes) -> "Cache":
        """Pages and tails of `layout(plan, **sizes)` on `device`."""
        return self.layout(plan, **sizes).allocate(device)


@dataclass(frozen=True)
class CacheLayout:
    """The sizes of a cache. Spans and pages are counted over all requests."""

    plan: LayerPlan
    spec: CacheSpec
    span_tokens: int
    spans_per_request: int
    num_spans: int
    max_requests: int
    max_rows: int
    max_draft: int
    window_columns: int  # pages of one request's window ring
    window_pages: int

    def pages_per_span(self, ratio: int) -> int:
        return self.span_tokens // (ratio * self.spec.page_sizes[ratio])

    def max_pages(self, ratio: int) -> int:
        """Columns of the ratio's block table."""
        return self.spans_per_request * self.pages_per_span(ratio)

    def max_entries(self, ratio: int) -> int:
        """Entries that the ratio's block table can address."""
        return self.max_pages(ratio) * self.spec.page_sizes[ratio]

    def num_pages(self, ratio: int) -> int:
        """Pages of one group of the ratio."""
        return self.num_spans * self.pages_per_span(ratio)

    def tail_shapes(self, group: GroupPlan) -> dict[str, tuple[int, int, int, int]]:
        """Shape of each compressor's tail; ratio 1 has none."""
        widths = {"main": group.main_width, "index": group.index_width}
        ring = group.span + self.max_draft
        return {
            name: (self.max_requests, 2, ring, width)
            for name, width in widths.items()
            if group.ratio > 1 and width
        }

    @explained()
    def allocate(self, device: torch.device | str = "cpu") -> "Cache":
        """Pages and tails, uninitialised: nothing is read before it is written."""

        def pages(record: str, num_pages: int, page_size: int) -> Pages:
            shape = (num_pages, RECORDS[record].page_bytes(page_size))
            data = torch.empty(shape, dtype=torch.uint8, device=device)
            return Pages(data, record, page_size)

        spec = self.spec
        groups, tails = [], []
        for group in self.plan.groups:
            size, count = spec.page_sizes[group.ratio], self.num_pages(group.ratio)
            index = pages(spec.index, count, size) if group.indexed else None
            groups.append(GroupPages(pages(spec.main, count, size), index))
            tails.append(
                GroupTails(
                    **{
                        name: Tail(torch.empty(shape, dtype=torch.float32, device=device))
                        for name, shape in self.tail_shapes(group).items()
                    }
                )
            )
        window = [
            pages(spec.window, self.window_pages, spec.window_page_size) for _ in self.plan.layers
        ]
        return Cache(self, tuple(groups), tuple(window), tuple(tails))


@dataclass(frozen=True)
class GroupPages:
    """A group's records; index is None for a contiguous group."""

    main: Pages
    index: Pages | None


@dataclass(frozen=True)
class GroupTails:
    """A group's tails, one per compressor: V4 CSA has two, ratio 1 none."""

    main: Tail | None = None
    index: Tail | None = None


@dataclass(frozen=True)
class Cache:
    """All records and tails of a model on one device, each in a storage of its own."""

    layout: CacheLayout
    groups: tuple[GroupPages, ...]
    window: tuple[Pages, ...]  # per layer
    tails: tuple[GroupTails, ...]  # per group

    @property
    def nbytes(self) -> dict[str, int]:
        """Bytes of the tensors: main, index, window, tails."""
        tails = [tail for pair in self.tails for tail in (pair.main, pair.index) if tail]
        return {
            "main": sum(group.main.data.nbytes for group in self.groups),
            "index": sum(group.index.data.nbytes for group in self.groups if group.index),
            "window": sum(pages.data.nbytes for pages in self.window),
            "tails": sum(tail.rows.nbytes for tail in tails),
        }


class OutOfPages(RuntimeError):
    """The pool cannot serve a request now; nothing has changed."""


class BlockPool:
    """Owns the page ids of a cache and says, in tables, which request holds which.

    Attributes:
        block_tables: per ratio, i32 [max_requests, max_pages]; -1 where no page is held.
        window_table: i32 [max_requests, window_columns].

    The tables keep their addresses and are updated in place on the current stream. Ids are handed
    out in a fixed order, so equal calls give equal tables.
    """

    @explained()
    def __init__(
        self,
        layout: CacheLayout,
        *,
        device: torch.device | str = "cpu",
        span_order: Sequence[int] | None = None,
        window_order: Sequence[int] | None = None,
    ) -> None:
        """`span_order`, `window_order`: the ids in the order of first use; default ascending."""
        self.layout = layout
        self._free_spans = _stack("span_order", span_order, layout.num_spans)
        self._free_windows = _stack("window_order", window_order, layout.window_pages)
        self._spans: dict[int, list[int]] = {}
        self._windows: dict[int, dict[int, int]] = {}  # request -> column -> page

        def table(columns: int) -> torch.Tensor:
            shape = (layout.max_requests, columns)
            return torch.full(shape, -1, dtype=torch.int32, device=device)

        self.block_tables = {r: table(layout.max_pages(r)) for r in layout.plan.ratios}
        self.window_table = table(layout.window_columns)

    @property
    def free_spans(self) -> int:
        return len(self._free_spans)

    @property
    def free_window_pages(self) -> int:
        return len(self._free_windows)

    @explained()
    def reserve(self, request: int, start: int, rows: int) -> None:
        """Makes room for rows at positions start .. start + rows - 1, drafts included.

        Opens the request on first use. Takes spans for all tokens up to the last row and window
        pages for the live ones, and hands back window pages that no row of this or a later step
        reads: `start` is the accepted length, and no rollback goes behind it.

        Raises:
            ValueError: the request, the rows or the last position exceed the layout.
            OutOfPages: not enough free spans or window pages; nothing has changed.
        """
        layout = self.layout
        limit = layout.spans_per_request * layout.span_tokens - rows
        for name, value, most in (
            ("request", request, layout.max_requests - 1),
            ("rows", rows, layout.max_rows),
            ("start", start, limit),
        ):
            if not 0 <= value <= most:
                raise _error(f"BlockPool: {name}", f"0 to {most}", value)

        held = self._spans.get(request, [])
        windows = self._windows.get(request, {})
        new_spans = max(0, ceil_div(start + rows, layout.span_tokens) - len(held))
        live = self._live_columns(start, rows)
        idle = [column for column in windows if column not in live]
        new_columns = [column for column in live if column not in windows]
        if new_spans > self.free_spans:
            raise _exhausted(request, new_spans, "spans", self.free_spans)
        if len(new_columns) > self.free_window_pages + len(idle):
            free = self.free_window_pages + len(idle)
            raise _exhausted(request, len(new_columns), "window pages", free)

        self._spans[request] = held
        self._windows[request] = windows
        self._free_windows += [windows.pop(column) for column in idle]
        windows |= {column: self._free_windows.pop() for column in new_columns}
        if idle or new_columns:
            row = [windows.get(column, -1) for column in range(layout.window_columns)]
            _write(self.window_table[request], row)
        taken = [self._free_spans.pop() for _ in range(new_spans)]
        if taken:
            for ratio, table in self.block_tables.items():
                n = layout.pages_per_span(ratio)
                ids = [span * n + page for span in taken for page in range(n)]
                _write(table[request, len(held) * n : (len(held) + new_spans) * n], ids)
        held += taken

    @explained()
    def free(self, request: int) -> None:
        """Hands back all pages of a request.

        Raises:
            ValueError: the request is not open.
        """
        if request not in self._spans:
            raise _error("BlockPool: request", f"open ({sorted(self._spans)})", request)
        # Reversed, so that the next request gets the same ids in the same order.
        self._free_spans += reversed(self._spans.pop(request))
        self._free_windows += reversed(self._windows.pop(request).values())
        for table in (*self.block_tables.values(), self.window_table):
            table[request].fill_(-1)

    def _live_columns(self, start: int, rows: int) -> list[int]:
        """Ring columns of the tokens that the rows read or write, oldest first."""
        size = self.layout.spec.window_page_size
        first = max(0, start - self.layout.plan.window + 1)
        pages = range(first // size, (start + rows - 1) // size + 1)
        return list(dict.fromkeys(page % self.layout.window_columns for page in pages))


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def _stack(name: str, order: Sequence[int] | None, count: int) -> list[int]:
    ids = list(range(count) if order is None else order)
    if sorted(ids) != list(range(count)):
        raise _error(f"BlockPool: {name}", f"a permutation of 0 to {count - 1}", ids)
    return ids[::-1]


def _write(target: torch.Tensor, values: list[int]) -> None:
    target.copy_(torch.tensor(values, dtype=torch.int32))


def _exhausted(request: int, needed: int, what: str, free: int) -> OutOfPages:
    return OutOfPages(
        f"flash_csa.BlockPool: request {request} needs {needed} more {what}, {free} free"
    )


def _error(name: str, expected: object, got: object) -> ValueError:
    return ValueError(f"flash_csa.{name} must be {expected}, got {got}")
