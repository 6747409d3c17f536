"""Whatever is wrong in a call of a public function: one ValueError line that names function and
argument, and nothing is written. Every argument of every call, and every field and element of it,
is replaced in turn by each of the wrong values for its kind."""

import inspect
import re

import pytest
import torch

import flash_csa as fc
from flash_csa import _C
from op_calls import CALLS, Scene
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
