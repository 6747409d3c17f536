"""One call of every kernel of a step, with the bytes that the model expects of it.

`python -m flash_csa.traffic.kernels MODEL CONTEXT BATCH ROWS GLOB` is what runs under ncu, for the
kernels whose names match; it prints the calls as one JSON list.
"""

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from functools import partial
from typing import Any

import torch

from .. import accounting as cost
from ..attend import attend
from ..batch import Batch
from ..cache import BlockPool, Cache, CacheSpec
from ..compress import Tail, compress
from ..group import Step
from ..index import IndexQuery, index_scores, quantize_query
from ..plan import HEAD_DIM, INDEX_DIM, ROPE_DIMS, Layer, LayerPlan
from ..records import RECORDS, Pages
from ..select import Pool, Selection, index_select, select
from ..store import load, rope_store, store
from . import ncu
from .model import Shape

CHUNK = 1 << 15  # records quantised at a time
NEAR = 1024  # records
SCORES_LIMIT = 8 << 30  # bytes of a score matrix that is still made


@dataclass(frozen=True)
class Kernel:
    """A call and its model. records: cache records that it reads or writes. scratch: bytes of the
    workspace that it writes and reads."""

    name: str
    cost: cost.Cost
    records: int
    call: Any
    scratch: int = 0


class Calls:
    """Random inputs of a step and a cache full of random records, on one device."""

    def __init__(
        self, plan: LayerPlan, spec: CacheSpec, shape: Shape, device: torch.device | str
    ) -> None:
        self.plan, self.spec, self.shape = plan, spec, shape
        self.device = torch.device(device)
        self.generator = torch.Generator(self.device).manual_seed(0)
        layout = shape.layout(plan, spec)
        self.cache: Cache = layout.allocate(device)
        for group in self.cache.groups:
            for pages in (group.main, group.index):
                if pages is not None:
                    self._fill(pages)
        self._fill(self.cache.window[0])
        order = torch.Generator().manual_seed(0)
        pool = BlockPool(
            layout,
            device=device,
            span_order=torch.randperm(layout.num_spans, generator=order).tolist(),
            window_order=torch.randperm(layout.window_pages, generator=order).tolist(),
        )
        for request in range(shape.batch):
            pool.reserve(request, shape.context - shape.rows, shape.rows)
        self.batch = Batch.build(shape.starts, shape.counts, device=device)
        self.step = Step(self.cache, self.batch, pool.block_tables, pool.window_table).begin()
        # The rotation is by position 0 everywhere: no byte depends on it.
        self.zeros = torch.zeros_like(self.batch.positions)
        self.cos_sin = torch.zeros(shape.context, ROPE_DIMS, device=device)
        self.cos_sin[:, : ROPE_DIMS // 2] = 1

    def bf16(self, *size: int) -> torch.Tensor:
        return torch.randn(size, generator=self.generator, device=self.device, dtype=torch.bfloat16)

    def f32(self, *size: int) -> torch.Tensor:
        return torch.randn(size, generator=self.generator, device=self.device)

    def _fill(self, pages: Pages) -> None:
        for first in range(0, pages.num_slots, CHUNK):
            last = min(first + CHUNK, pages.num_slots)
            slots = torch.arange(first, last, dtype=torch.int32, device=self.device)
            store(self.bf16(last - first, RECORDS[pages.record].dims), pages, slots)

    def kernels(self) -> Iterator[Kernel]:
        """One layer of every kind, in layer order; then the plain stores."""
        yield self._rope_store()
        seen = set()
        for layer in self.plan.layers:
            kind = (layer.mode, layer.ratio, layer.builds_pool)
            if layer.mode != "reuse" and kind not in seen:
                seen.add(kind)
                yield from self._layer(layer)
        yield from self._stores()

    def _layer(self, layer: Layer) -> Iterator[Kernel]:
        costs = self._costs(layer)
        suffix = f", ratio {layer.ratio}" if layer.ratio else ", window only"
        if layer.mode == "full":
            yield self._compress(layer, costs["compress"], suffix)
            if "compress_index" in costs:
                yield self._compress_index(layer, costs["compress_index"], suffix)
        if layer.scores:
            if not layer.reads_pool:  # the same call
                yield self._quantize(costs["quantize_query"], suffix)
            yield from self._index(layer, costs, suffix)
        yield from self._attend(layer, costs["attend"], suffix)

    def _costs(self, layer: Layer) -> dict[str, cost.Cost]:
        shape = self.shape
        return cost.layer_costs(self.plan, self.spec, layer, shape.starts, shape.counts)

    def _rope_store(self) -> Kernel:
        rows = self.batch.num_rows
        call = partial(
            rope_store,
            self.bf16(rows, self.plan.heads, HEAD_DIM),
            self.bf16(rows, HEAD_DIM),
            self.cache.window[0],
            self.step.slots.window_store,
            self.batch.positions,
            self.cos_sin,
            q_norm_eps=self.plan.q_norm_eps,
        )
        return Kernel("rope_store", self._costs(self.plan.layers[0])["rope_store"], rows, call)

    def _compress(self, layer: Layer, expected: cost.Cost, suffix: str) -> Kernel:
        group = self.plan.groups[layer.group]
        pages = self.cache.groups[group.index]
        arguments = self._pooling(layer, group.main_width, self.cache.tails[group.index].main)
        arguments |= {"main": pages.main, "norm_weight": torch.ones(HEAD_DIM, device=self.device)}
        if group.indexed and not group.index_width:
            arguments["index"] = pages.index
            arguments["key_weight"] = self.bf16(INDEX_DIM, HEAD_DIM) / 16
            arguments["key_norm_weight"] = torch.ones(INDEX_DIM, device=self.device)
        rows = self.batch.num_rows
        return Kernel(
            "compress" + suffix, expected, rows // group.ratio, partial(compress, **arguments)
        )

    def _compress_index(self, layer: Layer, expected: cost.Cost, suffix: str) -> Kernel:
        group = self.plan.groups[layer.group]
        arguments = self._pooling(layer, group.index_width, self.cache.tails[group.index].index)
        arguments |= {
            "index": self.cache.groups[group.index].index,
            "norm_weight": torch.ones(INDEX_DIM, device=self.device),
            "rotate": self.plan.rotate,
        }
        rows = self.batch.num_rows
        return Kernel(
            "compress_index" + suffix, expected, rows // group.ratio, partial(compress, **arguments)
        )

    def _pooling(self, layer: Layer, width: int, tail: Tail | None) -> dict[str, Any]:
        """The arguments that both compressors of a layer have."""
        rows, ratio = self.batch.num_rows, layer.ratio
        arguments: dict[str, Any] = {
            "batch": self.batch,
            "entry_slots": self.step.entry_slots(ratio),
            "ratio": ratio,
            "eps": self.plan.eps,
            "cos_sin": self.cos_sin,
            "workspace": self.step.workspace,
        }
        if ratio == 1:
            return arguments | {"kv": self.bf16(rows, width)}
        both = self.f32(rows, 2 * width)
        tail.rows.normal_(generator=self.generator)
        arguments |= {"kv": both[:, :width], "gate": both[:, width:], "tail": tail}
        if self.plan.family == "v4":
            arguments["bias"] = self.f32(ratio, width)
        return arguments

    def _quantize(self, expected: cost.Cost, suffix: str) -> Kernel:
        rows, heads = self.batch.num_rows, self.plan.index_heads
        q = self.bf16(rows, heads, INDEX_DIM)
        call = partial(
            quantize_query,
            q,
            self.zeros,
            self.cos_sin,
            record=self.spec.index,
            rotate=self.plan.rotate,
            out=self.step.query,
        )
        return Kernel("quantize_query" + suffix, expected, rows * heads, call)

    def _index(self, layer: Layer, costs: dict[str, cost.Cost], suffix: str) -> Iterator[Kernel]:
        plan, step = self.plan, self.step
        stage = "reindex" if layer.reads_pool else "index_select"
        expected = costs[stage]
        keys = expected.bytes["index keys"] // RECORDS[self.spec.index].bytes
        query = quantize_query(
            self.bf16(self.batch.num_rows, plan.index_heads, INDEX_DIM),
            self.zeros,
            self.cos_sin,
            record=self.spec.index,
            out=IndexQuery.empty(
                self.batch.num_rows, plan.index_heads, self.spec.index, self.device
            ),
        )
        scan = {
            "query": query,
            "index": self.cache.groups[layer.group].index,
            "weights": self.f32(self.batch.num_rows, plan.index_heads),
            "batch": self.batch,
            "block_table": step.block_tables[layer.ratio],
            "schedule": step.section(layer.ratio, "reindex" if layer.reads_pool else "index"),
            "ratio": layer.ratio,
        }
        call = partial(
            index_select,
            **scan,
            k=plan.topk,
            pool=step.pool if layer.reads_pool else None,
            pool_blocks=plan.pool_blocks if layer.builds_pool else 0,
            workspace=step.workspace,
            out=(step.selection, step.pool if layer.builds_pool else None),
        )
        entries = 0 if layer.reads_pool else int(step.n_vis(layer.ratio).sum())
        yield Kernel(stage + suffix, expected, keys, call, cost.score_scratch(entries))
        if not layer.reads_pool:
            yield from self._two_steps(layer, scan, keys, suffix)

    def _two_steps(
        self, layer: Layer, scan: dict[str, Any], keys: int, suffix: str
    ) -> Iterator[Kernel]:
        """The fused pair's halves, where the score matrix is not absurd."""
        plan, spec, rows = self.plan, self.spec, self.batch.num_rows
        page_size = spec.page_sizes[layer.ratio]
        columns = scan["block_table"].shape[1] * page_size
        if rows * columns * cost.F32 > SCORES_LIMIT:
            return
        entries = int(self.step.n_vis(layer.ratio).sum())
        scores = torch.empty(rows, columns, device=self.device)
        expected = cost.index_scores(
            rows=rows,
            heads=plan.index_heads,
            entries=entries,
            unique_entries=keys,
            record=spec.index,
        )
        workspace = self.step.workspace
        call = partial(index_scores, **scan, workspace=workspace, out=scores)
        yield Kernel("index_scores" + suffix, expected, keys, call)
        chosen = Selection.empty(rows, plan.topk, self.device)
        built = plan.pool_blocks if layer.builds_pool else 0
        for blocks in dict.fromkeys((built, 0)):
            pool = Pool.empty(rows, blocks, self.device) if blocks else None
            call = partial(
                select,
                scores,
                self.batch,
                plan.topk,
                scan["schedule"],
                block_table=scan["block_table"],
                ratio=layer.ratio,
                page_size=page_size,
                pool_blocks=blocks,
                workspace=workspace,
                out=(chosen, pool),
            )
            expected = cost.select(rows=rows, entries=entries, k=plan.topk, pool_blocks=blocks)
            without = "" if blocks == built else ": no pool"
            yield Kernel(f"select{suffix}{without}", expected, 0, call)

    def _attend(self, layer: Layer, expected: cost.Cost, suffix: str) -> Iterator[Kernel]:
        """The call; the same with rows that are never cut, which has no partial results; and where
        all rows select among NEAR records, which the L2 holds."""
        step, rows, heads = self.step, self.batch.num_rows, self.plan.heads
        kind = "window" if layer.kv_source is None else "attend"
        kind = "contiguous" if layer.contiguous else kind
        arguments: dict[str, Any] = {}
        if layer.kv_source is not None:
            arguments["main"] = self.cache.groups[layer.group].main
        if layer.contiguous:
            table, n_vis = step.block_tables[layer.ratio], step.n_vis(layer.ratio)
            arguments["contiguous"] = (table, self.batch.row_request, n_vis)
        elif layer.kv_source is not None:
            arguments["selection"] = step.selection
        call = partial(
            attend,
            self.bf16(rows, heads, HEAD_DIM),
            **arguments,
            window_pages=self.cache.window[0],
            window=step.slots.lists,
            sink=self.f32(heads),
            derotate=(self.zeros, self.cos_sin),
            schedule=step.section(layer.ratio, kind),
            workspace=step.workspace,
            out=torch.empty(rows, heads, HEAD_DIM, dtype=torch.bfloat16, device=self.device),
            lse=torch.empty(rows, heads, device=self.device),
        )
        mode = " after reindex" if layer.mode == "reindex" else ""
        name = f"attend{mode}{suffix}"
        main, window = RECORDS[self.spec.main], RECORDS[self.spec.window]
        unique = expected.bytes["main codes"] // main.data_bytes
        records = unique + expected.bytes["window"] // window.bytes
        yield Kernel(name, expected, records, call)
        yield Kernel(f"{name}: rows whole", expected, records, partial(call, batch_invariant=True))
        if "selection" in arguments:
            chosen = step.selection
            near = replace(chosen, slots=torch.where(chosen.slots < 0, -1, chosen.slots % NEAR))
            few = min(NEAR, unique)
            fewer = {"main codes": few * main.data_bytes, "main scales": few * main.scale_bytes}
            expected = replace(expected, bytes={**expected.bytes, **fewer})
            records += few - unique
            yield Kernel(f"{name}: near records", expected, records, partial(call, selection=near))

    def _stores(self) -> Iterator[Kernel]:
        """store and load of as many main records as a chunk has rows, at the first pages."""
        pages = self.cache.groups[0].main
        count = min(self.batch.num_rows, pages.num_slots)
        slots = torch.arange(count, dtype=torch.int32, device=self.device)
        rows = self.bf16(count, HEAD_DIM)
        expected = cost.store(rows=count, record=pages.record)
        yield Kernel("store", expected, count, partial(store, rows, pages, slots))
        yield Kernel("load", expected, count, partial(load, pages, slots, rows))


def main(arguments: list[str]) -> None:
    """Runs every kernel, those that match once more and cold, and prints their models."""
    model, *numbers, glob = arguments
    plan = LayerPlan.from_config(model)
    shape = Shape(*map(int, numbers))
    calls = Calls(plan, CacheSpec.for_plan(plan), shape, "cuda")
    printed = []
    for kernel in calls.kernels():
        kernel.call()  # later ones read what it writes
        if not fnmatch(kernel.name, glob):
            continue
        ncu.warm(kernel.call)
        with ncu.region():
            ncu.mark()
            kernel.call()
        printed.append(
            {
                "kernel": kernel.name,
                "bytes": dict(kernel.cost.bytes),
                "flops": kernel.cost.flops,
                "records": kernel.records,
                "scratch": kernel.scratch,
            }
        )
    print(json.dumps(printed))


if __name__ == "__main__":
    main(sys.argv[1:])
