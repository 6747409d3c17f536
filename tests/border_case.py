"""Small stacks of both families with caches, and packed steps of any requests, for the tests of
sequence borders."""

from collections.abc import Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace

import torch

import border_check
import flash_csa as fc
from compare import assert_same_bytes
from flash_csa import configs
from flash_csa.reference import pages as ref_pages

SMALL = {"num_attention_heads": 2, "index_n_heads": 8, "index_topk": 16, "sliding_window": 32}
V41 = {  # window, Full, Full and candidate source, Reindex, Reuse
    "num_hidden_layers": 5,
    "compress_ratios": [0, 2, 1, 1, 1],
    "kv_source_layer_ids": [1, 2],
    "index_source_layer_ids": [1, 2, 3],
    "candidate_source_layer_id": 2,
    "candidate_topk_blocks": 4,
}
V4 = {"num_hidden_layers": 3, "compress_ratios": [0, 4, 128]}
PLANS = {
    "v41": fc.LayerPlan.from_config({**configs.V41_FLASH, **SMALL, **V41}),
    "v4": fc.LayerPlan.from_config({**configs.V4_FLASH, **SMALL, **V4}),
}
PAGE_SIZES = {1: 8, 2: 8, 4: 8, 128: 2}
MAX_POS = 1 << 17


class Stack:
    """Weights of a family's small model, and rotation tables for MAX_POS positions."""

    def __init__(self, family: str) -> None:
        self.plan = plan = PLANS[family]
        self.spec = fc.CacheSpec.for_plan(plan, page_sizes=PAGE_SIZES, window_page_size=8)
        self.random = torch.Generator().manual_seed(1)
        self.compressors = [self._compressor(group) for group in plan.groups]
        self.tables = {
            compressed: fc.cos_sin_table(MAX_POS, theta, compressed)
            for compressed, theta in ((False, plan.theta), (True, plan.compressed_theta))
        }

    def _normal(self, *size: int) -> torch.Tensor:
        return torch.randn(size, generator=self.random)

    def _compressor(self, group) -> fc.Compressor:
        norm = 1 + self._normal(512) / 8
        if self.plan.family == "v41":
            key = (self._normal(128, 512) / 16).bfloat16()
            return fc.Compressor(norm, key, 1 + self._normal(128) / 8)
        made = fc.Compressor(norm, bias=self._normal(group.ratio, group.main_width))
        if not group.indexed:
            return made
        own = (1 + self._normal(128) / 8, self._normal(group.ratio, group.index_width))
        return replace(made, index_norm=own[0], index_bias=own[1])

    def table(self, layer: int) -> torch.Tensor:
        return self.tables[self.plan.layers[layer].ratio > 0]


@dataclass(frozen=True)
class Text:
    """Inputs of every layer and group for the tokens of one content."""

    queries: list[fc.Query]
    tokens: list[fc.Tokens]

    @classmethod
    def seeded(cls, stack: Stack, tokens: int, seed: int) -> "Text":
        random = torch.Generator().manual_seed(seed)

        def normal(*size: int) -> torch.Tensor:
            return torch.randn(tokens, *size, generator=random)

        def query(layer) -> fc.Query:
            made = fc.Query(normal(plan.heads, 512).bfloat16(), normal(512).bfloat16())
            if not layer.scores:
                return made
            index_q = normal(plan.index_heads, 128).bfloat16()
            return replace(made, index_q=index_q, index_weights=normal(plan.index_heads))

        def inputs(group) -> fc.Tokens:
            if group.ratio == 1:
                return fc.Tokens(normal(512).bfloat16())
            widths = [group.main_width] * 2 + [group.index_width] * 2 * (group.index_width > 0)
            return fc.Tokens(*map(normal, widths))

        plan = stack.plan
        return cls(
            [query(layer) for layer in plan.layers], [inputs(group) for group in plan.groups]
        )


def packed(parts: Sequence[tuple[object, slice, int]], more: int):
    """Rows of several texts' inputs put together: (inputs, its rows, padded rows behind), then
    `more` padded rows. Padded rows are NaN."""
    first = parts[0][0]

    def rows_of(name: str) -> torch.Tensor | None:
        if getattr(first, name) is None:
            return None
        pieces = []
        for inputs, rows, padding in parts:
            own = getattr(inputs, name)
            pieces += [own[rows], own.new_full((padding, *own.shape[1:]), torch.nan)]
        pieces.append(own.new_full((more, *own.shape[1:]), torch.nan))
        return torch.cat(pieces)

    return type(first)(**{field.name: rows_of(field.name) for field in fields(first)})


@dataclass(frozen=True)
class Part:
    """Rows start .. start + rows - 1 of a request in a step, then `padding` padded rows."""

    request: int
    start: int
    rows: int
    padding: int = 0


@dataclass(frozen=True)
class Result:
    """Outputs of all layers of a step (or several, of one request)."""

    parts: list[Part]
    layers: list[dict[str, torch.Tensor]]  # out, lse; positions where a selection is read; blocks

    def of(self, request: int) -> list[dict[str, torch.Tensor]]:
        """The valid rows of a request."""
        begin = 0
        for part in self.parts:
            if part.request == request:
                rows = slice(begin, begin + part.rows)
                return [{name: x[rows] for name, x in layer.items()} for layer in self.layers]
            begin += part.rows + part.padding
        raise KeyError(request)

    def padded(self) -> list[dict[str, torch.Tensor]]:
        """The rows that belong to no token."""
        real = torch.zeros(len(self.layers[0]["out"]), dtype=torch.bool)
        begin = 0
        for part in self.parts:
            real[begin : begin + part.rows] = True
            begin += part.rows + part.padding
        return [{name: x[~real] for name, x in layer.items()} for layer in self.layers]


def joined(results: Sequence[Result], request: int) -> list[dict[str, torch.Tensor]]:
    """The rows of a request in consecutive steps."""
    steps = [result.of(request) for result in results]
    return [
        {name: torch.cat([part[name] for part in layer]) for name in layer[0]}
        for layer in zip(*steps, strict=True)
    ]


class World:
    """Requests on a cache whose pages lie in random order and hold NaN until they are written.

    Token i of request r's text stands at position shifts[r] + i. held_tokens: of all requests
    together; default: max_tokens each.
    """

    def __init__(
        self,
        stack: Stack,
        texts: Sequence[Text],
        *,
        max_tokens: int,
        max_rows: int,
        max_draft: int = 0,
        held_tokens: int | None = None,
        shifts: Sequence[int] | None = None,
        seed: int = 0,
    ) -> None:
        self.stack, self.texts = stack, list(texts)
        self.shifts = list(shifts or [0] * len(texts))
        sizes = {"max_tokens": max_tokens, "max_requests": len(texts), "max_rows": max_rows}
        layout = stack.spec.layout(stack.plan, max_draft=max_draft, **sizes)
        if held_tokens is not None:
            layout = replace(layout, num_spans=held_tokens // layout.span_tokens + len(texts))
        self.cache = layout.allocate()
        for pages in self.pages():
            pages.data.fill_(0xFF)
        for tail in self.tails():
            tail.rows.fill_(torch.nan)
        order = torch.Generator().manual_seed(seed)
        self.pool = fc.BlockPool(
            layout,
            span_order=torch.randperm(layout.num_spans, generator=order).tolist(),
            window_order=torch.randperm(layout.window_pages, generator=order).tolist(),
        )
        self.groups = [
            fc.Group(self.cache, number, cos_sin=stack.tables[True], compressor=weights)
            for number, weights in enumerate(stack.compressors)
        ]

    def pages(self) -> list[fc.Pages]:
        """All pages: main and index of each group, windows."""
        parts = [part for group in self.cache.groups for part in (group.main, group.index)]
        return [part for part in (*parts, *self.cache.window) if part is not None]

    def tails(self) -> list[fc.Tail]:
        parts = [tail for pair in self.cache.tails for tail in (pair.main, pair.index)]
        return [tail for tail in parts if tail is not None]

    # ---- Steps

    def step(
        self,
        parts: Sequence[Part],
        *,
        more_padding: int = 0,
        compress: bool = True,
        check: bool = False,
        **options,
    ) -> Result:
        """All layers over the rows of `parts`, in their order, then `more_padding` padded rows.

        compress: False leaves the compressors out. check: compares every layer with the reference.
        options: of fc.Step; window_first and entry_first have a value per part.
        """
        parts = list(parts)
        for part in parts:
            self.pool.reserve(part.request, part.start, part.rows)
        order = [part.request for part in parts]
        owned = [part.rows + part.padding for part in parts]
        batch = fc.Batch.build(
            [part.start for part in parts],
            [part.rows for part in parts],
            owned=owned,
            num_rows=sum(owned) + more_padding,
            tail_slot=order,
        )
        tables = {ratio: table[order] for ratio, table in self.pool.block_tables.items()}
        step = fc.Step(self.cache, batch, tables, self.pool.window_table[order], **options).begin()
        if check:
            border_check.check_slots(self.stack, step)
        layers = []
        for layer in self.stack.plan.layers:
            query = self._rows("queries", layer.index, parts, more_padding)
            tokens = None
            if layer.mode == "full" and compress:
                tokens = self._rows("tokens", layer.group, parts, more_padding)
            layers.append(self._layer(layer, step, query, tokens, check))
        return Result(parts, layers)

    def _rows(self, kind: str, number: int, parts: Sequence[Part], more: int):
        pieces = []
        for part in parts:
            first = part.start - self.shifts[part.request]
            inputs = getattr(self.texts[part.request], kind)[number]
            pieces.append((inputs, slice(first, first + part.rows), part.padding))
        return packed(pieces, more)

    def _layer(self, layer, step: fc.Step, query: fc.Query, tokens, check: bool) -> dict:
        sink = torch.linspace(-1, 1, self.stack.plan.heads)
        query = replace(query, sink=sink)
        before = border_check.Before.of(self.cache, layer) if check else None
        given = replace(query, q=query.q.clone())
        shape = query.q.shape
        out = torch.full(shape, torch.nan, dtype=torch.bfloat16)
        lse = torch.full(shape[:2], torch.nan)
        if layer.mode == "window":
            table = self.stack.tables[False]
            fc.window_layer(self.cache, layer.index, step, query, table, out=out, lse=lse)
        else:
            group = self.groups[layer.group]
            more = {"tokens": tokens} if layer.mode == "full" else {}
            getattr(group, layer.mode)(layer.index, step, query, out=out, lse=lse, **more)
        found = {"out": out, "lse": lse}
        if layer.index_source is not None:
            found["positions"] = step.selection.positions.clone()
        if layer.builds_pool:
            found["blocks"] = step.pool.blocks.clone()
        if check:
            work = border_check.Work(self.stack, self.cache, step, layer, given, query.q, before)
            if tokens is not None:
                work.check_compress(tokens)
            if layer.scores:
                work.check_selection()
            work.check_attend(out, lse)
        return found

    # ---- What a request has in the cache

    def _slots(self, table: torch.Tensor, request: int, at: torch.Tensor, size: int):
        columns = at // size % table.shape[1]
        return table[request, columns] * size + (at % size).int()

    def entry_slots(self, group: int, request: int, entries: torch.Tensor) -> torch.Tensor:
        ratio, pages = self.stack.plan.groups[group].ratio, self.cache.groups[group]
        table = self.pool.block_tables[ratio]
        return self._slots(table, request, entries, pages.main.page_size)

    def window_slots(self, request: int, positions: torch.Tensor) -> torch.Tensor:
        return self._slots(self.pool.window_table, request, positions, 8)

    def state(self, request: int, length: int, *, first: int = 0) -> dict[str, torch.Tensor]:
        """The bytes that a request of `length` tokens has: records of entries from token `first`
        on, live window records, tail rows that a later step may read."""
        parts = {}
        for group, pages in zip(self.stack.plan.groups, self.cache.groups, strict=True):
            entries = torch.arange(-(-first // group.ratio), length // group.ratio)
            slots = self.entry_slots(group.index, request, entries)
            for kind, part in (("main", pages.main), ("index", pages.index)):
                if part is not None:
                    rows = ref_pages.read_rows(part.data, slots, part.record, part.page_size)
                    parts[f"{kind} {group.index}"] = torch.cat(rows, 1)
            open_from = (length // group.ratio - group.overlap) * group.ratio
            live = torch.arange(max(open_from, first, 0), length)
            tails = self.cache.tails[group.index]
            for kind, tail in (("tail", tails.main), ("index tail", tails.index)):
                if tail is not None:
                    ring = tail.rows.shape[2]
                    parts[f"{kind} {group.index}"] = tail.rows[request][:, live % ring]
        live = torch.arange(max(length - self.stack.plan.window + 1, first, 0), length)
        slots = self.window_slots(request, live)
        for layer, pages in enumerate(self.cache.window):
            rows = ref_pages.read_rows(pages.data, slots, pages.record, pages.page_size)
            parts[f"window {layer}"] = torch.cat(rows, 1)
        return parts

    # ---- Changing it

    def fill_randomly(self, seed: int) -> None:
        """Bytes and tail rows of a history that nobody computed: finite values."""
        random = torch.Generator().manual_seed(seed)
        for pages in self.pages():
            pages.data.random_(0, 0x40, generator=random)
        for tail in self.tails():
            tail.rows.normal_(generator=random)

    def take_over(
        self, request: int, prefix: int, length: int, *, window: bool = True, tail: bool = True
    ) -> None:
        """Makes the first `length` tokens of the request `prefix` the beginning of `request`."""
        self.pool.reserve(request, length, 1)
        for group, pages in zip(self.stack.plan.groups, self.cache.groups, strict=True):
            table = self.pool.block_tables[group.ratio]
            full, rest = divmod(length // group.ratio, pages.main.page_size)
            if rest:
                old, new = table[prefix, full], table[request, full]
                for part in (pages.main, pages.index):
                    if part is not None:
                        part.data[new] = part.data[old]
        for ratio, table in self.pool.block_tables.items():
            full = length // ratio // self.stack.spec.page_sizes[ratio]
            table[request, :full] = table[prefix, :full]
        live = torch.arange(max(length - self.stack.plan.window + 1, 0), length)
        for pages in self.cache.window if window else ():
            old, new = (
                self.window_slots(r, live).long() // pages.page_size for r in (prefix, request)
            )
            pages.data[new] = pages.data[old]
        for part in self.tails() if tail else ():
            part.rows[request] = part.rows[prefix]

    @contextmanager
    def planted(self, group: int, entries: Sequence[int], key: torch.Tensor | None):
        """While it lasts, request 0's `entries` hold values of 1e4 (as far as the record goes) and
        keys along `key`, large."""
        pages = self.cache.groups[group]
        slots = self.entry_slots(group, 0, torch.tensor(list(entries), dtype=torch.int64))
        kept = [part.data.clone() for part in (pages.main, pages.index) if part]
        rows = torch.full((len(slots), 512), 1e4, dtype=torch.bfloat16)
        fc.store(rows, pages.main, slots)
        if key is not None:
            fc.store((key * 2.0**40).expand(len(slots), -1).contiguous(), pages.index, slots)
        yield
        for part, data in zip((pages.main, pages.index), kept, strict=False):
            part.data.copy_(data)


def assert_same_rows(got: list[dict], want: list[dict]) -> None:
    """Outputs, lse, selections and pools of all layers, bit for bit."""
    for layer, (a, b) in enumerate(zip(got, want, strict=True)):
        for name in a:
            assert_same_bytes(a[name], b[name], f"{name} of layer {layer}")


def assert_same_state(got: dict, want: dict) -> None:
    """What two requests have in their caches, bit for bit."""
    assert got.keys() == want.keys()
    for name in got:
        assert_same_bytes(got[name], want[name], name)
