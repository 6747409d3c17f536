"""Accuracy: what happens to bad folders, files and baselines."""

import fcntl
import json
import sys
from dataclasses import replace

import pytest
import torch
from typer.testing import CliRunner

from flash_csa.accuracy import Settings, Shape, inputs, regressions, run, runner
from flash_csa.accuracy.baseline import load
from flash_csa.cli.accuracy import make_backend
from flash_csa.cli.app import app

SETTINGS = Settings(
    inputs=("gaussian",),
    contexts=(256,),
    experiments=("kv",),
    k=32,
    draws=1,
    shape=Shape(layers=2, heads=2, index_heads=8, rows=4),
)
COMMAND = (
    *("accuracy", "--input", "gaussian", "--experiment", "kv", "--context", "256", "--rows", "4"),
    *("--layers", "2", "--heads", "2", "--topk", "32", "--draws", "1"),
)


pytestmark = pytest.mark.usefixtures("no_truths")


@pytest.fixture(scope="module")
def finished(no_truths, tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    return folder, run(SETTINGS, folder, make_backend)


def refused(*arguments) -> str:
    """The one line on stderr."""
    result = CliRunner().invoke(app, [str(a) for a in (*COMMAND, *arguments)])
    assert result.exit_code == 2 and result.stdout == "", result.output
    assert result.stderr.count("\n") == 1
    return result.stderr


@pytest.mark.parametrize(
    "line",
    [b'{"fingerprint": "x', b"5", b"{}", b"\xff\xfe", b"", b"[" * 20, b'{"fingerprint": "old"}'],
)
def test_foreign_lines_do_not_count(finished, line, tmp_path):
    folder, result = finished
    kept = (folder / runner.UNITS_FILE).read_bytes()
    (tmp_path / runner.UNITS_FILE).write_bytes(line + b"\n" + kept + b"cut")
    resumed = []
    again = run(SETTINGS, tmp_path, make_backend, lambda unit, done: resumed.append(done))
    assert all(resumed) and json.dumps(again) == json.dumps(result)
    assert (tmp_path / runner.UNITS_FILE).read_bytes() == line + b"\n" + kept


def test_a_damaged_unit_is_measured_again(finished, tmp_path):
    folder, result = finished
    lines = (folder / runner.UNITS_FILE).read_bytes().splitlines(keepends=True)
    (tmp_path / runner.UNITS_FILE).write_bytes(b"".join([*lines[:-1], lines[-1][:99], b"\n"]))
    resumed = []
    again = run(SETTINGS, tmp_path, make_backend, lambda unit, done: resumed.append(done))
    assert resumed == [True] * (len(lines) - 1) + [False]
    assert json.dumps(again) == json.dumps(result)


def test_one_run_a_folder(finished):
    folder, _ = finished
    path = folder / runner.UNITS_FILE
    before = path.read_bytes()
    with path.open("rb") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        assert "another run is writing to" in refused("--out", folder)
    assert path.read_bytes() == before
    run(SETTINGS, folder, make_backend)


def test_folders_that_cannot_be(tmp_path):
    (tmp_path / "file").write_text("mine")
    (tmp_path / "units" / runner.UNITS_FILE).mkdir(parents=True)
    (tmp_path / "results" / "results.json").mkdir(parents=True)
    for name in ("file", "file/below", "units", "results"):
        assert "cannot write" in refused("--out", tmp_path / name)
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.parametrize("device", ["tpu", "meta", "cpu:0", "", "cuda:99"])
def test_devices_that_are_not_there(device, tmp_path):
    line = refused("--device", device, "--out", tmp_path / "x")
    present = "cpu or a CUDA device" if torch.cuda.is_available() else "cpu (there is no GPU here)"
    assert f"--device must be {present}, got {device!r}" in line
    assert not (tmp_path / "x").exists()


def test_nothing_to_measure(tmp_path):
    with pytest.raises(ValueError, match="none of the experiments measures these inputs"):
        runner.units(replace(SETTINGS, inputs=("planted",)))
    for option in ("--seed", "--topk"):
        assert option in refused(option, 2**64, "--out", tmp_path / "x")
    assert not (tmp_path / "x").exists()


def test_inputs_of_one_name(tmp_path):
    """Their results would be under one name."""
    from safetensors.torch import save_file

    save_file({"hidden_states": torch.randn(256, 8)}, tmp_path / "gaussian.safetensors")
    with pytest.raises(ValueError, match="names of their own, got two gaussian"):
        runner.units(replace(SETTINGS, inputs=("gaussian", str(tmp_path / "gaussian.safetensors"))))
    save_file({"layers.x.hidden_states": torch.randn(256, 8)}, tmp_path / "b.safetensors")
    with pytest.raises(ValueError, match="must hold a tensor hidden_states"):
        inputs.length(str(tmp_path / "b.safetensors"))


def test_an_option_twice_is_once(finished, tmp_path):
    twice = ("--input", "gaussian", "--experiment", "kv", "--backend", "formula")
    made = CliRunner().invoke(app, [*COMMAND, *twice, "--out", str(tmp_path)])
    assert made.exit_code == 0
    result = json.loads((tmp_path / "results.json").read_text())
    assert len(result["results"]) == len(finished[1]["results"])


def test_the_code_of_a_back_end_counts(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "own_back_end.py").write_text("A = 1\n")
    settings = replace(SETTINGS, backends=("formula", "own_back_end:A"))
    before = runner.fingerprint(settings)
    assert runner.fingerprint(settings) == before
    (tmp_path / "own_back_end.py").write_text("A = 2\n")
    assert runner.fingerprint(settings) != before
    assert "own_back_end" not in sys.modules
    plain = runner.fingerprint(SETTINGS)
    monkeypatch.setattr(torch, "__version__", "0")
    assert runner.fingerprint(SETTINGS) != plain


def _without(key):
    def change(result):
        del result[key]

    return change


@pytest.mark.parametrize(
    "change",
    [
        *map(_without, ("experiments", "results", "checks", "settings")),
        lambda r: r["results"][0].pop("metric"),
        lambda r: r["results"][0].update(metric="speed"),
        lambda r: r["results"][0].update(value="x"),
        lambda r: r["results"][0].update(variant=[]),
        lambda r: r["settings"].pop("k"),
        lambda r: r.update(results=5),
        lambda r: r.update(checks=[{}]),
    ],
)
def test_baselines_of_another_kind(finished, change, tmp_path):
    made = json.loads(json.dumps(finished[1]))
    change(made)
    (tmp_path / "b.json").write_text(json.dumps(made))
    with pytest.raises(ValueError, match=r"must be a results\.json"):
        load(tmp_path / "b.json")


def test_a_baseline_is_compared_before_anything_is_measured(finished, tmp_path):
    made = json.loads(json.dumps(finished[1]))
    made["settings"]["k"] = 3
    (tmp_path / "b.json").write_text(json.dumps(made))
    line = refused("--baseline", tmp_path / "b.json", "--out", tmp_path / "x")
    assert "baseline's k must be 32, got 3" in line
    assert not (tmp_path / "x").exists()


def test_values_and_rows_that_are_lost_regress(finished):
    """A row that is NaN is in no mean, a mean that is not finite is None."""
    _, before = finished
    for change, what in (({"value": None}, "all"), ({"n": 1}, "all, rows")):
        after = json.loads(json.dumps(before))
        place = next(r for r in after["results"] if r["bucket"] == "all")
        place.update(change)
        found = regressions(after, before)
        assert [r.what.rpartition("error, ")[2] for r in found] == [what]
        assert regressions(before, after) == []


HIDDEN = {"hidden_states": torch.ones(300, 8)}
EXACT = {
    "kv": torch.ones(300, 512),
    "positions": torch.arange(200, 204, dtype=torch.int32),
    "key_weight": torch.ones(128, 512),
    "layers.0.q": torch.ones(4, 2, 512),
    "layers.0.index_q": torch.ones(4, 2, 128),
    "layers.0.index_weights": torch.ones(4, 2),
}


@pytest.mark.parametrize(
    ("tensors", "expected"),
    [
        ({"hidden_states": torch.ones(300)}, r"hidden states of \[300, width\], got \[300\]"),
        ({"hidden_states": torch.ones(2, 300, 8)}, r"hidden states of"),
        ({"hidden_states": torch.ones(300, 0)}, r"hidden states of"),
        ({f"layers.{n}.hidden_states": torch.ones(300 + n, 8) for n in (0, 1)}, "hidden states of"),
        ({**EXACT, "kv": torch.ones(300)}, r"kv of \[300, 512\], got \[300\]"),
        ({**EXACT, "gate": torch.ones(3, 512)}, "gate of"),
        ({**EXACT, "key_weight": torch.ones(64, 512)}, "key_weight of"),
        ({**EXACT, "norm_weight": torch.ones(3)}, "norm_weight of"),
        ({**EXACT, "positions": torch.arange(-1, 3)}, "positions that ascend"),
        ({**EXACT, "positions": torch.tensor([4, 3, 2, 1])}, "positions that ascend"),
        ({**EXACT, "positions": EXACT["positions"] + 90}, "two positions below 256, got 0"),
        ({**EXACT, "layers.0.sink": torch.ones(7)}, r"layers.0.sink of \[2\], got \[7\]"),
    ],
)
def test_captures_of_another_shape(tensors, expected, tmp_path):
    from safetensors.torch import save_file

    for whole in (HIDDEN, EXACT):
        save_file(whole, tmp_path / "c.safetensors")
        inputs.make(str(tmp_path / "c.safetensors"), 256, SETTINGS.shape, 0, "cpu")
    save_file(tensors, tmp_path / "c.safetensors")
    with pytest.raises(ValueError, match=expected):
        inputs.make(str(tmp_path / "c.safetensors"), 256, SETTINGS.shape, 0, "cpu")
