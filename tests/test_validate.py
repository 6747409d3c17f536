"""FLASH_CSA_VALIDATE=1: the op that gets a bad value reports it, with the first bad index."""

import os
import subprocess
import sys

import pytest
import torch

import flash_csa
from flash_csa import _C, Pages, validate
from flash_csa._fakes import by_name
from op_calls import CALLS, Call, Scene

NAN, INF = float("nan"), float("inf")
ASCEND = "ascend from 0 to at most 6 rows, by at most max_rows ="
ATTENDS, INDEXES = "a window, attend or contiguous", "an index or reindex"
CHECKED = [name for name in CALLS if name != "probe"]


def with_value(call: Call, label: str, index: int | tuple[int, ...], value: float) -> Call:
    """The call with one other element of one argument."""
    name = label.replace(".", "_")
    t = call.args[name].clone()
    t[index] = value
    return call.but(**{name: t})


def run(call) -> None:
    """The call as a wrapper makes it."""
    getattr(validate.ops, call.op)(**call.args)


@pytest.mark.parametrize("name", CHECKED)
def test_good_values_pass(name, device):
    with validate.validation():
        run(CALLS[name](Scene(device)))
        run(CALLS[name](Scene(device, start=(3, 0), rows=(0, 0), padding=0)))
        run(CALLS[name](Scene(device, start=(), rows=(), padding=2)))
    flash_csa.check()


# One value for each rule: call, argument, index, value, what the line says after "must". Row 5 of
# the scene is padding; request 0 owns rows 0, 1 at positions 3, 4, request 1 rows 2..4 at 0..2.
# There are 4 pages of 8 records and 8 window pages.
BAD_VALUES = [
    ("store-MainFp4", "slots", 2, 32, "be in [-1, 32)"),
    ("store-MainFp4", "slots", 2, -2, "be in [-1, 32)"),
    ("store-MainFp4", "rows", (2, 5), NAN, "be finite"),
    ("load-MainFp4", "slots", 0, 99, "be in [-1, 32)"),
    ("rope_store-v41", "positions", 1, 64, "be in [-1, 64)"),
    ("rope_store-v41", "slots", 1, 64, "be in [-1, 64)"),
    ("rope_store-v41", "q", (4, 1, 500), NAN, "be finite"),
    ("rope_store-v41", "kv", (3, 7), INF, "be finite"),
    ("quantize_query-fp4", "positions", 5, -7, "be in [-1, 64)"),
    ("quantize_query-fp4", "q", (2, 0, 0), -INF, "be finite"),
    ("compress-ratio1", "batch.positions", 4, 64, "be in [-1, 64)"),
    ("compress-ratio2", "kv", (1, 511), NAN, "be finite"),
    ("compress-ratio2", "gate", (4, 0), INF, "be finite"),
    ("compress-ratio4", "bias", (3, 9), NAN, "be finite"),
    ("compress-ratio2", "norm_weight", 3, NAN, "be finite"),
    ("compress-ratio2", "key_weight", (0, 1), INF, "be finite"),
    ("compress-ratio2", "key_norm_weight", 127, NAN, "be finite"),
    ("compress-ratio2", "entry_first", 1, -1, "be at least 0"),
    ("compress-ratio2", "entry_slots", 0, 32, "be in [-1, 32)"),
    # Slot 0 is no way to say that a row closes nothing.
    ("compress-ratio2", "entry_slots", 1, 0, "be -1 where the row closes no entry"),
    ("compress-ratio2", "batch.tail_slot", 1, 2, "be in [-1, 2)"),
    ("schedule", "batch.positions", 1, 5, "be consecutive from each request's start"),
    ("schedule", "batch.row_request", 2, 2, "be in [-1, 2)"),
    ("schedule", "batch.row_request", 5, 1, "be -1 exactly where positions is"),
    ("schedule", "batch.start", 0, -3, "be at least 0"),
    ("schedule", "batch.cu_tokens", 2, 7, f"{ASCEND} 3"),
    ("schedule", "window_first", 1, -1, "be at least 0"),
    ("index_scores-flat", "block_table", (1, 0), 4, "be in [-1, 4)"),
    ("index_scores-flat", "weights", (0, 3), NAN, "be finite"),
    ("index_scores-fp8", "query.scales", (1, 2), INF, "be finite"),
    ("index_scores-pool", "pool.counts", 3, 3, "be in [0, 3)"),
    ("index_select-restrict", "pool.blocks", (2, 0), 2, "be in [0, 2)"),
    ("select-build", "block_table", (0, 0), -2, "be in [-1, 268435456)"),
    ("normalize_pool", "positions", 0, -2, "be at least -1"),
    ("attend-selection", "selection.slots", (3, 15), 32, "be in [-1, 32)"),
    ("attend-selection", "selection.lengths", 2, 17, "be in [0, 17)"),
    ("attend-window", "window.slots", (0, 0), 64, "be in [-1, 64)"),
    ("attend-window", "window.lengths", 1, -1, "be in [0, 17)"),
    ("attend-window", "q", (2, 1, 0), NAN, "be finite"),
    ("attend-window", "sink", 1, NAN, "not be NaN"),
    ("attend-window", "derotate.positions", 0, 64, "be in [-1, 64)"),
    ("attend-contiguous", "contiguous.block_table", (0, 1), 4, "be in [-1, 4)"),
    ("attend-contiguous", "contiguous.row_request", 0, 2, "be in [-1, 2)"),
    ("attend-contiguous", "contiguous.n_vis", 0, 17, "be in [0, 17)"),
    ("attend-selection", "schedule", 3, 256, f"be {ATTENDS} section, whose word 3 is 64"),
    ("index_scores-flat", "schedule", 3, 64, f"be {INDEXES} section, whose word 3 is 256"),
    ("index_select-restrict", "schedule", 3, 0, f"be {INDEXES} section, whose word 3 is 256"),
    ("select-build", "schedule", 3, -1, f"be {INDEXES} section, whose word 3 is 256"),
    ("merge-f32", "lses", (2, 0, 1), NAN, "not be NaN"),
    ("merge-f32", "outs", (1, 0, 1, 5), NAN, "be finite where its lse is"),
    ("merge_selections", "positions", (1, 0, 0), 16, "be in [-1, 16)"),
    ("merge_selections", "row_request", 0, 2, "be in [-1, 2)"),
    ("merge_pools", "blocks", (0, 1, 1), -2, "be at least -1"),
    ("step_slots", "window_table", (1, 0), -2, "be in [-1, 268435456)"),
    ("step_slots", "entry_first", (0, 1), -1, "be at least 0"),
]
ABSENT = torch.full((2, 2), -1).int()
BAD_TOGETHER = [
    (
        "schedule",
        {"batch_max_rows": 2},
        f"batch.cu_tokens must {ASCEND} 2, got 5 at [2]",
    ),
    (
        "select-restrict",
        {"pool_blocks": torch.zeros(6, 2).int(), "pool_counts": torch.full((6,), 2).int()},
        "pool.blocks must ascend without repetition, got 0 at [0, 1]",
    ),
    (
        "compress-ratio2",
        {"batch_tail_slot": torch.tensor([-1, 0], dtype=torch.int32)},
        "batch.tail_slot must be given where a closing group began before the step, "
        "got -1 for request 0 at [0]",
    ),
    (
        "compress-ratio2",
        {"tail_rows": None},
        "tail.rows must be given where a closing group began before the step, "
        "got None for request 0 at [0]",
    ),
    (
        "step_slots",
        {"window_table": torch.tensor([[0, 1, 2, 3], [-1, 5, 6, 7]], dtype=torch.int32)},
        "window_table must have a page for every position of the step, got position 0 at [2]",
    ),
    (
        "step_slots",
        {"block_tables": [ABSENT + 1, ABSENT]},
        "block_tables must have a page for every entry that a row closes at ratio 2, "
        "got entry 1 at [0]",
    ),
    (
        "step_slots",
        {"block_tables": [ABSENT - 2, ABSENT]},
        "block_tables must be in [-1, 268435456), got -3 at [0, 0]",
    ),
]


def refused(call, line: str) -> None:
    before = {name: t.clone() for name, t in call.mutated().items()}
    with validate.validation(), pytest.raises(ValueError) as caught:
        run(call)
    assert str(caught.value) == f"flash_csa.{call.op}: {line}"
    for name, t in call.mutated().items():
        assert torch.equal(t.nan_to_num(), before[name].nan_to_num()), f"{name} was written"


@pytest.mark.case("Error attribution")
@pytest.mark.parametrize("name, label, index, value, expected", BAD_VALUES)
def test_bad_value_is_reported_where_it_is(name, label, index, value, expected, device):
    call = with_value(CALLS[name](Scene(device)), label, index, value)
    place = list(index) if isinstance(index, tuple) else [index]
    refused(call, f"{label} must {expected}, got {value} at {place}")


@pytest.mark.parametrize(
    "name, sections, others",
    [("attend-selection", (0, 3, 4), (1, 2)), ("index_scores-flat", (1, 2), (0, 3, 4))],
)
def test_a_section_of_other_work_is_reported(name, sections, others, device):
    scene = Scene(device)
    call = CALLS[name](scene)
    with validate.validation():
        for number in sections:
            run(call.but(schedule=scene.schedule(number)))
        for number in others:
            with pytest.raises(ValueError, match=r"schedule must be an? .* section, whose word 3"):
                run(call.but(schedule=scene.schedule(number)))


@pytest.mark.parametrize("name, change, line", BAD_TOGETHER)
def test_values_that_do_not_fit_each_other(name, change, line, device):
    refused(CALLS[name](Scene(device)).but(**change).to(device), line)


def test_every_checked_argument_has_a_bad_value():
    """Every op has rules, and the table above reaches every argument that has one."""
    found = set()
    for name in CHECKED:
        call = CALLS[name](Scene())
        given = by_name(call.op, (), call.args)
        found |= {(call.op, finding.label) for finding in validate.findings(call.op, given)}
    assert {op for op, _ in found} == {op for op in _C.SIGNATURES if op != "probe"}
    reached = {row[1] for row in BAD_VALUES} | {row[2].split()[0] for row in BAD_TOGETHER}
    assert {label for _, label in found} <= reached


def test_padded_rows_and_unread_columns_may_hold_anything(device):
    call = CALLS["attend-selection"](Scene(device))
    lengths = torch.full_like(call.args["selection_lengths"], 3)
    lengths[5] = 0
    slots = call.args["selection_slots"].clone()
    slots[:, 3:] = 2**31 - 1
    q = call.args["q"].clone()
    q[5] = NAN
    with validate.validation():
        run(call.but(selection_lengths=lengths, selection_slots=slots, q=q))
        scene = Scene(device)
        kv, q = scene.bf16(6, 512), scene.bf16(6, 2, 512)
        kv[5], q[5] = NAN, NAN
        run(CALLS["rope_store-v41"](scene).but(kv=kv, q=q))


def test_captured_steps_leave_a_mark(device):
    """While a stream captures, nothing is read on the host: check() tells afterwards, once."""
    with validate.validation(deferred=True):
        run(with_value(CALLS["attend-window"](Scene(device)), "q", (2, 1, 0), NAN))
        run(with_value(CALLS["store-MainFp4"](Scene(device)), "slots", 2, 32))
        run(CALLS["load-MainFp4"](Scene(device)))
    with pytest.raises(ValueError) as caught:
        flash_csa.check()
    where = Scene(device).new(1).device
    assert str(caught.value) == (
        "flash_csa.check: captured steps must meet valid values, got bad ones in "
        f"store: slots on {where}; attend: q on {where}"
    )
    flash_csa.check()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_replays_leave_a_mark():
    scene = Scene("cuda")
    call = CALLS["store-MainFp4"](scene)
    with validate.validation():
        run(call)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run(call)
        graph.replay()
        flash_csa.check()
        call.args["slots"][1] = 1 << 20
        graph.replay()
        with pytest.raises(ValueError, match="store: slots"):
            flash_csa.check()
        call.args["slots"][1] = 0
        graph.replay()
        flash_csa.check()


def test_wrong_types_come_first(device):
    call = CALLS["store-MainFp4"](Scene(device))
    with validate.validation(), pytest.raises(ValueError, match="slots must be int32"):
        run(call.but(slots=call.args["slots"].long() + 1000))
    with validate.validation(), pytest.raises(ValueError, match=r"page_size must be in \[1, 256\]"):
        run(call.but(pages_page_size=0))


def test_off_the_ops_are_called_as_they_are():
    for op in _C.SIGNATURES:
        assert getattr(validate.ops, op) is getattr(torch.ops.flash_csa, op)
    with validate.validation():
        assert validate.ops.store is not torch.ops.flash_csa.store
        with validate.validation(False):
            assert validate.ops.store is torch.ops.flash_csa.store
    assert validate.ops.store is torch.ops.flash_csa.store


def test_wrappers_are_checked(device):
    pages = Pages.empty(1, "MainFp4", 8, device)
    rows = torch.zeros(1, 512, dtype=torch.bfloat16, device=device)
    slots = torch.tensor([8], dtype=torch.int32, device=device)
    flash_csa.store(rows, pages, slots)  # an absent slot is skipped
    with validate.validation(), pytest.raises(ValueError, match=r"got 8 at \[0\]"):
        flash_csa.store(rows, pages, slots)


def test_traced_code_is_not_checked(device):
    pages = Pages.empty(1, "MainFp4", 8, device)
    slots = torch.tensor([8], dtype=torch.int32, device=device)
    with validate.validation():
        compiled = torch.compile(
            lambda s: flash_csa.load(pages, s), fullgraph=True, backend="eager"
        )
        assert compiled(slots).count_nonzero() == 0


def test_read_from_the_environment_at_import():
    code = "from flash_csa import validate; print(validate.ops.store.__name__)"
    for value, name in (("1", "call"), ("0", "store"), ("", "store")):
        env = os.environ | {"FLASH_CSA_VALIDATE": value}
        done = subprocess.run(
            [sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True
        )
        assert done.stdout.strip() == name


def test_another_value_in_the_environment_is_refused():
    """Not taken for 0: the checks would be off unnoticed."""
    env = os.environ | {"FLASH_CSA_VALIDATE": "true"}
    done = subprocess.run(
        [sys.executable, "-c", "import flash_csa"], env=env, capture_output=True, text=True
    )
    line = "ValueError: flash_csa: FLASH_CSA_VALIDATE must be 0 or 1, got true"
    assert done.returncode == 1 and done.stderr.splitlines()[-1] == line
