"""Whatever is wrong in a call of a public function: one ValueError line that names function and
argument, and nothing is written. Every argument of every call, and every field and element of it,
is replaced in turn by each of the wrong values for its kind."""

import inspect
import re

import pytest
import torch

import flash_csa as fc
from flash_csa import _C, RECORDS
from op_calls import CALLS, PAGE_SIZE, Scene
from public_calls import PublicCall, public_call, tensors

LINE = re.compile(r"flash_csa\.(?P<function>\w+): (?P<argument>[\w.]+) must [^\n]+, got [^\n]+")
TOGETHER = re.compile(r"flash_csa\.\w+: [\w.,() ]+ must (come|be given|have one)[^\n]*, got [^\n]+")
NO_TENSOR = {"tensor": torch.zeros(2, 3), "name": "x", "empty list": [], "dict": {}}
NUMBERS = {"None": None, "name": "x", "imaginary": 1j, "list": [1]}
WRONG = {
    bool: {},
    int: NUMBERS | {"float": 2.0, "negative": -1, "65 bits": 1 << 64, "vast": 1 << 4000},
    float: NUMBERS | {"NaN": float("nan"), "infinite": float("inf")},
    str: {"None": None, "unknown": "MainFp5", "number": 1, "list": ["MainFp4"]},
}
# First dimensions that may be longer or shorter: no other argument has this size.
FREE = {
    *("pages", "main.pages", "index.pages", "window.pages", "cos_sin", "derotate.cos_sin"),
    *("tail.rows", "schedule", "workspace", "contiguous.block_table"),
}
# A size, or a device, that only two arguments have: the second one is named, whichever is wrong.
PAIRS = {
    *(("store", "rows"), ("load", "slots"), ("load", "pages"), ("quantize_query", "q")),
    *(("normalize_pool", "blocks"), ("merge", "outs"), ("merge_pools", "blocks")),
    *(("merge_selections", "positions"), ("schedule", "batch.positions")),
    ("step_slots", "batch.positions"),
}
# An empty list by another name; defaults by another name; a number that
# is compared with a width.
TAKEN = {
    *(("contiguous_ratios", "empty list"), ("contiguous_ratios", "dict")),
    *(("dtype", "None"), ("pool_blocks", "None"), ("pool_blocks", "float")),
}


def wrong_values(value: object) -> dict[str, object]:
    """By what is wrong with them."""
    if not isinstance(value, torch.Tensor):
        return WRONG.get(type(value), NO_TENSOR | {"None": None, "number": 3})
    return {
        "None": None,
        "int64": value.to(torch.int64),
        "float16": value.to(torch.float16),
        "complex": value.to(torch.complex64),
        "device": value.to("cpu" if value.is_cuda else "meta"),
        "rank + 1": value[None],
        "rank - 1": value.reshape(-1) if value.dim() > 1 else value.new_zeros(()),
        "short": value[:-1],
        "long": torch.cat((value, value[:1])),
        "strided": value.new_zeros(*value.shape, 2)[..., 0],
        "sparse": value.to_sparse(),
        "list": value.tolist(),
        "array": value.cpu().float().numpy(),
        "number": 3,
        "name": "x",
    }


def said(call: PublicCall, path: tuple, wrong: object) -> str:
    """What a call says about a value; "" where it takes it. A refused call has written nothing."""
    before = [t.clone() for t in tensors(call.arguments)]
    try:
        call.but(path, wrong)()
    except ValueError as error:
        for t, old in zip(tensors(call.arguments), before, strict=True):
            assert torch.equal(t.nan_to_num(), old.nan_to_num())
        return str(error)
    return ""


def may_take(call: PublicCall, label: str, what: str) -> bool:
    """Wrong values that a call takes: what is optional, shares no size, or has no meaning there."""
    head = label.partition(".")[0]
    parameter = inspect.signature(getattr(fc, call.op)).parameters.get(head)
    if what in ("short", "long"):
        alone = (("merge_selections", "block_table"), ("load", "slots"))
        return label in FREE or (call.op, label) in alone
    optional = parameter is None or parameter.default is None
    return (what == "None" and optional) or (head, what) in TAKEN


def is_named(label: str, line: str) -> bool:
    """Whether a line is about the argument, what it is part of, or a part of it."""
    named = LINE.fullmatch(line)["argument"].replace("window_pages", "window")
    label, short = label.replace("window_pages", "window"), named.removeprefix("out.")
    whole = label.split(".")[0].replace("pool_out", "out")  # a pair, where that is one argument
    return label in (named, short) or named == whole or short.startswith(f"{label}.")


@pytest.mark.case("Error attribution")
@pytest.mark.parametrize("allocate", [False, True], ids=["outputs given", "outputs made"])
@pytest.mark.parametrize("name", [name for name in CALLS if name != "probe"])
def test_one_line_names_the_wrong_argument(name, allocate, device):
    call = public_call(name, Scene(device), allocate=allocate)
    call()
    rows = {label for label, *_ in _C.SIGNATURES[call.op]}
    for path, value in call.leaves():
        label = call.label(path)
        if len(path) > 1 and label not in rows and (value is None or torch.is_tensor(value)):
            continue  # a field that this op does not read
        for what, wrong in wrong_values(value).items():
            if device.type == "cuda" and what in ("short", "long") and label in FREE:
                continue  # taken; what lies outside is tested with the stages
            line = said(call, path, wrong)
            where = f"{label}, {what}: {line}"
            if not line:
                assert may_take(call, label, what), where
            elif line.startswith(("flash_csa.Pages: ", "flash_csa.RECORDS: ")):
                assert LINE.fullmatch(line)["argument"] == path[-1], where
            elif not TOGETHER.fullmatch(line):
                assert LINE.fullmatch(line) and LINE.fullmatch(line)["function"] == call.op, where
                pair = what in ("short", "long", "device") and (call.op, label) in PAIRS
                assert pair or is_named(label, line), where


@pytest.mark.parametrize(
    "name, change, line",
    [
        ("attend-selection", lambda a: {"q": None}, "q must be bfloat16 [R, H, 512], got None"),
        (
            "compress-ratio2",
            lambda a: {"batch_start": None},
            "batch.start must be int32 [2], got None",
        ),
        (
            "compress-ratio2",
            lambda a: {"kv": a["kv"][:5]},
            "kv must be float32 or bfloat16 [6, 512], got float32 [5, 512]",
        ),
        (
            "compress-ratio2",
            lambda a: {
                "main_pages": a["main_pages"].repeat(1, 2),
                "main_page_size": 2 * PAGE_SIZE,
            },
            "index.page_size must be 16 (main.page_size: an entry has one slot), got 8",
        ),
        (
            "quantize_query-fp4",
            lambda a: {"record": RECORDS["MainFp4"].id},
            "record must be one of IndexFp4, IndexFp8, got MainFp4",
        ),
        (
            "attend-selection",
            lambda a: {"softmax_scale": -1e300},
            "softmax_scale must be finite in FP32, got -1e+300",
        ),
        (
            "compress-ratio2",
            lambda a: {"eps": -1e-9},
            "eps must be finite in FP32 and not negative, got -1e-09",
        ),
        (
            "normalize_pool",
            lambda a: {
                "blocks": a["blocks"][:, :0],
                "pool_out_blocks": a["pool_out_blocks"][:, :0],
            },
            "pool_out.blocks columns must be in [1, 1048576], got 0",
        ),
        *(
            (
                name,
                lambda a: {"schedule": a["schedule"][:19]},
                "schedule must have at least 20 words for 6 rows, got 19",
            )
            for name in ("attend-window", "index_scores-flat", "select-build", "index_select-build")
        ),
        *(
            (
                "attend-selection",
                lambda a, name=name: {f"contiguous_{name}": a["selection_lengths"]},
                "contiguous must be (block_table, row_request, n_vis), got a part of it",
            )
            for name in ("row_request", "n_vis")
        ),
    ],
)
def test_what_the_op_itself_says(name, change, line, device):
    call = CALLS[name](Scene(device))
    with pytest.raises(ValueError) as caught:
        call.but(**change(call.args))()
    assert str(caught.value) == f"flash_csa.{call.op}: {line}"


PLAN = fc.LayerPlan.from_config("v41-flash")
SPEC = fc.CacheSpec.for_plan(PLAN)


@pytest.mark.parametrize(
    "call, line",
    [
        (lambda: fc.Batch.build(0, [1]), "Batch.build: start must be a list of int64, got int 0"),
        (
            lambda: fc.Batch.build([0.5], [1]),
            "Batch.build: start must be a list of int64, got list [0.5]",
        ),
        (lambda: fc.Batch.build([1 << 31], [1]), "Batch: start must be int32, got 2147483648"),
        (
            lambda: fc.Batch.build([2**31 - 2], [2]),
            "Batch: start + rows must be at most 2147483647, got 2147483648",
        ),
        (
            lambda: fc.Batch.build([0, 0], [2**30, 2**30]),
            "Batch: the sum of rows must be at most 2147483647, got 2147483648",
        ),
        (
            lambda: fc.Batch.build([0], [1], max_rows=1 << 31),
            "Batch: max_rows must be int32, got 2147483648",
        ),
        (lambda: fc.Batch.decode([3], drafts=-1), "Batch: drafts must be not negative, got -1"),
        (
            lambda: fc.Pages.empty(1, "MainFp4", 0),
            "Pages.empty: page_size must be in [1, 256], got 0",
        ),
        (
            lambda: fc.Pages.empty(None, "MainFp4", 8),
            "Pages.empty: num_pages must be int64, got None",
        ),
        (
            lambda: fc.Pages(None, "MainFp4", 8),
            "Pages: data must be uint8 [num_pages, bytes], got None",
        ),
        *(
            (
                lambda make=make, device=device: make(device),
                f"{name}: device must be one that is there, got {device}",
            )
            for device in ("warp", "cuda:99")
            for name, make in (
                ("Pages.empty", lambda device: fc.Pages.empty(1, "MainFp4", 8, device)),
                ("Selection.empty", lambda device: fc.Selection.empty(1, 8, device)),
                ("Batch.build", lambda device: fc.Batch.build([0], [1], device=device)),
                ("workspace", lambda device: fc.workspace("select", k=8, device=device)),
                ("default_num_sms", fc.default_num_sms),
                (
                    "CacheSpec.allocate",
                    lambda device: SPEC.allocate(PLAN, max_tokens=9, device=device),
                ),
            )
        ),
        (lambda: fc.Pool.empty(1, -1), "Pool.empty: width must be in [0, 1048576], got -1"),
        (
            lambda: fc.cos_sin_table(8, float("nan"), True),
            "cos_sin_table: theta must be finite and above 0, got nan",
        ),
        (lambda: fc.workspace("select", k=None), "workspace: k must be int64, got None"),
        (
            lambda: fc.workspace("select", k=-(1 << 20), num_sms=132),
            "workspace_bytes: k must be at least 0, got -1048576",
        ),
        (
            lambda: fc.schedule_size(num_sms=8, max_rows_total=-99),
            "schedule_size: max_rows_total must be at least 0, got -99",
        ),
        (
            lambda: fc.CacheSpec(page_sizes=64),
            "CacheSpec: page_sizes must be a mapping by ratio, got int 64",
        ),
        (
            lambda: SPEC.layout(PLAN, max_tokens=9.5),
            "CacheSpec.layout: max_tokens must be int64, got float 9.5",
        ),
        (
            lambda: SPEC.layout(PLAN, max_tokens=9, num_spans=-1),
            "CacheSpec: num_spans must be at least 0, got -1",
        ),
        (lambda: fc.BlockPool(PLAN), "BlockPool: layout must be CacheLayout, got LayerPlan"),
        (
            lambda: fc.CacheSpec.for_plan("v41-flash"),
            "CacheSpec.for_plan: plan must be LayerPlan, got str 'v41-flash'",
        ),
    ],
)
def test_one_line_of_what_is_no_op(call, line):
    with pytest.raises(ValueError) as caught:
        call()
    assert str(caught.value) == f"flash_csa.{line}"


def test_layers_by_negative_numbers_and_steps_before_their_time():
    layout = SPEC.layout(PLAN, max_tokens=64)
    cache, pool = layout.allocate("meta"), fc.BlockPool(layout)
    step = fc.Step(cache, fc.Batch.decode([0]), pool.block_tables, pool.window_table)
    q, kv = torch.zeros(1, 64, 512).bfloat16(), torch.zeros(1, 512).bfloat16()
    table = fc.cos_sin_table(64, 1e4, False)

    def with_table(ratio_2):
        tables = {1: pool.block_tables[1], 2: ratio_2}
        return fc.Step(cache, fc.Batch.decode([0]), tables, pool.window_table)

    wanted = r"Step: block_tables\[2\] must be int32 \[1, max_pages\], got"
    for call, line in (
        (lambda: with_table(None), f"{wanted} None"),
        (lambda: with_table(pool.block_tables[2][0]), rf"{wanted} int32 \[1\]"),
        (lambda: step.n_vis(4), r"Step: ratio must be one of \[1, 2\], got 4"),
        (lambda: step.entry_slots(4), r"Step: ratio must be one of \[1, 2\], got 4"),
        (lambda: step.stored_entries(4), r"Step: ratio must be one of \[1, 2\], got 4"),
        (lambda: fc.store_window(cache, -1, step, kv, table), "store_window: layer must be in"),
        (
            lambda: fc.window_layer(cache, 40, step, fc.Query(q, kv), table),
            "window_layer: layer",
        ),
        (lambda: fc.window_layer(cache, 0, step, None, table), "window_layer: query must be Query"),
        (lambda: fc.window_layer(cache, 0, step, fc.Query(q, kv), table), "Step: step must have"),
        (lambda: fc.Group(cache, -1, cos_sin=table, compressor=None), "Group: compressor must be"),
        (
            lambda: fc.Group(cache, -1, cos_sin=table, compressor=fc.Compressor(table)),
            "Group: index must be in",
        ),
    ):
        with pytest.raises(ValueError, match=f"^flash_csa.{line}.*") as caught:
            call()
        assert ", got" in str(caught.value)


def test_sections_that_a_step_does_not_have():
    layout = SPEC.layout(PLAN, max_tokens=64)
    pool, batch = fc.BlockPool(layout), fc.Batch.decode([0])

    def step(num_sms):
        cache = layout.allocate("meta")
        return fc.Step(cache, batch, pool.block_tables, pool.window_table, num_sms=num_sms)

    begun = step(2).begin()
    for call, line in (
        (lambda: begun.section(4, "index"), "Step: ratio must be one of [1, 2], got 4"),
        (
            lambda: begun.section(1, "flat"),
            "Step: kind must be one of window, index, reindex, attend, contiguous, got flat",
        ),
        (lambda: step(0).begin(), "schedule: num_sms must be in [1, 65536], got 0"),
    ):
        with pytest.raises(ValueError) as caught:
            call()
        assert str(caught.value) == f"flash_csa.{line}"
