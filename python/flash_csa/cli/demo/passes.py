"""Two ways through the same tokens: chunks of a prompt, or one token after the other.

Each pass has a cache of its own, filled with 0xFF before anything is written, and its own
permutation of pages: equal results can come from nothing but the algorithm.
"""

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise

import torch
from torch import Tensor

from ... import group as library
from ...batch import Batch
from ...cache import BlockPool, Cache, CacheSpec
from ...group import Group, Query, Step, store_window, window_layer
from ...plan import Layer, LayerPlan
from .model import Projections

CHUNK = 769  # so that chunks cut groups of 2, 4 and 128 tokens
POISON = 0xFF  # NaN in every scale and every float
STAGES = (
    "step_slots",
    "schedule",
    "compress",
    "rope_store",
    "quantize_query",
    "index_select",
    "attend",
)


def chunk_cuts(inputs: Projections) -> list[int]:
    """Chunks of a prompt; the rows that attend are the last one."""
    first = inputs.first_query
    return [*range(0, first, CHUNK), first, inputs.tokens]


def token_cuts(inputs: Projections) -> list[int]:
    """One row a step."""
    return list(range(inputs.tokens + 1))


class StageClock:
    """Seconds spent in the stages that `flash_csa.group` calls, while it runs."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Puts a timed stage in the place of each."""
        stages = {name: getattr(library, name) for name in STAGES}
        for name, stage in stages.items():
            setattr(library, name, self._timed(name, stage))
        try:
            yield
        finally:
            for name, stage in stages.items():
                setattr(library, name, stage)

    def _timed(self, name: str, stage: Callable) -> Callable:
        seconds, now = self.seconds, time.perf_counter

        def timed(*args, **kwargs):
            begin = now()
            result = stage(*args, **kwargs)
            seconds[name] += now() - begin
            return result

        return timed


@dataclass
class Results:
    """What the query rows of a layer produced, in row order."""

    out: list[Tensor] = field(default_factory=list)  # bf16 [rows, H, 512]
    selections: list[Tensor] = field(default_factory=list)  # i32 [rows, K] positions
    pools: list[Tensor] = field(default_factory=list)  # i32 [rows, blocks]


class Pass:
    """One pass over the tokens of `inputs`, in steps of rows cuts[i] .. cuts[i + 1] - 1.

    cos_sin: rotation tables "window" and "compressed". seed: of the permutation of pages.
    """

    def __init__(
        self,
        plan: LayerPlan,
        inputs: Projections,
        cos_sin: dict[str, Tensor],
        *,
        cuts: Sequence[int],
        seed: int,
    ) -> None:
        self.plan, self.inputs, self.cos_sin, self.cuts = plan, inputs, cos_sin, cuts
        max_rows = max(end - start for start, end in pairwise(cuts))
        spec = CacheSpec.for_plan(plan)
        layout = spec.layout(plan, max_tokens=inputs.tokens, max_rows=max_rows)
        self.cache = layout.allocate()
        _poison(self.cache)
        random = torch.Generator().manual_seed(seed)
        self.pages = BlockPool(
            layout,
            span_order=torch.randperm(layout.num_spans, generator=random).tolist(),
            window_order=torch.randperm(layout.window_pages, generator=random).tolist(),
        )
        self.groups = [
            Group(
                self.cache,
                number,
                cos_sin=cos_sin["compressed"],
                compressor=source.compressor,
            )
            for number, source in enumerate(inputs.sources)
        ]
        self.results = [Results() for _ in plan.layers]
        self.clock = StageClock()
        self.seconds = 0.0
        self._steps: dict[int, Step] = {}

    def run(self, advance: Callable[[int], None]) -> "Pass":
        """All rows; `advance` after each step, with its rows."""
        begin = time.perf_counter()
        with self.clock.running():
            for start, end in pairwise(self.cuts):
                self._rows(start, end - start)
                advance(end - start)
        self.seconds = time.perf_counter() - begin
        return self

    def _rows(self, start: int, rows: int) -> None:
        self.pages.reserve(0, start, rows)
        batch = Batch.build([start], [rows])
        if rows not in self._steps:
            tables = self.pages.block_tables, self.pages.window_table
            self._steps[rows] = Step(self.cache, batch, *tables, batch_invariant=True)
        step = self._steps[rows].begin(batch)
        if start < self.inputs.first_query:
            self._store(step, start, rows)
        else:
            self._attend(step, start, rows)

    def _store(self, step: Step, start: int, rows: int) -> None:
        """Rows whose attention nobody reads: their records alone."""
        for number, group in enumerate(self.groups):
            group.compress(step, self.inputs.rows_of(number, start, rows))
        for layer in self.plan.layers:
            window_kv = self.inputs.window_kv[layer.index][start : start + rows]
            store_window(self.cache, layer.index, step, window_kv, self._table(layer.ratio))

    def _attend(self, step: Step, start: int, rows: int) -> None:
        """All layers, in order."""
        for layer in self.plan.layers:
            query = self.inputs.query_of(layer.index, start, rows)
            results = self.results[layer.index]
            results.out.append(self._layer(layer, step, query, start))
            if layer.scores:
                results.selections.append(step.selection.positions.clone())
            if layer.builds_pool:
                results.pools.append(step.pool.blocks.clone())

    def _layer(self, layer: Layer, step: Step, query: Query, start: int) -> Tensor:
        if layer.mode == "window":
            return window_layer(self.cache, layer.index, step, query, self._table(0))
        group = self.groups[layer.group]
        if layer.mode == "reuse":
            return group.reuse(layer.index, step, query)
        if layer.mode == "reindex":
            return group.reindex(layer.index, step, query)
        tokens = self.inputs.rows_of(layer.group, start, len(query.q))
        return group.full(layer.index, step, query, tokens)

    def _table(self, ratio: int) -> Tensor:
        return self.cos_sin["compressed" if ratio else "window"]


def _poison(cache: Cache) -> None:
    pages = [pages for group in cache.groups for pages in (group.main, group.index) if pages]
    for each in (*pages, *cache.window):
        each.data.fill_(POISON)
    for tails in cache.tails:
        for tail in (tails.main, tails.index):
            if tail:
                tail.rows.view(torch.uint8).fill_(POISON)
