"""Captured steps replay at any length; every op can be captured, on any stream, on any device.

On the CPU a "graph" is the closure itself, so that the test of whole steps also shows that a step
reuses its buffers rightly.
"""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import flash_csa as fc
from border_case import V41
from flash_csa import configs
from op_calls import CALLS, Call, Scene

TOKENS = 700  # stored before any decode step
SMALL = {"num_attention_heads": 2, "index_n_heads": 8, "index_topk": 16}
PLAN = fc.LayerPlan.from_config({**configs.V41_FLASH, **SMALL, **V41})
COS_SIN = fc.cos_sin_table(1024, 160000.0, True)


class Model:
    """Random weights, a cache of two requests, and all layers as one call on static inputs."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.generator = torch.Generator().manual_seed(1)
        layout = fc.CacheSpec.for_plan(PLAN).layout(
            PLAN, max_tokens=1024, max_requests=2, max_rows=TOKENS
        )
        self.cache = layout.allocate(device)
        groups, tails = self.cache.groups, self.cache.tails
        pages = [p for g in groups for p in (g.main, g.index)]
        for storage in [p.data for p in (*pages, *self.cache.window)]:
            storage.zero_()  # so that caches can be compared whole
        for tail in [t.main for t in tails if t.main]:
            tail.rows.zero_()
        self.pool = fc.BlockPool(layout, device=device)
        self.cos_sin = COS_SIN.to(device)
        self.groups = [
            fc.Group(self.cache, index, cos_sin=self.cos_sin, compressor=self._compressor())
            for index in range(len(PLAN.groups))
        ]

    def random(self, *size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.randn(size, generator=self.generator).to(dtype).to(self.device)

    def _compressor(self) -> fc.Compressor:
        return fc.Compressor(
            norm=1 + self.random(512) / 8,
            key=self.random(128, 512, dtype=torch.bfloat16) / 16,
            key_norm=1 + self.random(128) / 8,
        )

    def step(self, start: list[int], rows: int) -> "Run":
        batch = fc.Batch.build(start, [rows] * len(start), device=self.device)
        return Run(self, batch)


class Run:
    """A step of one shape: `load` fills the inputs, `layers` is what a graph captures."""

    def __init__(self, model: Model, batch: fc.Batch) -> None:
        self.model, device = model, model.device
        self.step = fc.Step(model.cache, batch, model.pool.block_tables, model.pool.window_table)
        rows, heads = batch.num_rows, PLAN.heads
        self.queries = [
            fc.Query(
                q=torch.empty(rows, heads, 512, dtype=torch.bfloat16, device=device),
                window_kv=torch.empty(rows, 512, dtype=torch.bfloat16, device=device),
                sink=torch.zeros(heads, device=device),
                index_q=torch.empty(
                    rows, PLAN.index_heads, 128, dtype=torch.bfloat16, device=device
                ),
                index_weights=torch.empty(rows, PLAN.index_heads, device=device),
            )
            for _ in PLAN.layers
        ]
        wide = torch.empty(rows, 1024, device=device)
        narrow = torch.empty(rows, 512, dtype=torch.bfloat16, device=device)
        self.tokens = [fc.Tokens(wide[:, :512], wide[:, 512:]), fc.Tokens(narrow)]
        self.inputs = [wide, narrow]
        for query in self.queries:
            self.inputs += [query.q, query.window_kv, query.index_q, query.index_weights]
        size = (len(PLAN.layers), rows, heads, 512)
        self.out = torch.empty(size, dtype=torch.bfloat16, device=device)

    def load(self, seed: int, start: list[int]) -> None:
        for request, first in enumerate(start):
            self.model.pool.reserve(request, first, self.step.batch.max_rows)
        generator = torch.Generator().manual_seed(seed)
        for tensor in self.inputs:
            tensor.copy_(torch.randn(tensor.shape, generator=generator))
        rows = self.step.batch.num_rows // len(start)
        self.step.batch.copy_(fc.Batch.build(start, [rows] * len(start), device=self.model.device))

    def layers(self, first: int = 0, end: int = len(PLAN.layers)) -> None:
        if first == 0:
            self.step.begin()
        own = list(zip(PLAN.layers, self.queries, self.out, strict=True))
        for layer, query, out in own[first:end]:
            if layer.mode == "window":
                cache, cos_sin = self.model.cache, self.model.cos_sin
                fc.window_layer(cache, layer.index, self.step, query, cos_sin, out=out)
                continue
            group = self.model.groups[layer.group]
            more = {"tokens": self.tokens[layer.group]} if layer.mode == "full" else {}
            getattr(group, layer.mode)(layer.index, self.step, query, **more, out=out)

    def results(self) -> dict[str, torch.Tensor]:
        """Everything that a step leaves behind."""
        cache, selection = self.model.cache, self.step.selection
        pages = {f"window {i}": p.data for i, p in enumerate(cache.window)}
        for i, group in enumerate(cache.groups):
            pages |= {f"main {i}": group.main.data, f"index {i}": group.index.data}
        lists = {"positions": selection.positions, "slots": selection.slots}
        return {"out": self.out, "pool": self.step.pool.blocks, **lists, **pages}


def _captured(call, device: torch.device):
    """A function that replays `call`; capturing runs nothing."""
    if device.type == "cpu":
        return call
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def _prefilled(device: torch.device) -> tuple[Model, Run]:
    """A model with TOKENS tokens of two requests, and a decode step that has run once."""
    model = Model(device)
    prefill = model.step([0, 0], TOKENS)
    prefill.load(0, [0, 0])
    prefill.layers()
    decode = model.step([TOKENS - 1] * 2, 1)
    decode.load(1, [100, 10])
    decode.layers()
    return model, decode


@pytest.mark.case("Shortcut inside a graph")
@pytest.mark.case("Stable addresses and strides")
def test_a_step_captured_at_one_length_replays_at_others(device):
    """Fewer visible entries than k at capture, more at replay; memory around it moves."""
    (_, eager), (_, decode) = _prefilled(device), _prefilled(device)
    decode.load(2, [9, 3])
    replay = _captured(decode.layers, device)
    previous = None
    lengths = [[9, 3], [0, 1], [15, 16], [17, 31], [127, 128], [511, 512], [699, 630]]
    for number, start in enumerate(lengths):
        noise = [torch.empty(1 + 1000 * i, device=device) for i in range(20)]
        for run, go in ((eager, eager.layers), (decode, replay)):
            run.load(10 + number, start)
            go()
        del noise
        if device.type == "cuda":
            torch.cuda.empty_cache()
        expected, got = eager.results(), decode.results()
        assert expected["out"].isfinite().all()
        assert previous is None or not torch.equal(expected["out"], previous)  # control
        previous = expected["out"].clone()
        for name, tensor in expected.items():
            assert torch.equal(tensor, got[name]), (name, start)


def _results(call: Call) -> dict[str, torch.Tensor]:
    """What a call wrote, as bytes on the CPU; scratch is nobody's."""
    written = call.mutated()
    written.pop("workspace", None)
    return {name: t.cpu().contiguous().view(torch.uint8) for name, t in written.items()}


def _run(call: Call) -> dict[str, torch.Tensor]:
    call()
    return _results(call)


def _assert_same(got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    for name, tensor in expected.items():
        assert torch.equal(got[name], tensor), name


@pytest.mark.case("Self-consistency")
@pytest.mark.parametrize("name", [name for name in CALLS if name != "probe"])
def test_every_op_twenty_times(name, device):
    """Back to back, no synchronisation between: the same bytes."""
    calls = [CALLS[name](Scene(device)) for _ in range(20)]
    for call in calls:
        call()
    first = _results(calls[0])
    for call in calls[1:]:
        _assert_same(_results(call), first)


@pytest.mark.case("Self-consistency")
@pytest.mark.parametrize("name", [name for name in CALLS if name != "probe"])
def test_every_op_by_several_threads(name, device):
    """Ops run without the interpreter's lock: calls of other threads share no scratch with them."""
    mixed = {"start": (3, 60, 0), "rows": (9, 2, 5), "padding": 3}
    first = _run(CALLS[name](Scene(device, **mixed)))
    calls = [[CALLS[name](Scene(device, **mixed)) for _ in range(5)] for _ in range(4)]
    together = threading.Barrier(len(calls))

    def run(own: list[Call]) -> None:
        together.wait()
        for call in own:
            call()

    with ThreadPoolExecutor(len(calls)) as pool:
        list(pool.map(run, calls))
    for own in calls:
        for call in own:
            _assert_same(_results(call), first)


@pytest.mark.parametrize("name", CALLS)
def test_every_op_can_be_captured(name, cuda):
    expected = _run(CALLS[name](Scene(cuda)))
    call = CALLS[name](Scene(cuda))
    replay = _captured(call, cuda)
    replay()
    _assert_same(_results(call), expected)


@pytest.mark.case("Streams")
@pytest.mark.parametrize("name", CALLS)
def test_every_op_runs_on_the_current_stream(name, cuda):
    """Behind a slow producer on its stream, and not behind the default stream."""
    expected = _run(CALLS[name](Scene(cuda)))
    call = CALLS[name](Scene(cuda))
    inputs = [
        (tensor, tensor.clone())
        for tensor in call.args.values()
        if isinstance(tensor, torch.Tensor)
    ]
    for tensor, _ in inputs:
        tensor.zero_()
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    torch.cuda._sleep(1_000_000_000)  # keeps the default stream busy for 0.5 s
    with torch.cuda.stream(stream):
        torch.cuda._sleep(2_000_000)
        for tensor, value in inputs:
            tensor.copy_(value)
        call()
    stream.synchronize()
    waited = torch.cuda.default_stream().query()
    torch.cuda.synchronize()
    _assert_same(_results(call), expected)
    assert not waited, "the call waited for the default stream"


@pytest.mark.case("Streams")
def test_a_consumer_on_another_stream_waits_for_its_source(cuda):
    """Full layers behind slow work, Reindex and Reuse on a second stream behind an event."""
    (_, alone), (_, apart) = _prefilled(cuda), _prefilled(cuda)
    for run in (alone, apart):
        run.load(2, [511, 512])
    alone.layers()
    source, consumer, done = torch.cuda.Stream(), torch.cuda.Stream(), torch.cuda.Event()
    torch.cuda.synchronize()
    with torch.cuda.stream(source):
        torch.cuda._sleep(20_000_000)
        apart.layers(end=3)
        done.record()
    with torch.cuda.stream(consumer):
        done.wait()
        apart.layers(first=3)
    torch.cuda.synchronize()
    got = apart.results()
    for name, tensor in alone.results().items():
        assert torch.equal(tensor, got[name]), name


@pytest.mark.case("Device guard")
@pytest.mark.parametrize("name", CALLS)
def test_every_op_runs_on_another_device(name, cuda):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    expected = _run(CALLS[name](Scene("cuda:0")))
    with torch.cuda.device(0):
        got = _run(CALLS[name](Scene("cuda:0")).to("cuda:1"))
        assert torch.cuda.current_device() == 0
    _assert_same(got, expected)
