"""bench.cpu at tiny sizes: every formulation computes what ours does, and rows have their keys."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from bench import cpu, cpu_peers, results  # noqa: E402
from bench.inputs import Inputs  # noqa: E402

each_case = pytest.mark.parametrize("case", cpu.CASES.values(), ids=lambda case: case.name)


@pytest.fixture(scope="module")
def inputs():
    return Inputs("cpu")


def trace(function, **_):
    """Stands in for torch.compile: whole graphs, without the minutes of a compiler."""
    return torch.compile(function, backend="eager", fullgraph=True)


@each_case
def test_every_formulation_gives_our_answer(case, inputs):
    work = cpu.build(case.small(), inputs)
    name, off = cpu.worst_peer(work)
    assert off <= 1, name


@each_case
def test_four_formulations_and_some_compiled(case, inputs):
    torch.compiler.reset()
    work = cpu.build(case.small(), inputs, trace)
    compiled = [name for name in work.peers if name.startswith("compiled")]
    assert len(work.peers) >= 4 and compiled
    assert bool(work.bare_peers) == (case.stage in ("attend", "index"))
    result = work.ours()
    for name in compiled:
        assert work.off(result, work.peers[name]()) <= 1, name


@pytest.mark.parametrize("stage", cpu.BUILDERS)
def test_a_wrong_peer_is_no_peer(stage, inputs, monkeypatch):
    case = next(case for case in cpu.CASES.values() if case.stage == stage).small()
    work = cpu.build(case, inputs)
    result = work.ours()
    wrong = result.flip(-1) if result.dtype != torch.float32 else 1.1 * result
    peers = dict(list(work.peers.items())[:1]) | {"wrong": lambda: wrong}
    broken = replace(work, peers=peers, bare_peers={})
    monkeypatch.setitem(cpu.BUILDERS, stage, lambda *_: broken)
    with pytest.raises(RuntimeError, match="wrong is off by"):
        cpu.measure(case, inputs, 1)


@pytest.mark.parametrize("name", ["attend.r8.h64.n640", "select.r1.e131072.k512", "store.IndexFp4"])
def test_a_row(name, inputs, tmp_path):
    row = cpu.measure(cpu.CASES[name].small(), inputs, 3)
    assert tuple(row) == cpu.KEYS
    assert row["peer_us"] == pytest.approx(min(row["peers_us"].values()), abs=0.1)
    assert row["peer_us"] == pytest.approx(row["peers_us"][row["peer"]], abs=0.1)
    assert row["ours_min_us"] <= row["ours_us"] and row["peer_min_us"] <= row["peer_us"]
    assert row["ratio"] == row["peer_us"] / row["ours_us"]
    assert (row["mb_per_s_per_core"] is None) == (row["stage"] != "store")
    assert (row["bare_ratio"] is None) == (row["stage"] != "attend")
    reached = row["mb_per_s_per_core"] if row["stage"] == "store" else row["ratio"]
    assert row["met"] == (reached >= row["bar"])
    out = tmp_path / "cpu.jsonl"
    results.save(out, {name: row}, cpu.KEYS, cpu.CASES)
    assert results.load(out) == {name: row}


def test_bars():
    bars = {name: case.bar for name, case in cpu.CASES.items()}
    assert bars["attend.r8.h64.n640"] == bars["select.r8.e131072.k512"] == 1.5
    assert bars["index_scores.r8.h32.e65536"] == 1.0
    assert {bars[f"store.{record}"] for record in cpu.RECORDS} == {150}
    assert {bars[f"compress.r{ratio}"] for ratio in (1, 2, 4, 128)} == {100}


def test_command_line(tmp_path):
    app = cpu.typer.Typer()
    app.command()(cpu.main)
    threads = torch.get_num_threads()
    small = ["--case", "store.IndexFp8", "--quick", "--out", str(tmp_path / "none.jsonl")]
    found = CliRunner().invoke(app, [*small, "--json"])
    rows = [json.loads(line) for line in found.stdout.splitlines() if line.startswith("{")]
    assert [tuple(row) for row in rows] == [cpu.KEYS]
    table = CliRunner().invoke(app, small).stdout
    assert "store.IndexFp8" in table and not list(tmp_path.iterdir())
    assert CliRunner().invoke(app, ["--case", "nothing"]).exit_code == 2
    torch.set_num_threads(threads)


def test_boundaries_round_to_even():
    """Every midpoint of two codes goes to the even one, in each encoder."""
    for element, grid in (("E2M1", cpu_peers.E2M1), ("E4M3", cpu_peers.E4M3)):
        middles = (grid[1:] + grid[:-1]) / 2
        even = torch.arange(len(middles)) + torch.arange(len(middles)) % 2
        for encoder in cpu_peers.ENCODERS.values():
            assert torch.equal(encoder[element](middles), even.byte())
            assert torch.equal(encoder[element](grid), torch.arange(len(grid)).byte())
