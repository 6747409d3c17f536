"""Groups of layers on a paged cache: who writes what, chunks against decode, the reference."""

from dataclasses import dataclass, replace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from flash_csa import Batch, cos_sin_table, load
from flash_csa.cache import BlockPool, Cache, CacheSpec
from flash_csa.group import (
    Compressor,
    Group,
    Query,
    Step,
    Tokens,
    store_window,
    window_layer,
)
from flash_csa.plan import LayerPlan
from flash_csa.reference import group as reference
from flash_csa.reference.compress import Entries

TOKENS = 150
MAIN, KEYS = 512, 128
V41 = {  # window, Full, Reuse, Full + candidate source, Reindex, Reuse
    "num_hidden_layers": 6,
    "compress_ratios": [0, 2, 2, 1, 1, 1],
    "kv_source_layer_ids": [1, 3],
    "index_source_layer_ids": [1, 3, 4],
    "candidate_source_layer_id": 3,
    "candidate_topk_blocks": 6,
}
V4 = {"num_hidden_layers": 3, "compress_ratios": [0, 4, 128]}
SMALL = {"num_attention_heads": 2, "index_n_heads": 8, "index_topk": 16, "sliding_window": 32}


def plan_of(name: str) -> LayerPlan:
    from flash_csa import configs

    base, stack = (configs.V41_FLASH, V41) if name == "v41" else (configs.V4_FLASH, V4)
    return LayerPlan.from_config({**base, **SMALL, **stack})


@dataclass
class Model:
    """Seeded inputs of every layer for TOKENS tokens, and the weights of its compressors."""

    plan: LayerPlan
    queries: list[Query]
    tokens: list[Tokens]  # per group
    compressors: list[Compressor]
    cos_sin: dict[bool, torch.Tensor]  # compressed or not

    @classmethod
    def seeded(cls, plan: LayerPlan, seed: int = 0) -> "Model":
        generator = torch.Generator().manual_seed(seed)

        def bf16(*size: int) -> torch.Tensor:
            return torch.randn(size, generator=generator).bfloat16()

        def f32(*size: int) -> torch.Tensor:
            return torch.randn(size, generator=generator)

        heads, index_heads = plan.heads, plan.index_heads
        queries = [
            Query(
                q=bf16(TOKENS, heads, MAIN),
                window_kv=bf16(TOKENS, MAIN),
                sink=f32(heads),
                index_q=bf16(TOKENS, index_heads, KEYS) if layer.scores else None,
                index_weights=f32(TOKENS, index_heads) if layer.scores else None,
            )
            for layer in plan.layers
        ]
        tokens, compressors = [], []
        for group in plan.groups:
            width, ratio = group.main_width, group.ratio
            norm = 1 + f32(MAIN) / 8
            if ratio == 1:
                tokens.append(Tokens(bf16(TOKENS, width)))
            elif group.index_width:
                index = [f32(TOKENS, group.index_width) for _ in range(2)]
                tokens.append(Tokens(f32(TOKENS, width), f32(TOKENS, width), *index))
            else:
                tokens.append(Tokens(f32(TOKENS, width), f32(TOKENS, width)))
            if plan.family == "v41":
                key = (bf16(KEYS, MAIN) / 16, 1 + f32(KEYS) / 8)
                compressors.append(Compressor(norm, *key))
            else:
                bias = f32(ratio, width)
                index = (1 + f32(KEYS) / 8, f32(ratio, 256)) if group.indexed else (None, None)
                compressors.append(Compressor(norm, None, None, bias, *index))
        tables = {
            compressed: cos_sin_table(1024, theta, compressed)
            for compressed, theta in ((False, plan.theta), (True, plan.compressed_theta))
        }
        return cls(plan, queries, tokens, compressors, tables)


class Run:
    """One request of a model on a cache of its own, poisoned, with pages out of order."""

    def __init__(
        self, model: Model, seed: int, *, request: int = 0, max_rows: int = TOKENS
    ) -> None:
        self.model, self.request = model, request
        plan = model.plan
        spec = CacheSpec.for_plan(plan, page_size=8)
        self.cache = spec.allocate(plan, max_tokens=TOKENS, max_requests=2, max_rows=max_rows)
        poison(self.cache)
        layout, order = self.cache.layout, torch.Generator().manual_seed(seed)
        self.pages = BlockPool(
            layout,
            span_order=torch.randperm(layout.num_spans, generator=order).tolist(),
            window_order=torch.randperm(layout.window_pages, generator=order).tolist(),
        )
        self.groups = [
            Group(self.cache, g.index, cos_sin=model.cos_sin[True], compressor=weights)
            for g, weights in zip(plan.groups, model.compressors, strict=True)
        ]

    def step(self, start: int, rows: int, padding: int = 0) -> Step:
        self.pages.reserve(self.request, start, rows)
        starts, counts = [0, 0], [0, 0]
        starts[self.request], counts[self.request] = start, rows
        batch = Batch.build(starts, counts, num_rows=rows + padding)
        return Step(self.cache, batch, self.pages.block_tables, self.pages.window_table).begin()

    def layer(self, layer: int, step: Step, first: int, rows: int, padding: int = 0, **out):
        """The output of one layer for rows of the model's inputs, which stay as they are."""
        planned = self.model.plan.layers[layer]
        query = cut(self.model.queries[layer], first, rows, padding)
        if planned.mode == "window":
            table = self.model.cos_sin[False]
            return window_layer(self.cache, layer, step, query, table, **out)
        group = self.groups[planned.group]
        if planned.mode == "full":
            tokens = cut(self.model.tokens[planned.group], first, rows, padding)
            return group.full(layer, step, query, tokens, **out)
        return getattr(group, planned.mode)(layer, step, query, **out)

    def all_layers(self, start: int, rows: int) -> list["Result"]:
        step, results = self.step(start, rows), []
        for planned in self.model.plan.layers:
            out = self.layer(planned.index, step, start, rows)
            selected = (
                step.selection.positions.clone() if planned.index_source is not None else None
            )
            results.append(Result(out, selected))
        return results

    def chunks(self, *sizes: int) -> list["Result"]:
        """All layers over consecutive chunks, put together."""
        parts, start = [], 0
        for rows in sizes:
            parts.append(self.all_layers(start, rows))
            start += rows
        return [Result.cat(layer) for layer in zip(*parts, strict=True)]

    def records(self, group: int, tokens: int = TOKENS) -> list[torch.Tensor]:
        """Decoded main records and index keys of a group by position."""
        ratio = self.model.plan.groups[group].ratio
        pages = self.cache.groups[group]
        position = torch.arange(tokens // ratio)
        size = pages.main.page_size
        table = self.pages.block_tables[ratio][self.request]
        slots = (table[position // size] * size + position % size).int()
        return [load(p, slots) for p in (pages.main, pages.index) if p]


@dataclass
class Result:
    out: torch.Tensor
    selected: torch.Tensor | None

    @classmethod
    def cat(cls, parts: tuple["Result", ...]) -> "Result":
        selected = [part.selected for part in parts]
        joined = None if selected[0] is None else torch.cat(selected)
        return cls(torch.cat([part.out for part in parts]), joined)


def cut(inputs, first: int, rows: int, padding: int = 0):
    """The rows of a dataclass of per-token tensors, copied; padded rows hold NaN."""

    def rows_of(name: str, value):
        if value is None or name == "sink":
            return value
        part = value[first : first + rows]
        return torch.cat([part, part.new_full((padding, *part.shape[1:]), float("nan"))])

    return replace(inputs, **{name: rows_of(name, value) for name, value in vars(inputs).items()})


def poison(cache: Cache) -> None:
    for pages in cache.groups:
        for part in (pages.main, pages.index):
            if part:
                part.data.fill_(0xFF)
    for pages in cache.window:
        pages.data.fill_(0xFF)
    for tails in cache.tails:
        for tail in (tails.main, tails.index):
            if tail:
                tail.rows.fill_(float("nan"))


class Ops(TorchDispatchMode):
    """Names of the library's ops that ran."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "flash_csa":
            self.names.append(func.__name__.split(".")[0])
        return func(*args, **(kwargs or {}))


@pytest.fixture(scope="module")
def v41() -> Model:
    return Model.seeded(plan_of("v41"))


@pytest.fixture(scope="module")
def whole(v41) -> tuple[Run, list[Result]]:
    run = Run(v41, 1)
    return run, run.chunks(TOKENS)


def test_the_reference_agrees(v41):
    """From the records as they lie in the cache: the same selections, and attention on them."""
    run, tokens = Run(v41, 1), 70
    results = run.chunks(tokens)
    table = v41.cos_sin[True]
    made = {}
    for planned, result in zip(v41.plan.layers, results, strict=True):
        query = cut(v41.queries[planned.index], 0, tokens)
        layer = reference.Layer(
            query.q, query.window_kv, query.sink, query.index_q, query.index_weights
        )
        if planned.mode == "window":
            model = reference.Model(v41.cos_sin[False], window=v41.plan.window)
            expected = reference.window_layer(layer, model)
        else:
            model = reference.Model(table, window=v41.plan.window)
            main, keys = run.records(planned.group, tokens)
            group = reference.Group(
                model, Entries(None, main.float(), keys.float()), planned.ratio, v41.plan.topk
            )
            group.main, group.keys = main.float(), keys.float()
            if planned.mode == "full":
                expected = group.full(layer, v41.plan.pool_blocks if planned.builds_pool else 0)
            elif planned.mode == "reindex":
                expected = group.reindex(layer, made[planned.kv_source].pool)
            else:
                expected = group.reuse(layer, made[planned.index_source].selection)
            made[planned.index] = expected
            assert torch.equal(result.selected.long(), expected.selection.positions.long())
        cosine = torch.cosine_similarity(result.out.float(), expected.out.float(), dim=-1)
        assert cosine.min() > 1 - 1e-4
        torch.testing.assert_close(result.out.float(), expected.out.float(), atol=0.02, rtol=0.02)


@pytest.mark.parametrize("sizes", [[1] * TOKENS, [1, 2, 3, 7, 8, 64, 65], [149, 1]])
def test_chunks_and_decode_equal_one_call(v41, whole, sizes):
    run = Run(v41, 2, request=1, max_rows=max(sizes))
    results = run.chunks(*sizes)
    for group in v41.plan.groups:
        for ours, theirs in zip(
            run.records(group.index), whole[0].records(group.index), strict=True
        ):
            assert torch.equal(ours, theirs)
    for ours, theirs in zip(results, whole[1], strict=True):
        if ours.selected is not None:
            assert torch.equal(ours.selected, theirs.selected)
        torch.testing.assert_close(ours.out, theirs.out, atol=2**-7, rtol=2**-7)


def test_v4_chunks_equal_one_call():
    model = Model.seeded(plan_of("v4"))
    run, other = Run(model, 3), Run(model, 4, max_rows=61)
    results, parts = run.chunks(TOKENS), other.chunks(3, 61, 61, 4, 1, 20)
    for group in model.plan.groups:
        for ours, theirs in zip(run.records(group.index), other.records(group.index), strict=True):
            assert torch.equal(ours, theirs)
    assert torch.equal(results[1].selected, parts[1].selected)
    for ours, theirs in zip(results, parts, strict=True):
        torch.testing.assert_close(ours.out, theirs.out, atol=2**-7, rtol=2**-7)


def test_who_runs_and_writes_what(v41):
    """Reindex writes no record, Reuse scores nothing and reads the selection where it lies."""
    run = Run(v41, 5)
    step = run.step(0, TOKENS)
    attended = ["rope_store", "attend"]
    expected = {
        "window": attended,
        "full": ["compress", "quantize_query", "index_select", *attended],
        "reindex": ["quantize_query", "index_select", *attended],
        "reuse": attended,
    }
    storage = step.selection.slots.data_ptr()
    for planned in v41.plan.layers:
        records = [pages.main.data.clone() for pages in run.cache.groups]
        keys = [pages.index.data.clone() for pages in run.cache.groups]
        selected = step.selection.slots.clone()
        with Ops() as ops:
            run.layer(planned.index, step, 0, TOKENS)
        assert ops.names == expected[planned.mode]
        for group, pages in enumerate(run.cache.groups):
            same = torch.equal(pages.main.data, records[group])
            same &= torch.equal(pages.index.data, keys[group])
            assert same == (planned.mode != "full" or group != planned.group)
        kept = torch.equal(step.selection.slots, selected)
        assert kept == (planned.mode in ("window", "reuse"))
        assert step.selection.slots.data_ptr() == storage
        if planned.index_source is not None:
            assert step.selected_by == planned.index_source
    assert step.pooled_by == 3


def test_a_pool_that_holds_everything_changes_nothing(v41):
    """Then Reindex selects what a Full layer with its query would."""
    plan = replace(v41.plan, pool_blocks=-(-TOKENS // 8))
    run = Run(replace(v41, plan=plan), 6)
    step = run.step(0, TOKENS)
    for layer in (3, 4):
        run.layer(layer, step, 0, TOKENS)
    inside = step.selection.positions.clone()
    everywhere = replace(
        plan,
        pool_blocks=0,
        layers=tuple(replace(layer, builds_pool=False, reads_pool=False) for layer in plan.layers),
    )
    flat = Run(replace(v41, plan=everywhere), 6)
    step = flat.step(0, TOKENS)
    for layer in (3, 4):
        flat.layer(layer, step, 0, TOKENS)
    assert torch.equal(inside, step.selection.positions)


def test_tokens_without_queries(v41, whole):
    """A prompt whose last 20 tokens alone attend: the rest is compressed and fills windows."""
    run, last = Run(v41, 7), 20
    first = TOKENS - last
    step = run.step(0, first)
    for planned in v41.plan.layers:
        kv = v41.queries[planned.index].window_kv[:first]
        store_window(run.cache, planned.index, step, kv, v41.cos_sin[planned.ratio > 0])
    for group in run.groups:
        group.compress(step, cut(v41.tokens[group.group.index], 0, first))
    step = run.step(first, last)
    for planned in v41.plan.layers:
        out = run.layer(planned.index, step, first, last)
        expected = whole[1][planned.index]
        torch.testing.assert_close(out, expected.out[first:], atol=2**-7, rtol=2**-7)
        if expected.selected is not None:
            assert torch.equal(step.selection.positions, expected.selected[first:])


def test_stored_entries_are_not_needed_again(v41, whole):
    run = Run(v41, 8)
    run.chunks(TOKENS)
    before = run.records(0)
    step = run.step(TOKENS - 10, 10)
    query = cut(v41.queries[1], TOKENS - 10, 10)
    out = run.groups[0].full(1, step, query)
    assert all(torch.equal(a, b) for a, b in zip(before, run.records(0), strict=True))
    torch.testing.assert_close(out, whole[1][1].out[-10:], atol=2**-7, rtol=2**-7)


def test_one_step_serves_many_steps(v41, whole):
    """Decode with buffers allocated once: addresses stay, results are those of new steps."""
    run, first = Run(v41, 9), TOKENS - 6
    run.all_layers(0, first)
    step = run.step(first, 1)
    lse = torch.empty(1, v41.plan.heads)
    out = torch.empty(1, v41.plan.heads, MAIN, dtype=torch.bfloat16)
    addresses = [t.data_ptr() for t in (step.batch.positions, step.slots.n_vis, step.workspace)]
    for position in range(first, TOKENS):
        run.pages.reserve(0, position, 1)
        step.begin(Batch.build([position, 0], [1, 0]))
        for planned in v41.plan.layers:
            assert run.layer(planned.index, step, position, 1, out=out, lse=lse) is out
            expected = whole[1][planned.index].out[position]
            torch.testing.assert_close(out[0], expected, atol=2**-7, rtol=2**-7)
            assert lse.isfinite().all()
    assert addresses == [
        t.data_ptr() for t in (step.batch.positions, step.slots.n_vis, step.workspace)
    ]


def test_padded_rows(v41, whole):
    run = Run(v41, 10)
    step = run.step(0, 40, padding=3)
    for planned in v41.plan.layers:
        out = run.layer(planned.index, step, 0, 40, padding=3)
        assert torch.equal(out[40:], torch.zeros_like(out[40:]))
        torch.testing.assert_close(
            out[:40], whole[1][planned.index].out[:40], atol=2**-7, rtol=2**-7
        )
        if planned.index_source is not None:
            assert (step.selection.positions[40:] == -1).all()


def test_layers_out_of_place(v41):
    run = Run(v41, 11)
    step = run.step(0, 4)
    query = cut(v41.queries[2], 0, 4)
    for call, message in (
        (lambda: run.groups[0].full(2, step, query), r"full: layer must be one of \[1\], got 2"),
        (lambda: run.groups[0].reuse(5, step, query), r"reuse: layer must be one of \[2\], got 5"),
        (lambda: run.groups[1].reindex(5, step, query), r"reindex: layer must be one of \[4\]"),
        (
            lambda: run.groups[0].reuse(2, step, query),
            "reuse: layer 2 needs the selection of layer 1, the step holds that of layer None",
        ),
        (
            lambda: run.groups[1].reindex(4, step, query),
            "reindex: layer 4 needs the pool of layer 3, the step holds that of layer None",
        ),
        (
            lambda: window_layer(run.cache, 1, step, query, v41.cos_sin[False]),
            r"window_layer: layer must be of mode window, got 1 \(full\)",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            call()
    run.layer(1, step, 0, 4)
    run.layer(3, step, 0, 4)
    with pytest.raises(ValueError, match="needs the selection of layer 1, the step holds that of"):
        run.groups[0].reuse(2, step, query)
    step.begin()
    with pytest.raises(ValueError, match=r"needs the pool of layer 3, .* layer None"):
        run.groups[1].reindex(4, step, query)
