"""The benchmark without a GPU: names, bytes, rows, comparison, hashes, a dry call per case."""

import json
import struct
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from bench import dram, measure, ours, pack_peers, peers, provenance, results, run, timing  # noqa: E402
from bench.cases import CASES, matching  # noqa: E402
from bench.inputs import Inputs  # noqa: E402

AVAILABLE = [case for case in CASES.values() if case.available]
MEASURED = [case for case in AVAILABLE if case.kind not in ("ceiling", "empty")]


def test_names_bars_and_globs():
    assert CASES["attend.decode.h64.b256"].must == 1.8
    assert CASES["reindex.1x1048576"].aim == 10
    assert CASES["select.4096x65536"].peer_us == 794
    assert [c.name for c in matching(["compress.r2.*"])] == [
        "compress.r2.t32768",
        "compress.r2.t131072",
        "compress.r2.decode64",
    ]
    assert not CASES["step.v41.b1.ctx1048576"].available
    bars = [case for case in CASES.values() if case.must]
    assert len(bars) == 53
    assert all(case.aim >= case.must for case in bars)


@pytest.mark.case("Honest bandwidth")
def test_bytes_are_those_of_the_formats():
    scores = CASES["index.decode.1x1048576"].cost
    assert scores.bytes["index keys"] == 1048576 * 68
    attend = CASES["attend.decode.h64.b1"].cost
    assert attend.bytes["main codes"] + attend.bytes["main scales"] == pytest.approx(
        512 * 288, rel=0.01
    )
    assert attend.bytes["window"] == 128 * 528
    assert CASES["reindex.1x1048576"].cost.bytes["index keys"] == 2048 * 544
    hca = CASES["attend.contiguous.h64.b64.e8192"].cost.bytes
    assert hca["main codes"] + hca["main scales"] == 64 * 8192 * 584
    grouped = CASES["project.grouped.t256"].cost
    assert grouped.flops == 2 * 256 * 8 * 4096 * 1024
    assert grouped.bytes["weights"] == 8 * 4096 * 1024 * 2


@pytest.mark.case("Honest bandwidth")
@pytest.mark.parametrize("case", MEASURED, ids=lambda case: case.name)
def test_instances_fill_the_working_set(case):
    assert 1 <= case.instances <= 512
    touched = max(case.own_bytes * case.instances, case.shared_bytes)
    assert touched >= 200e6 or case.instances == 512


@pytest.fixture(scope="module")
def inputs():
    return Inputs("cpu")


@pytest.mark.parametrize("case", MEASURED, ids=lambda case: case.name)
def test_every_case_runs_small(case, inputs):
    work = ours.build(case.small(), inputs, 1)
    for call in work.calls:
        call()
    for instance in work.content.get("instances", []):
        if "out" in instance:
            assert instance["out"].isfinite().all()


def test_inputs_are_ascending_unique_and_in_range():
    inputs = Inputs("cpu")
    drawn = inputs.ascending(5, 16, 20)
    assert (drawn[:, 1:] > drawn[:, :-1]).all()
    assert drawn.min() >= 0 and drawn.max() < 20
    pool = inputs.pool(3, 8, 8 * 20 - 3)
    assert (pool.blocks[:, 1:] > pool.blocks[:, :-1]).all()
    assert (pool.blocks[:, -1] == 19).all() and (pool.counts == 8).all()
    everything = inputs.pool(1, 8, 17)
    assert everything.blocks.tolist() == [[0, 1, 2, -1, -1, -1, -1, -1]]


def test_tree_hashes_are_those_of_git(tmp_path):
    (tmp_path / "csrc" / "core").mkdir(parents=True)
    (tmp_path / "csrc" / "core" / "a.h").write_text("a\n")
    (tmp_path / "csrc" / "core.h").write_text("b\n")
    (tmp_path / "csrc" / "empty").mkdir()
    git = ["git", "-C", str(tmp_path), "-c", "user.name=x", "-c", "user.email=x@x"]
    subprocess.check_call([*git, "init", "-q"])
    subprocess.check_call([*git, "add", "."])
    subprocess.check_call([*git, "commit", "-qm", "x"])
    text = subprocess.check_output([*git, "rev-parse", "HEAD:csrc"], text=True)
    assert provenance.tree_hash(tmp_path / "csrc") == text.strip()
    assert not provenance.is_dirty(tmp_path)
    (tmp_path / "csrc" / "core.h").write_text("c\n")
    assert provenance.is_dirty(tmp_path)


def test_without_a_repository_the_environment_names_the_tree(tmp_path, monkeypatch):
    (tmp_path / "csrc").mkdir()
    (tmp_path / "csrc" / "a.h").write_text("a\n")
    monkeypatch.delenv(provenance.COMMITTED, raising=False)
    assert provenance.is_dirty(tmp_path)
    monkeypatch.setenv(provenance.COMMITTED, provenance.tree_hash(tmp_path / "csrc"))
    assert not provenance.is_dirty(tmp_path)


class FakeGraph:
    """A call takes what its `us` says, else 100 us, as ours do."""

    launches = 1

    def __init__(self, calls):
        self.us = getattr(calls[0], "us", 100.0)
        for call in calls:
            call()


class FakeTimer:
    def once(self, call):
        call()
        return 100.0, 0

    def interleaved(self, graphs, samples):
        return [[graph.us] * samples for graph in graphs]


class FakePeer:
    """Builds ways to call a peer that take so many us; 0: one that fails."""

    def __init__(self, **ways):
        self.ways = {name.replace("_", " "): us for name, us in ways.items()}

    def build(self, case, inputs, work):
        return {name: [self.call(us)] * len(work.calls) for name, us in self.ways.items()}

    def call(self, us):
        def call():
            if not us:
                raise RuntimeError("no such kernel")

        call.us = us
        return call


@pytest.fixture
def bench(monkeypatch):
    monkeypatch.setattr(measure, "Graph", FakeGraph)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    made = measure.Bench.__new__(measure.Bench)
    made.device, made.timer, made.inputs = torch.device("cpu"), FakeTimer(), Inputs("cpu")
    made.peers = FakePeer(peer=250.0)
    made.dirty, made.facts = False, provenance.device_facts(made.device)
    rates = {"copy": 4e12, "read": 4e12, "gather": 4e12, "bf16": 8e14, "fp8": 1e15}
    made.ceilings = measure.Ceilings(rates, 1.3, 4.8e12)
    return made


def test_notes_about_a_peer():
    case, name = CASES["index_select.1x1048576"], "DeepGEMM FP8 paged + {}"
    assert measure.peer_notes(case, name.format("cooperative_topk"), 82.0) == []
    far = "peer -19% off its recorded 80.1 us"
    assert measure.peer_notes(case, name.format("cooperative_topk"), 65.0) == [far]
    why = ", which is with cooperative_topk; persistent_topk is faster here"
    assert measure.peer_notes(case, name.format("persistent_topk"), 65.0) == [far + why]
    reindex = CASES["reindex.1x1048576"]
    assert measure.peer_notes(reindex, name.format("persistent_topk"), 65.0) == [far + why]
    assert measure.peer_notes(CASES["compress.r2.decode64"], "vLLM", 23.0) == [
        "peer +100% off its recorded 11.5 us"
    ]
    prefill, far = CASES["attend.prefill.h8.q4096"], "peer -20% off its recorded 763.0 us"
    assert measure.peer_notes(prefill, "FlashMLA, 8 heads", 610.4) == [far]
    assert measure.peer_notes(prefill, None, None) == []


def test_a_row(bench, tmp_path):
    case = CASES["attend.decode.h8.b1"].small()
    row = bench.measure(case)
    assert tuple(row) == results.KEYS
    assert row["ratio"] == 2.5 and row["ours_samples"] == row["peer_samples"] == timing.SAMPLES
    assert row["bytes"] == case.cost.nbytes and row["gbps"] == row["bytes"] / 100 / 1e3
    assert row["ceiling"] == "launch 1.30 us" and row["fraction"] == pytest.approx(0.013)
    assert row["peer"] == "peer" and row["peers_us"] == {"peer": 250.0}
    assert row["note"] == "peer +1523% off its recorded 15.4 us"
    results.save(tmp_path / "x.jsonl", {case.name: row})
    (line,) = (tmp_path / "x.jsonl").read_text().splitlines()
    assert list(json.loads(line)) == list(results.KEYS)
    assert results.load(tmp_path / "x.jsonl") == {case.name: row}
    trees = provenance.trees("attend")
    assert results.is_current(row, trees, "cpu") and not results.is_current(row, trees, "other")
    assert not results.is_current(row, trees | {"tree_stage": "x"}, "cpu")


@pytest.mark.parametrize(
    "name, ways, peer, best",
    [
        # In attention the first way is the peer, and another is shown where it is faster.
        ("attend.decode.h8.b1", {"first": 250.0, "second": 260.0}, "first", None),
        ("attend.decode.h8.b1", {"first": 250.0, "second": 246.0}, "first", None),
        ("attend.decode.h8.b1", {"first": 250.0, "second": 244.0}, "first", "second"),
        ("attend.prefill.h8.q4096", {"first": 250.0, "second": 200.0}, "first", "second"),
        ("attend.contiguous.h64.b64.e8192", {"first": 250.0, "second": 0.0}, "first", None),
        ("attend.contiguous.h64.b64.e8192", {"first": 0.0, "second": 250.0}, None, "second"),
        # Elsewhere the fastest is the peer.
        ("select.1x131072", {"first": 250.0, "second": 200.0}, "second", None),
        ("select.1x131072", {"first": 0.0, "second": 200.0}, "second", None),
        ("select.1x131072", {"first": 0.0, "second": 0.0}, None, None),
        ("select.1x131072", {}, None, None),
    ],
)
def test_ways_to_call_a_peer(name, ways, peer, best, bench):
    bench.peers = FakePeer(**ways)
    row = bench.measure(CASES[name].small())
    assert row["peers_us"] == {way: us for way, us in ways.items() if us}
    assert (row["peer"], row["best_peer"]) == (peer, best)
    assert (row["peer_us"], row["best_peer_us"]) == (ways.get(peer), ways.get(best))
    assert row["ratio"] == (ways[peer] / 100 if peer else None)
    assert row["best_ratio"] == (ways[best] / 100 if best else None)
    assert row["peer_samples"] == (timing.SAMPLES if peer else 0)
    failed = [way for way, us in ways.items() if not us]
    assert all(f"peer {way} failed: no such kernel" in row["note"] for way in failed)


def test_a_faster_way_is_printed(bench, capsys):
    case = CASES["attend.decode.h8.b1"]
    bench.peers = FakePeer(**{"FlashMLA, 64 heads": 250.0, "FlashMLA, 128 heads": 214.0})
    rows = [bench.measure(case.small())]
    run._print_rows(rows, {"attend.decode.h8.b64": "why"})
    assert "peer padded further, us / ratio" in (shown := capsys.readouterr().out)
    assert "128 heads: 214.0 / 2.14" in shown and "peer +1523% off its recorded" in shown
    rows[0] |= {"best_peer": None, "best_peer_us": None, "best_ratio": None}
    run._print_rows(rows, {"attend.decode.h8.b64": "why"})
    assert "padded" not in (shown := capsys.readouterr().out) and "failed" in shown


@pytest.mark.case("Honest bandwidth")
def test_a_time_below_the_byte_floor_is_an_error(bench):
    bench.ceilings.peak = 1e6
    with pytest.raises(measure.BelowFloor, match="below the byte floor"):
        bench.measure(CASES["store.window.h8.t64"].small())


def test_fewer_samples_and_instances_of_slow_kernels():
    assert measure._wanted_samples([[50.0], [10.0]], 20) == timing.SAMPLES
    assert measure._wanted_samples([[101.0], [10.0]], 20) == timing.FEW_SAMPLES
    assert measure._wanted_samples([[2e6]], 1) == 1
    case = CASES["compress.r2.t32768"]
    assert measure._affordable(case, 20, 1.0) == 20
    assert measure._affordable(case, 20, 100_000.0) == 3
    assert measure._affordable(case, 20, 1e9) == 2  # still 200 MB


def test_regressions():
    old = {"a": {"device": "H200", "ours_us": 10.0}, "b": {"device": "H100", "ours_us": 1.0}}
    rows = [
        {"case": "a", "device": "H200", "ours_us": 10.6, "stage": "attend"},
        {"case": "b", "device": "H200", "ours_us": 9.0, "stage": "attend"},
        {"case": "c", "device": "H200", "ours_us": 9.0, "stage": "attend"},
    ]
    assert results.regressions(rows, old, 0.05) == [("a", pytest.approx(0.06))]
    assert results.regressions(rows, old, 0.10) == []


class FakeBench:
    """Times of a machine without a GPU; `interrupt` names the case at which the user gives up."""

    def __init__(self, us: float = 10.0, interrupt: str = ""):
        self.us, self.interrupt, self.measured = us, interrupt, []
        self.facts = {"device": "H200"}

    def measure_ceilings(self, cases):
        return [self._row(case) for case in cases]

    def measure(self, case):
        if case.name == self.interrupt:
            raise KeyboardInterrupt
        self.measured.append(case.name)
        return self._row(case)

    def _row(self, case):
        row = dict.fromkeys(results.KEYS) | provenance.trees(case.stage) | self.facts
        return row | {"case": case.name, "stage": case.stage, "ours_us": self.us, "note": ""}


def bench_command(bench, monkeypatch, capsys, *arguments: str) -> tuple[int, str]:
    """Exit code and stderr of `python -m bench.run`."""
    monkeypatch.setattr(run, "_bench", lambda allow_dirty: bench)
    monkeypatch.setattr(run, "_device_works", lambda: True)
    monkeypatch.setattr(sys, "argv", ["bench.run", *arguments])
    with pytest.raises(SystemExit) as ended:
        run.typer.run(run.main)
    return ended.value.code or 0, capsys.readouterr().err


def test_the_list_says_what_its_columns_are(monkeypatch, capsys):
    """Bars and recorded figures are no results, and whole steps are not run."""
    monkeypatch.setattr(sys, "argv", ["bench.run", "--list", "--case", "step.*"])
    with pytest.raises(SystemExit):
        run.typer.run(run.main)
    shown = capsys.readouterr().out
    legend, table = shown.split("\n\n", 1)
    columns = ("instances", "bytes", "FLOPs", "must", "aim", "recorded peer us")
    assert all(name in legend and name in table for name in (*columns, "(not available yet)"))
    assert "Not a\nresult: README" in legend
    assert all(len(line) <= 140 for line in shown.splitlines())


SELECT = ("--case", "select.1x131072", "--case", "select.8x131072")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--case", "select.*", "--case", "nosuch.*"], "no case matches nosuch.* (--list"),
        (["--skip", "nosuch"], "no case matches nosuch"),
        (["--case", "select.*", "--skip", "select.*"], "--skip leaves no case"),
        (["--device", "tpu"], "--device must be cuda or cpu, got tpu"),
        (["--device", "cpu", "--dram"], "--device cpu takes none"),
        (["--case", "step.v41.b1.*"], "not available yet: step.v41.b1."),
        (["--compare", "nosuch.jsonl"], "--compare: there is no nosuch.jsonl"),
    ],
)
def test_bad_arguments_are_one_line(arguments, message, monkeypatch, capsys):
    code, said = bench_command(FakeBench(), monkeypatch, capsys, *arguments)
    assert code == 2 and message in said and len(said.splitlines()) == 1


@pytest.mark.parametrize("text", ["garbled", "[1]", '{"ours_us": 3}', '{"case": "a"', "{}\n"])
@pytest.mark.parametrize("option", ["--compare", "--out"])
def test_garbled_rows_are_one_line(option, text, monkeypatch, capsys, tmp_path):
    """Before anything is measured, and the file stays as it is."""
    path, bench = tmp_path / "rows.jsonl", FakeBench()
    path.write_text("\n" + text)
    code, said = bench_command(bench, monkeypatch, capsys, *SELECT, option, str(path))
    assert code == 2 and f"{path}, line 2: no row" in said and len(said.splitlines()) == 1
    assert not bench.measured and path.read_text() == "\n" + text


def test_an_interrupted_run_is_taken_up_again(monkeypatch, capsys, tmp_path):
    out = tmp_path / "rows.jsonl"
    arguments = (*SELECT, "--out", str(out))
    bench = FakeBench(interrupt="select.8x131072")
    code, said = bench_command(bench, monkeypatch, capsys, *arguments)
    assert code == 130 and said.endswith("bench: interrupted; run again to go on\n")
    assert results.load(out, results.KEYS).keys() > {"select.1x131072"}
    bench = FakeBench()
    assert bench_command(bench, monkeypatch, capsys, *arguments)[0] == 0
    assert bench.measured == ["select.8x131072"]
    bench = FakeBench()
    assert bench_command(bench, monkeypatch, capsys, *arguments)[0] == 0
    assert not bench.measured  # all are current
    code, said = bench_command(bench, monkeypatch, capsys, *arguments, "--redo", "--budget", "0")
    assert code == 0 and "out of time: 2 cases left; run again to go on" in said


def test_dram_bytes_are_counted_stage_by_stage(monkeypatch, capsys, tmp_path):
    out, asked = tmp_path / "rows.jsonl", []

    def profile(arguments, groups, timeout):
        asked.append(arguments[2:])
        if arguments[2].startswith("compress"):
            raise dram.ncu.Unavailable("no counters")
        items = [dram.ncu.Counted(1, 1000, len(name), 0, 0.0, 0.0) for name in asked[-1]]
        return items, "a warning\n" + json.dumps(asked[-1])

    monkeypatch.setattr(dram.ncu, "find", lambda: "ncu")
    monkeypatch.setattr(dram.ncu, "profile", profile)
    cases = ("--case", "compress.r1.decode64", "--case", "*.h*.t64", "--case", "step.slots.b1")
    arguments = (*cases, *SELECT, "--out", str(out), "--dram")
    code, said = bench_command(FakeBench(), monkeypatch, capsys, *arguments)
    assert code == 0 and "DRAM bytes of compress: no counters" in said
    compressors = ["compress.r1.decode64"]
    assert [names[0].partition(".")[0] for names in asked] == ["compress", "select", "store"]
    assert asked[0] == compressors and "query.h32.t64" in asked[2] and len(asked[2]) == 4
    rows = results.load(out, results.KEYS)
    counted = {name: row["dram_bytes"] for name, row in rows.items() if row["dram_bytes"]}
    assert counted == {name: 1000 + len(name) for names in asked[1:] for name in names}
    asked.clear()
    bench_command(FakeBench(), monkeypatch, capsys, *arguments, "--budget", "0")
    assert asked == [compressors]  # the others are in the rows


def test_clocks_and_power_are_printed():
    rows = [
        {"device": "H200", "clock": 1980.0, "power": 120.5},
        {"device": "H200", "clock": 1755.0, "power": None},
        {"device": "cpu", "clock": None, "power": None},
    ]
    assert run._states(rows) == ["H200, clock 1755 to 1980 MHz, power 120 to 120 W", "cpu"]


def test_a_run_may_be_compared_with_its_own_file(monkeypatch, capsys, tmp_path):
    out = tmp_path / "rows.jsonl"
    arguments = (*SELECT, "--out", str(out), "--compare", str(out), "--redo")
    bench_command(FakeBench(10.0), monkeypatch, capsys, *arguments[:-3])
    code, said = bench_command(FakeBench(11.0), monkeypatch, capsys, *arguments)
    assert code == 1 and "regression: select.1x131072 +10.0%" in said
    assert bench_command(FakeBench(11.2), monkeypatch, capsys, *arguments)[0] == 0


def test_missing_peers_are_one_line(tmp_path, monkeypatch):
    monkeypatch.setenv("FLASH_CSA_PEERS", str(tmp_path))
    found = peers.Peers()
    assert found.missing.startswith("no peers: ") and "\n" not in found.missing
    assert found.build(CASES["select.1x131072"], Inputs("cpu"), ours.Work([])) == {}


class FakeFlashMLA:
    """Takes the kernels' arguments; a result is the number of heads."""

    def sparse_decode_fwd(self, q, window, slots, lengths, sink, schedule, splits, *more):
        assert q.shape[1:] == (1, len(sink), 512) and (schedule is None) == (splits is None)
        return len(sink), None, f"schedule of {len(sink)}", "splits"

    def sparse_prefill_fwd(self, q, kv, slots, scale, dim, sink, *more):
        assert q.shape[1:] == (len(sink), 512) and len(slots) == len(q)
        return len(sink)


@pytest.mark.parametrize(
    "name, widths",
    [
        ("decode.h8.b64", (64, 128)),
        ("decode.h64.b64", (64, 128)),
        ("contiguous.h128.b64.e8192", (128,)),
        ("prefill.h32.q4096", (32, 64)),
        ("prefill.h64.q4096", (64,)),
        ("prefill.h128.q4096", (128,)),
    ],
)
def test_heads_of_peers(name, widths, monkeypatch):
    """The peer has the fewest heads that its kernel takes; other ways are padded further."""
    monkeypatch.setattr(torch.ops, "_flashmla_C", FakeFlashMLA(), raising=False)
    made = peers.Peers.__new__(peers.Peers)
    made.missing = ""
    case, inputs = CASES[f"attend.{name}"].small(), Inputs("cpu")
    sides = made.build(case, inputs, ours.build(case, inputs, 1))
    assert [name.rpartition(", ")[2] for name in sides] == [f"{width} heads" for width in widths]
    assert peers.named(case, sides) == next(iter(sides))
    for width, calls in zip(widths, sides.values(), strict=True):
        assert len(calls) == 1 and calls[0]() in (None, width)


def test_packing_keeps_the_code_for_hopper():
    def entry(architecture: int, body: bytes) -> bytes:
        header = struct.pack("<HHIQ", 2, 0x101, 64, len(body)) + bytes(12)
        return (header + struct.pack("<I", architecture)).ljust(64, b"\1") + body

    entries = entry(80, b"ampere") + entry(90, b"hopper") + entry(100, b"later")
    fatbin = struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(entries)) + entries
    by_chance = struct.pack("<I", 0xBA55ED50)
    packed = pack_peers.keep_sm90(bytearray(by_chance + b"text" + fatbin + b"end"))
    assert b"hopper" in packed and packed.endswith(b"end") and b"text" in packed
    assert b"ampere" not in packed and b"later" not in packed
