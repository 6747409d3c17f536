"""Schemas, fakes and tracing: what PyTorch is told about the ops is what they do."""

import inspect
import re
import subprocess
import sys

import pytest
import torch
import torch._dynamo.testing

import flash_csa
from flash_csa import _C, Pages
from op_calls import CALLS, HEADS, INDEX_HEADS, PAGE_SIZE, POOL_BLOCKS, WINDOW, Call, K, Scene

pytestmark = pytest.mark.case("Registration")
CPU_CALLS = [name for name in CALLS if name != "probe"]
every_call = pytest.mark.parametrize("name", CPU_CALLS)
OPS = list(_C.SIGNATURES)


def overload(op: str):
    return getattr(torch.ops.flash_csa, op).default


@pytest.mark.parametrize("op", OPS)
def test_schema_rules(op):
    schema = overload(op)._schema
    assert len(schema.returns) == 0
    letters = [a.alias_info.before_set for a in schema.arguments if a.alias_info is not None]
    assert all(len(letter) == 1 for letter in letters)
    assert len({min(letter) for letter in letters}) == len(letters)
    assert all(a.alias_info.is_write for a in schema.arguments if a.alias_info is not None)
    defaulted = False
    for a in schema.arguments:
        assert a.kwarg_only or not defaulted, f"{a.name} follows a default"
        defaulted = defaulted or a.has_default_value()


@pytest.mark.parametrize("op", OPS)
def test_signature_rows_are_the_schemas_tensors(op):
    """Each tensor argument has exactly one row, which says written where the schema does."""
    tensors = {
        a.name: a.alias_info is not None
        for a in overload(op)._schema.arguments
        if "Tensor" in str(a.type)
    }
    rows = [row[0].replace(".", "_") for row in _C.SIGNATURES[op]]
    assert sorted(rows) == sorted(tensors)
    assert tensors == {row[0].replace(".", "_"): row[4] for row in _C.SIGNATURES[op]}


@pytest.mark.parametrize("op", [op for op in OPS if op != "probe"])
def test_defaults_of_functions_are_the_schemas(op):
    """Of numbers and flags; a function that leaves one out gives what the op does without it."""
    schema = {a.name: a for a in overload(op)._schema.arguments if "Tensor" not in str(a.type)}
    for name, parameter in inspect.signature(getattr(flash_csa, op)).parameters.items():
        if name in schema and schema[name].has_default_value():
            default = schema[name].default_value
            assert (parameter.default or None) == (default or None), name


def test_every_op_is_registered_for_cpu_and_cuda():
    dispatch = torch._C._dispatch_has_kernel_for_dispatch_key
    for op in OPS:
        assert dispatch(f"flash_csa::{op}", "Meta")
        assert dispatch(f"flash_csa::{op}", "CPU") == (op != "probe")
        assert dispatch(f"flash_csa::{op}", "CUDA") or (op == "probe" and not _C.HAS_CUDA)


def opcheck(call: Call, *tests: str) -> None:
    torch.library.opcheck(overload(call.op), (), call.args, test_utils=tests)


@every_call
def test_opcheck(name, device):
    opcheck(
        CALLS[name](Scene(device)),
        *("test_schema", "test_autograd_registration", "test_faketensor"),
        "test_aot_dispatch_dynamic",
    )


@every_call
def test_opcheck_of_strided_and_empty_inputs(name, device):
    opcheck(CALLS[name](Scene(device)).strided(), "test_schema", "test_faketensor")
    empty = Scene(device, start=(), rows=(), padding=0, pages=0)
    opcheck(CALLS[name](empty), "test_schema", "test_faketensor")


@every_call
def test_strided_inputs_give_the_same_bits(name, device):
    packed, strided = CALLS[name](Scene(device)), CALLS[name](Scene(device)).strided()
    packed()
    strided()
    for argument, t in packed.mutated().items():
        if argument != "workspace":
            other = strided.mutated()[argument].contiguous()
            assert torch.equal(t.view(torch.uint8), other.view(torch.uint8)), argument


@pytest.mark.parametrize("name", list(CALLS))
def test_meta(name):
    """Meta tensors go through the fakes: nothing is computed and nothing allocated."""
    assert CALLS[name](Scene()).to("meta")() is None


def neighbours(call: Call) -> list[tuple[str, Call]]:
    """The call with each size of each tensor one larger and one smaller, and with other dtypes."""
    changed = []
    for name, value in call.args.items():
        t = value[0] if isinstance(value, list) and name == "block_tables" else value
        if not isinstance(t, torch.Tensor):
            continue
        sizes = [
            [n + step * (d == dim) for d, n in enumerate(t.shape)]
            for dim in range(t.dim())
            for step in (1, -1)
        ]
        others = [t.new_zeros(size) for size in sizes]
        others += [t.to(dtype) for dtype in (torch.int64, torch.int32, torch.float32)]
        for other in others:
            argument = [other, *value[1:]] if isinstance(value, list) else other
            changed.append((f"{name} {list(other.shape)}", call.but(**{name: argument})))
    return changed


OF_SHAPE = re.compile(r" must be (\w+ or )?(bfloat16|float32|int32|uint8) \[[^]]*\], got ")


def outcome(call: Call) -> str:
    """ "" where the call is accepted, else the message."""
    try:
        call()
    except ValueError as error:
        return str(error)
    return ""


@every_call
def test_fakes_agree_with_the_real_checks(name):
    """Where the real checks refuse a dtype or a shape the fake does, with the same message where
    both look at the same argument; what the real checks accept, the fake accepts.
    """
    for what, call in neighbours(CALLS[name](Scene())):
        real, fake = outcome(call), outcome(call.to("meta"))
        if OF_SHAPE.search(real):
            assert fake, f"{what}: the fake accepts what the op refuses: {real}"
        if not real:
            assert not fake, f"{what}: the fake refuses what the op accepts: {fake}"
        if OF_SHAPE.search(real) and real.split(" must ")[0] == fake.split(" must ")[0]:
            assert real == fake


@pytest.mark.case("Error attribution")
@pytest.mark.parametrize(
    "name, change, line",
    [
        ("compress-ratio2", lambda a: {"kv": a["kv"][:5]}, "kv must be .* \\[6, 512], got float32"),
        ("attend-window", lambda a: {"q": a["q"][:5]}, "q must be .* \\[6, 2, 512], got bfloat16"),
        (
            "compress-ratio2",
            lambda a: {"kv": torch.zeros_like(a["kv"], device="cpu")},
            "kv must be on meta, got cpu",
        ),
        (
            "attend-window",
            lambda a: {"q": torch.zeros_like(a["q"], device="cpu")},
            "q must be on meta, got cpu",
        ),
        ("store-MainFp4", lambda a: {"rows": None}, "rows must be bfloat16 .*, got None"),
    ],
)
def test_fakes_name_the_argument_that_most_others_contradict(name, change, line):
    call = CALLS[name](Scene()).to("meta")
    with pytest.raises(ValueError, match=f"flash_csa.{call.op}: {line}"):
        call.but(**change(call.args))()


@pytest.mark.parametrize("record", [-1, len(_C.RECORDS), 99])
def test_fakes_leave_unknown_records_to_the_op(record):
    for name, argument in (("store-MainFp4", "pages_record"), ("quantize_query-fp4", "record")):
        call = CALLS[name](Scene()).but(**{argument: record})
        assert call.to("meta")() is None
        assert "record must be one of" in outcome(call)


def test_fakes_do_not_ask_for_values():
    """Shapes stay symbolic: one graph serves every number of rows."""
    counter = torch._dynamo.testing.CompileCounter()
    pages = Pages.empty(2, "MainFp4", 8)
    load = torch.compile(flash_csa.load, fullgraph=True, backend=counter, dynamic=True)
    for rows in (5, 9, 17):
        load(pages, torch.zeros(rows, dtype=torch.int32))
    assert counter.frame_count == 1


class Layer(torch.nn.Module):
    """A Full layer at ratio 1 on pages that it owns: every stage of the path."""

    def __init__(self, scene: Scene):
        super().__init__()
        self.ratio = 1
        self.main = Pages.empty(scene.num_pages, "MainFp4", PAGE_SIZE, scene.device)
        self.index = Pages.empty(scene.num_pages, "IndexFp4", PAGE_SIZE, scene.device)
        window = scene.requests * scene.ring
        self.window = Pages.empty(window, "WindowFp8", PAGE_SIZE, scene.device)
        self.norm = torch.ones(512, device=scene.device)
        self.key_weight = scene.bf16(128, 512) / 16
        self.key_norm = torch.ones(128, device=scene.device)

    def forward(self, batch, kv, q, index_q, weights, block_table, window_table, cos_sin):
        return step(self, batch, kv, q, index_q, weights, block_table, window_table, cos_sin)


def step(layer, batch, kv, q, index_q, weights, block_table, window_table, cos_sin):
    """One step of a layer, from projections to outputs."""
    sizes = {"window": WINDOW, "ratios": [1]}
    slots = flash_csa.step_slots(
        batch,
        [block_table],
        window_table,
        page_sizes=[PAGE_SIZE],
        window_page_size=PAGE_SIZE,
        **sizes,
    )
    schedule = flash_csa.schedule(
        batch,
        max_entries=[block_table.shape[1] * PAGE_SIZE],
        k=K,
        heads=HEADS,
        index_heads=INDEX_HEADS,
        num_sms=2,
        **sizes,
    )
    flash_csa.compress(
        kv,
        batch,
        slots.entry_slots[0],
        ratio=1,
        norm_weight=layer.norm,
        eps=1e-6,
        cos_sin=cos_sin,
        main=layer.main,
        index=layer.index,
        key_weight=layer.key_weight,
        key_norm_weight=layer.key_norm,
    )
    q = q.clone()
    flash_csa.rope_store(q, kv, layer.window, slots.window_store, batch.positions, cos_sin)
    query = flash_csa.quantize_query(index_q, batch.positions, cos_sin)
    scores = flash_csa.index_scores(
        query, layer.index, weights, batch, block_table, schedule[1], ratio=1
    )
    selection, pool = flash_csa.select(
        scores,
        batch,
        K,
        schedule[1],
        block_table=block_table,
        ratio=1,
        page_size=PAGE_SIZE,
        pool_blocks=POOL_BLOCKS,
    )
    out = flash_csa.attend(
        q,
        main=layer.main,
        selection=selection,
        window_pages=layer.window,
        window=slots.lists,
        derotate=(batch.positions, cos_sin),
        schedule=schedule[3],
    )
    return out, selection.positions, selection.slots, pool.blocks


def inputs(s: Scene) -> tuple:
    return (
        s.batch,
        s.bf16(s.rows, 512),
        s.bf16(s.rows, HEADS, 512),
        s.bf16(s.rows, INDEX_HEADS, 128),
        s.f32(s.rows, INDEX_HEADS),
        s.block_table,
        s.window_table,
        s.cos_sin,
    )


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_pipeline_equals_eager(backend, device):
    """Outputs and the bytes of all pages, with pages as attributes of a module."""
    torch.compiler.reset()
    scene = Scene(device)
    args = inputs(scene)
    eager, traced = Layer(scene), Layer(scene)
    traced.key_weight = eager.key_weight
    wanted = eager(*args)
    got = torch.compile(traced, fullgraph=True, backend=backend)(*args)
    for a, b in zip(wanted, got, strict=True):
        assert torch.equal(a, b)
    for name in ("main", "index", "window"):
        a, b = getattr(eager, name).data, getattr(traced, name).data
        assert a.any() and torch.equal(a, b), f"the caller's {name} pages"


class Seen:
    """Stands in for an op's kernel and notes the addresses that it gets."""

    def __init__(self, op: str):
        self.names = [a.name for a in overload(op)._schema.arguments]
        self.addresses: dict[str, int] = {}

    def __call__(self, *args, **kwargs) -> None:
        given = dict(zip(self.names, args, strict=False)) | kwargs
        tensors = {name: t for name, t in given.items() if isinstance(t, torch.Tensor)}
        self.addresses = {name: t.data_ptr() for name, t in tensors.items()}


@pytest.fixture
def seen(device):
    """`compress` replaced by something that looks at its arguments."""
    library = torch.library.Library("flash_csa", "IMPL")
    kernel = Seen("compress")
    library.impl("compress", kernel, device.type.upper(), allow_override=True)
    yield kernel
    library._destroy()


@pytest.mark.filterwarnings("ignore:Warning only once for all operators")
@pytest.mark.parametrize("place", ["inputs", "attributes"])
def test_compiled_code_passes_the_callers_pages(place, seen, device):
    """No silent copy of a page buffer: two are mutated, in storages of their own."""
    torch.compiler.reset()
    scene = Scene(device)
    batch, kv, *_, cos_sin = inputs(scene)
    layer = Layer(scene)
    slots = scene.slots(scene.rows)

    def compress(main, index):
        flash_csa.compress(
            kv,
            batch,
            slots,
            ratio=1,
            norm_weight=layer.norm,
            eps=1e-6,
            cos_sin=cos_sin,
            main=main,
            index=index,
            key_weight=layer.key_weight,
            key_norm_weight=layer.key_norm,
        )

    if place == "inputs":
        torch.compile(compress, fullgraph=True)(layer.main, layer.index)
    else:
        torch.compile(lambda: compress(layer.main, layer.index), fullgraph=True)()
    assert seen.addresses["main_pages"] == layer.main.data.data_ptr()
    assert seen.addresses["index_pages"] == layer.index.data.data_ptr()


def test_importing_twice_registers_once():
    code = """
import sys, torch, flash_csa
for name in [m for m in sys.modules if m.split(".")[0] == "flash_csa"]:
    del sys.modules[name]
first = flash_csa
import flash_csa
assert flash_csa is not first
pages = flash_csa.Pages.empty(1, "MainFp4", 8)
torch.compile(flash_csa.load, backend="eager")(pages, torch.zeros(2, dtype=torch.int32))
"""
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True)
