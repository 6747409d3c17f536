"""The model of a step's traffic: every byte that must cross HBM once, and what comes on top."""

from collections import Counter
from dataclasses import dataclass
from typing import Any

from ..accounting import (
    Cost,
    attended_entries,
    cache_bytes,
    expected_unique,
    gather_bytes,
    layer_costs,
    pool_positions,
    sector_bytes,
    step_costs,
)
from ..cache import CacheLayout, CacheSpec, ceil_div
from ..plan import POOL_BLOCK, Layer, LayerPlan
from ..records import RECORDS

KINDS = (
    *("main codes", "main scales", "index keys", "window", "lists", "scores", "queries"),
    *("outputs", "inputs", "weights", "tables", "tails"),
)


@dataclass(frozen=True)
class Shape:
    """A step: `batch` requests of `context` tokens, of which the last `rows` are its rows."""

    context: int
    batch: int = 1
    rows: int = 1

    def __post_init__(self) -> None:
        for name, most in (("context", None), ("batch", None), ("rows", self.context)):
            value = getattr(self, name)
            if value < 1 or (most is not None and value > most):
                expected = "at least 1" if most is None else f"1 to {most} (the context)"
                raise ValueError(f"flash_csa.traffic: {name} must be {expected}, got {value}")

    @property
    def starts(self) -> list[int]:
        return [self.context - self.rows] * self.batch

    @property
    def counts(self) -> list[int]:
        return [self.rows] * self.batch

    def layout(self, plan: LayerPlan, spec: CacheSpec) -> CacheLayout:
        sizes = {"max_tokens": self.context, "max_requests": self.batch, "max_rows": self.rows}
        return spec.layout(plan, **sizes)


def report(plan: LayerPlan, spec: CacheSpec, shape: Shape) -> dict[str, Any]:
    """Bytes of one step, as JSON holds them.

    stages: bytes by kind, their sum and FLOPs of each stage over all layers. kinds: over all
    stages. unique_pages: pages that the step reads, each layer's counted once. page_waste_nbytes:
    of the allocated cache beyond complete entries. sector_waste_nbytes: fetched with the records
    because sectors are whole. gather_nbytes: what a path through BF16 copies of the records and a
    score matrix would move on top.
    """
    costs = step_costs(plan, spec, shape.starts, shape.counts)
    total = sum(costs.values(), Cost())
    touched = _Touched(plan, spec, shape)
    cache = cache_bytes(shape.layout(plan, spec), [shape.context] * shape.batch)
    return {
        "context": shape.context,
        "batch": shape.batch,
        "rows": shape.rows,
        "stages": {
            stage: {"bytes": dict(cost.bytes), "nbytes": cost.nbytes, "flops": cost.flops}
            for stage, cost in costs.items()
        },
        "kinds": {kind: total.bytes[kind] for kind in KINDS if total.bytes.get(kind)},
        "nbytes": total.nbytes,
        "flops": total.flops,
        "unique_pages": dict(touched.pages),
        "page_waste_nbytes": cache.allocated - cache.ideal,
        "sector_waste_nbytes": {kind: round(waste) for kind, waste in touched.waste.items()},
        "tail_nbytes": total.bytes.get("tails", 0),
        "gather_nbytes": {
            "records": gather_bytes(records=touched.records),
            "scores": gather_bytes(scores=touched.scores),
        },
    }


class _Touched:
    """Pages, sectors, records and scores of a step, added up over layers."""

    def __init__(self, plan: LayerPlan, spec: CacheSpec, shape: Shape) -> None:
        self.plan, self.spec, self.shape = plan, spec, shape
        self.pages: Counter[str] = Counter()
        self.waste: Counter[str] = Counter()
        self.records = self.scores = 0
        for layer in plan.layers:
            costs = layer_costs(plan, spec, layer, shape.starts, shape.counts)
            self._window(costs["attend"])
            if layer.kv_source is not None:
                self._main(layer, costs["attend"])
            if layer.scores:
                stage = "reindex" if layer.reads_pool else "index_select"
                self._index(layer, costs[stage])

    def _add(self, kind: str, cost: Cost, record: str, page_size: int, run: int) -> int:
        """Counts the sectors of a cost's records; returns the records."""
        kinds = ("main codes", "main scales") if kind == "main" else (kind,)
        nbytes = sum(cost.bytes.get(name, 0) for name in kinds)
        records = nbytes // RECORDS[record].bytes
        each = sector_bytes(record, page_size, min(run, page_size)) - RECORDS[record].bytes
        self.waste[kind] += records * each
        return records

    def _window(self, cost: Cost) -> None:
        size = self.spec.window_page_size
        self.records += self._add("window", cost, self.spec.window, size, size)
        tokens = min(self.shape.context, self.plan.window - 1 + self.shape.rows)
        first = self.shape.context - tokens
        pages = (self.shape.context - 1) // size - first // size + 1
        self.pages["window"] += self.shape.batch * pages

    def _main(self, layer: Layer, cost: Cost) -> None:
        size = self.spec.page_sizes[layer.ratio]
        run = size if layer.contiguous else 1
        self.records += self._add("main", cost, self.spec.main, size, run)
        visible = self.shape.context // layer.ratio
        pages = ceil_div(visible, size)
        if not layer.contiguous:
            picks = self.shape.rows * attended_entries(self.plan, layer, visible)
            pages = expected_unique(picks, pages)
        self.pages["main"] += self.shape.batch * pages

    def _index(self, layer: Layer, cost: Cost) -> None:
        size = self.spec.page_sizes[layer.ratio]
        visible = self.shape.context // layer.ratio
        pages = ceil_div(visible, size)
        scored = visible
        if layer.reads_pool:
            scored = pool_positions(self.plan, visible)
            pages = expected_unique(self.shape.rows * ceil_div(scored, POOL_BLOCK), pages)
        run = POOL_BLOCK if layer.reads_pool else size
        self._add("index keys", cost, self.spec.index, size, run)
        self.pages["index"] += self.shape.batch * pages
        self.scores += self.shape.batch * self.shape.rows * scored
