"""Every wrong argument of every op gives one ValueError line that names op, argument, what was
expected and what was given, before anything is written."""

import re
from collections import Counter
from typing import NamedTuple

import pytest
import torch

import flash_csa
from flash_csa import _C, RECORDS, Pages
from op_calls import CALLS, PAGE_SIZE, Call, Scene

MESSAGE = re.compile(
    r"flash_csa\.(?P<op>\w+): (?P<argument>[\w., ]+?) must (?P<expected>[^\n]+), "
    r"got (?P<got>[^\n]+)"
)
DTYPES = {"bf16": torch.bfloat16, "f32": torch.float32, "i32": torch.int32, "u8": torch.uint8}
OTHER_DTYPES = (torch.int64, torch.int16, torch.float16, torch.float64, torch.bool)
# Symbols whose value a number of the call states, or that an op compares with a number.
FIXED = {
    *(("store", "D"), ("load", "D"), ("quantize_query", "C"), ("index_scores", "C")),
    *(("index_select", "C"), ("compress", "D"), ("compress", "m"), ("schedule", "sections")),
}
ALIGNED = ("aligned rows", "dense", "pages")
LEAST = {"LD", "ring"}  # symbols that may be larger, and not smaller
CPU_CALLS = [name for name in CALLS if name != "probe"]
every_call = pytest.mark.parametrize("name", CPU_CALLS)


class Argument(NamedTuple):
    """A tensor argument of a call, with its row of the signature table."""

    call: Call
    name: str
    label: str
    dtypes: list[torch.dtype]
    shape: list[str]
    layout: str
    written: bool

    @property
    def tensor(self) -> torch.Tensor:
        value = self.call.args[self.name]
        return value[0] if isinstance(value, list) else value

    @property
    def symbols(self) -> set[str]:
        return {token.removesuffix("+1") for token in self.shape} - {"*"}

    def refused(self, new: torch.Tensor) -> re.Match:
        """The message of the call with another tensor in the place of this one."""
        value = self.call.args[self.name]
        new = [new, *value[1:]] if isinstance(value, list) else new
        return refusal(self.call.but(**{self.name: new}))


def arguments(call: Call) -> list[Argument]:
    """The tensors that a call has."""
    return [
        Argument(call, name, label, [DTYPES[d] for d in dtypes.split("|")], shape.split(), *rest)
        for label, dtypes, shape, *rest in _C.SIGNATURES[call.op]
        if call.args.get(name := label.replace(".", "_")) is not None
    ]


def storage_bytes(t: torch.Tensor) -> bytes:
    whole = torch.empty(0, dtype=torch.uint8, device=t.device).set_(t.untyped_storage())
    return whole.cpu().numpy().tobytes()


def refusal(call: Call) -> re.Match:
    """The parsed message of a call that must raise, and must leave every output as it was."""
    before = {n: (t, storage_bytes(t)) for n, t in call.mutated().items() if not t.is_meta}
    with pytest.raises(ValueError) as caught:
        call()
    match = MESSAGE.fullmatch(str(caught.value))
    assert match, f"not one line of the common form: {caught.value}"
    assert match["op"] == call.op
    for name, (t, bytes_before) in before.items():
        assert storage_bytes(t) == bytes_before, f"{name} was written"
    return match


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@pytest.fixture
def scene(device) -> Scene:
    return Scene(device)


@every_call
def test_wrong_dtype(name, scene):
    for a in arguments(CALLS[name](scene)):
        sizes = list(a.tensor.shape)
        for dtype in {*DTYPES.values(), *OTHER_DTYPES} - set(a.dtypes):
            match = a.refused(a.tensor.to(dtype))
            assert match["argument"] == a.label
            assert match["expected"] == f"be {' or '.join(map(dtype_name, a.dtypes))} {sizes}"
            assert match["got"] == f"{dtype_name(dtype)} {sizes}"


@pytest.mark.case("Dtypes")
@every_call
def test_small_float_views_are_refused_with_advice(name, scene):
    for a in arguments(CALLS[name](scene)):
        if a.dtypes != [torch.uint8]:
            continue
        for dtype in ("float8_e4m3fn", "float8_e8m0fnu", "float4_e2m1fn_x2"):
            match = a.refused(a.tensor.view(getattr(torch, dtype)))
            assert match["argument"] == a.label
            assert match["got"].startswith(f"{dtype} (its bytes: .view(torch.uint8))")


@every_call
def test_wrong_rank(name, scene):
    for a in arguments(CALLS[name](scene)):
        t = a.tensor
        for new in (t[None], t.reshape(-1) if t.dim() > 1 else t.new_zeros(())):
            match = a.refused(new)
            assert match["argument"] == a.label
            assert match["got"].endswith(f" {list(new.shape)}")


@every_call
def test_wrong_size(name, scene):
    call = CALLS[name](scene)
    users = Counter(symbol for a in arguments(call) for symbol in a.symbols)
    for a in arguments(call):
        sharing = {b.label for b in arguments(call) if b is a or a.symbols & b.symbols}
        for dim, token in enumerate(a.shape):
            symbol = token.removesuffix("+1")
            fixed = symbol.isdigit() or users[symbol] > 1 or (call.op, symbol) in FIXED
            for step in (1, -1) if fixed else (1 - a.tensor.shape[dim],) * (symbol in LEAST):
                size = list(a.tensor.shape)
                size[dim] += step
                match = a.refused(a.tensor.new_zeros(size))
                assert match["argument"] in sharing | {"tail.ring"}


@pytest.mark.case("Device guard")
@every_call
def test_wrong_device(name, scene):
    for a in arguments(CALLS[name](scene)):
        for elsewhere in {"meta", "cpu"} - {a.tensor.device.type}:
            a.refused(a.tensor.to(elsewhere))


def with_strides(t: torch.Tensor, layout: str) -> list[torch.Tensor]:
    """The same values at strides that the layout forbids."""
    every_second = t.new_zeros(*t.shape, 2)[..., 0]
    wrong = [every_second] if t.shape[-1] > 1 else []
    padding = 8 // t.element_size() if layout in ALIGNED else 4
    if t.dim() > (2 if "rows" in layout else 1):
        wrong.append(t.new_zeros(*t.shape[:-1], t.shape[-1] + padding)[..., : t.shape[-1]])
    return [new.copy_(t) for new in wrong]


@pytest.mark.case("Padded page stride")
@every_call
def test_wrong_stride(name, scene):
    for a in arguments(CALLS[name](scene)):
        for new in with_strides(a.tensor, a.layout):
            match = a.refused(new)
            assert match["argument"] == a.label
            assert match["got"] == f"strides {list(new.stride())}"


@pytest.mark.case("Page geometry")
@every_call
def test_misaligned_base(name, scene):
    for a in arguments(CALLS[name](scene)):
        if a.layout not in ALIGNED:  # these start at any multiple of their element
            continue
        for offset in {a.tensor.element_size(), 4, 8}:
            data = a.tensor.contiguous().view(torch.uint8).flatten()
            shifted = torch.cat((data[:offset], data))[offset:].view(a.tensor.dtype)
            match = a.refused(shifted.view(a.tensor.shape))
            assert match["argument"] == a.label
            assert match["expected"] == "start at a multiple of 16 bytes"
            assert match["got"] == f"an address {offset} past one"


@every_call
def test_overlapping_output(name, scene):
    for a in arguments(CALLS[name](scene)):
        if not a.written or a.tensor.shape[0] < 2:
            continue
        match = a.refused(a.tensor[:1].clone().expand(a.tensor.shape))
        assert match["argument"] == a.label
        wanted = "be contiguous" if a.layout == "packed" else "not overlap itself (it is written)"
        assert match["expected"] == wanted


@every_call
def test_absent_optional(name, scene):
    """A call without one of its optional tensors runs, or says what is missing."""
    call = CALLS[name](scene)
    optional = {a.name for a in call.schema() if "Optional" in str(a.type)}
    for a in arguments(call):
        if a.name not in optional:
            continue
        try:
            call.but(**{a.name: None})()
        except ValueError as error:
            match = MESSAGE.fullmatch(str(error))
            assert (match and "None" in match["got"]) or match["got"] in PARTLY, error


PARTLY = ("one of them", "a part of it", "none", "neither")


def bad_values(call: Call, name: str) -> list:
    """Values that an argument which is no tensor must not have; [] where all are fine."""
    if name.endswith("_record") or name == "record":
        return [-1, len(RECORDS), 99]
    if name.endswith("page_size"):
        return [-1, 0, 257]
    if name == "k":
        return [-1] if call.op == "schedule" else [-1, 0, 1 << 17]
    return {
        "ratio": [-1, 0, 3, 8],
        "eps": [-1.0, float("nan"), float("inf"), 1e300],
        "q_norm_eps": [-1.0, float("nan"), 1e300],
        "softmax_scale": [float("inf"), float("nan"), 1e300],
        "batch_max_rows": [-1, 1 << 32],
        "max_entries": [[8], [8, -1]] if call.op == "schedule" else [-1, 1 << 32],
        "ratios": [[1, 3], [1], [1] * 9],
        "page_sizes": [[8], [8, 0], [8, 257]],
        "window": [-1] if call.op == "schedule" else [0, -1, WIDE_WINDOW],
        "heads": [-1, 0],
        "index_heads": [-1],
        "pool_blocks": [-1],
        "pool_ratio": [2],
        "contiguous_ratios": [[4]],
        "num_sms": [-1, 0, 1 << 20],
        "strict": [],
        "rotate": [],
        "batch_invariant": [],
    }[name]


WIDE_WINDOW = 64  # positions, more than the scene's window table holds
COUPLED = ("window", "ratios")  # a wrong one may be reported at what has to fit it


@every_call
def test_wrong_values(name, scene):
    """No int, float or list of ints of a schema is forgotten: bad_values knows every name."""
    call = CALLS[name](scene)
    for argument in call.schema():
        if "Tensor" in str(argument.type) or argument.name not in call.args:
            continue
        for value in bad_values(call, argument.name):
            match = refusal(call.but(**{argument.name: value}))
            stem = argument.name.removesuffix("_record").removesuffix("_page_size")
            assert stem.split("_")[0] in match["argument"] or argument.name in COUPLED, match[0]


@pytest.mark.case("Unsupported shapes")
@pytest.mark.case("Ratio 1 mode")
@pytest.mark.case("Width from arguments")
@pytest.mark.case("One capacity function")
@pytest.mark.parametrize(
    "name, change, line",
    [
        (
            "attend-selection",
            lambda a: {"selection_slots": a["selection_slots"].long()},
            "selection.slots must be int32 [6, 16], got int64 [6, 16]",
        ),
        (
            "attend-selection",
            lambda a: {"main_record": RECORDS["IndexFp4"].id},
            "main.record must be one of MainFp4, WindowFp8, MixedFp8, got IndexFp4",
        ),
        (
            "rope_store-v41",
            lambda a: {"window_record": RECORDS["MainFp4"].id},
            "window.record must be one of WindowFp8, MixedFp8, got MainFp4",
        ),
        (
            "index_scores-flat",
            lambda a: {"index_record": RECORDS["MainFp4"].id},
            "index.record must be one of IndexFp4, IndexFp8, got MainFp4",
        ),
        (
            "store-MainFp4",
            lambda a: {"pages_record": 7},
            "pages.record must be one of MainFp4, WindowFp8, IndexFp4, MixedFp8, IndexFp8, "
            "got record id 7",
        ),
        (
            "store-MainFp4",
            lambda a: {"pages_page_size": 257},
            "pages.page_size must be in [1, 256], got 257",
        ),
        (
            "store-MainFp4",
            lambda a: {"pages": a["pages"][:, :-16]},
            f"pages must have pages of at least {PAGE_SIZE * 288} bytes (8 MainFp4 records), "
            f"got {PAGE_SIZE * 288 - 16}",
        ),
        (
            "attend-selection",
            lambda a: {"main_pages": a["main_pages"][:, :-16]},
            f"main.pages must have pages of at least {PAGE_SIZE * 288} bytes (8 MainFp4 records), "
            f"got {PAGE_SIZE * 288 - 16}",
        ),
        (
            "load-IndexFp8",
            lambda a: {"out": a["out"].bfloat16()},
            "out must be float32 for IndexFp8 records, got bfloat16",
        ),
        ("compress-ratio2", lambda a: {"ratio": 3}, "ratio must be one of 1, 2, 4, 128, got 3"),
        (
            "compress-ratio1",
            lambda a: {"gate": a["kv"].float()},
            "gate must be None at ratio 1 (every token is an entry), got a tensor",
        ),
        (
            "compress-ratio1",
            lambda a: {"bias": a["kv"].float()[:1]},
            "bias must be None at ratio 1, got a tensor",
        ),
        (
            "compress-ratio2",
            lambda a: {"gate": None},
            "gate must be float32 at ratio 2, got None",
        ),
        (
            "compress-ratio2",
            lambda a: {"kv": a["kv"].bfloat16()},
            "kv must be float32 at ratio 2, got bfloat16",
        ),
        (
            "compress-ratio1",
            lambda a: {"kv": a["kv"].float()},
            "kv must be bfloat16 at ratio 1, got float32",
        ),
        (
            "compress-ratio4",
            lambda a: {"kv": a["kv"][:, :512], "gate": a["gate"][:, :512], "bias": None},
            "kv must have 1024 columns at ratio 4 and width 512, got 512",
        ),
        (
            "compress-ratio2",
            lambda a: {"key_norm_weight": None},
            "key_weight and key_norm_weight must come together, got one of them",
        ),
        (
            "compress-ratio2",
            lambda a: {"key_weight": None, "key_norm_weight": None},
            "index and key_weight must come together at width 512, got one of them",
        ),
        (
            "compress-ratio4",
            lambda a: {"tail_rows": a["tail_rows"][:, :, :7].contiguous()},
            "tail.ring must be in [8, 2147483647], got 7",
        ),
        (
            "index_scores-pool",
            lambda a: {"pool_counts": None},
            "pool.blocks and pool.counts must come together, got one of them",
        ),
        (
            "index_scores-flat",
            lambda a: {"out": a["out"][:, :-1]},
            "out must have at least 16 columns (block_table columns * page size), got 15",
        ),
        (
            "index_scores-pool",
            lambda a: {"out": a["out"][:, :-1]},
            "out must have at least 16 columns (8 * pool blocks), got 15",
        ),
        (
            "index_scores-flat",
            lambda a: {"query_scales": a["query_scales"].float()},
            "query.codes must have 128 bytes a head with float32 scales, got 64",
        ),
        *(
            (
                f"{op}-{kind}",
                lambda a: {"pool_blocks": a["pool_blocks"][:, :0]},
                "pool.blocks columns must be in [1, 1048576], got 0",
            )
            for op, kind in (
                ("index_scores", "pool"),
                ("index_select", "restrict"),
                ("select", "restrict"),
            )
        ),
        ("select-build", lambda a: {"k": 0}, "k must be in [1, 65536], got 0"),
        (
            "select-build",
            lambda a: {"k": 17},
            "out.positions must be int32 [6, 17], got int32 [6, 16]",
        ),
        (
            "select-build",
            lambda a: {"pool_out_counts": None},
            "pool_out.blocks and pool_out.counts must come together, got one of them",
        ),
        (
            "select-build",
            lambda a: {"pool_blocks": a["pool_out_blocks"], "pool_counts": a["pool_out_counts"]},
            "pool and pool_blocks must not be given together (restrict or build), got both",
        ),
        (
            "normalize_pool",
            lambda a: {"pool_out_blocks": a["pool_out_blocks"][:, :1]},
            "blocks must have at most 1 columns (the width of out), got 2",
        ),
        (
            "attend-selection",
            lambda a: {"selection_lengths": None},
            "selection.slots and selection.lengths must come together, got one of them",
        ),
        (
            "attend-window",
            lambda a: {"window_slots": None, "window_lengths": None, "window_pages": None},
            "selection, contiguous or window must be given, got none of them",
        ),
        (
            "attend-selection",
            lambda a: {"main_pages": None},
            "main must be given with selection or contiguous, got None",
        ),
        (
            "attend-contiguous",
            lambda a: {"contiguous_n_vis": None},
            "contiguous must be (block_table, row_request, n_vis), got a part of it",
        ),
        (
            "attend-selection",
            lambda a: {"derotate_positions": None},
            "derotate.positions and derotate.cos_sin must come together, got one of them",
        ),
        (
            "attend-selection",
            lambda a: {"sink": a["sink"][:1]},
            "sink must be float32 [2], got float32 [1]",
        ),
        (
            "attend-selection",
            lambda a: {"workspace": a["workspace"][:100]},
            f"workspace must hold at least {flash_csa.SYNC_BYTES} bytes, got 100",
        ),
        (
            "step_slots",
            lambda a: {"window_table": a["window_table"][:, :2]},
            "window_table must hold window - 1 + max_rows = 18 positions, got 16",
        ),
        (
            "step_slots",
            lambda a: {"block_tables": a["block_tables"][:1]},
            "block_tables must have one value for each of 2 ratios, got 1",
        ),
        (
            "schedule",
            lambda a: {"out": a["out"][:, :-4]},
            "out must have at least 32 columns for 6 rows, got 28",
        ),
        ("schedule", lambda a: {"pool_ratio": 2}, "pool_ratio must be among ratios, got 2"),
    ],
)
def test_exact_line(name, change, line, scene):
    call = CALLS[name](scene)
    assert refusal(call.but(**change(call.args)))[0] == f"flash_csa.{call.op}: {line}"


@pytest.mark.case("Other head dims")
@pytest.mark.parametrize("dim", [32, 64, 256])
def test_other_index_head_dims_are_refused(dim, scene):
    """Index vectors have 128 dims, in every op that takes one."""
    for name, argument, size in (
        ("quantize_query-fp4", "q", (8, dim)),
        ("quantize_query-fp4", "out_codes", (8, dim // 2)),
        ("index_scores-flat", "query_codes", (8, dim // 2)),
        ("index_scores-fp8", "query_codes", (8, dim)),
        ("index_select-build", "query_codes", (8, dim // 2)),
        ("compress-ratio4-index", "norm_weight", (dim,)),
        ("compress-ratio2", "key_weight", (dim, 512)),
        ("store-IndexFp4", "rows", (dim,)),
    ):
        call = CALLS[name](scene)
        given = call.args[argument]
        rows = () if argument in ("norm_weight", "key_weight") else (len(given),)
        match = refusal(call.but(**{argument: given.new_zeros(*rows, *size)}))
        assert match["argument"].split(".")[0] in argument.split("_") or argument in match[0]


@pytest.mark.parametrize("record", list(RECORDS))
def test_page_bytes_of_every_record(record, scene):
    """One byte less than a page's payload is too small, whatever the page size."""
    call = CALLS[f"store-{record}"](scene)
    for page_size in (1, 7, 64, 256):
        payload = RECORDS[record].payload(page_size)
        for size, fits in ((payload, True), (payload - 1, False)):
            stride = -(-payload // 16) * 16
            pages = scene.new(3, stride, dtype=torch.uint8)[:, :size]
            changed = call.but(pages=pages, pages_page_size=page_size)
            if fits:
                changed()
            else:
                assert f"at least {payload} bytes" in refusal(changed)["expected"]


@pytest.mark.case("Stable addresses and strides")
@pytest.mark.parametrize(
    "name", ["attend-selection", "select-build", "index_scores-flat", "index_select-build"]
)
def test_a_workspace_that_is_too_small_names_the_needed_bytes(name, scene):
    call = CALLS[name](scene)
    match = refusal(call.but(workspace=call.args["workspace"][: flash_csa.SYNC_BYTES - 16]))
    needed = int(re.fullmatch(r"hold at least (\d+) bytes", match["expected"])[1])
    assert needed >= flash_csa.SYNC_BYTES
    refusal(call.but(workspace=call.args["workspace"][: needed - 1]))
    call.but(workspace=call.args["workspace"][:needed].clone())()


def test_too_many_slots_for_32_bits(device):
    """A slot is an int32, so pages may not hold more; a stride-0 view stands in for the pages."""
    pages = torch.zeros(1, 288 * 256, dtype=torch.uint8, device=device).expand(1 << 23, -1)
    slots = torch.zeros(1, dtype=torch.int32, device=device)
    out = torch.zeros(1, 512, device=device)
    args = {"pages_record": 0, "pages_page_size": 256, "slots": slots, "out": out}
    match = refusal(Call("load", {"pages": pages, **args}))
    assert match["expected"] == "hold at most 2147483647 slots"


def test_names_of_records(scene):
    """A format is stated by name; an unknown name is refused where it is given."""
    data = scene.new(1, 288, dtype=torch.uint8)
    for make in (
        lambda: Pages(data, "MainFp5", 1),
        lambda: Pages.empty(1, "MainFp5", 1),
        lambda: flash_csa.quantize_query(
            scene.bf16(6, 8, 128), scene.positions, scene.cos_sin, record="MainFp5"
        ),
    ):
        with pytest.raises(ValueError) as caught:
            make()
        match = MESSAGE.fullmatch(str(caught.value))
        assert match and match["argument"] == "record" and match["got"] == "MainFp5"
        assert match["expected"] == f"be one of {', '.join(RECORDS)}"


@pytest.mark.case("Flags take effect")
def test_unknown_keyword(scene):
    call = CALLS["attend-window"](scene)
    with pytest.raises(RuntimeError, match="rotary"):
        call.but(rotary=True)()
    with pytest.raises(TypeError, match="rotary"):
        flash_csa.attend(call.args["q"], schedule=call.args["schedule"], rotary=True)


EMPTY_SCENES = {
    "no rows": {"start": (3, 0), "rows": (0, 0), "padding": 0},
    "no requests": {"start": (), "rows": (), "padding": 0},
    "padding alone": {"start": (), "rows": (), "padding": 2},
    "no pages": {"pages": 0},
    "no rows of long tables": {"start": (3, 0), "rows": (0, 0), "padding": 0, "pages": 9},
}


@pytest.mark.case("Padded page stride")
@pytest.mark.parametrize("empty", list(EMPTY_SCENES))
@every_call
def test_nothing_to_do(name, empty, device):
    CALLS[name](Scene(device, **EMPTY_SCENES[empty]))()


@pytest.mark.parametrize("name", list(CALLS))
def test_valid_call(name, scene):
    if name == "probe" and scene.device.type == "cpu":
        pytest.skip("probe asks a GPU")
    CALLS[name](scene)()


def test_every_argument_occurs():
    """The calls reach every row of the signature table, so no argument is forgotten above."""
    calls = [build(Scene()) for build in CALLS.values()]
    seen = {(call.op, a.label) for call in calls for a in arguments(call)}
    assert seen == {(op, row[0]) for op, rows in _C.SIGNATURES.items() for row in rows}
