"""Accuracy: runs resume, compare, and report; the command line around them."""

import json
import re
from dataclasses import replace
from html import unescape
from html.parser import HTMLParser

import pytest
from typer.testing import CliRunner

from flash_csa.accuracy import (
    AXES,
    Formula,
    Settings,
    Shape,
    html,
    regressions,
    run,
    runner,
    summary,
)
from flash_csa.accuracy.baseline import load
from flash_csa.cli.accuracy import make_backend
from flash_csa.cli.app import app

SETTINGS = Settings(
    inputs=("gaussian", "planted"),
    contexts=(512, 768),
    experiments=("kv", "index", "reuse", "designs", "retrieval"),
    k=64,
    draws=1,
    shape=Shape(layers=2, heads=2, index_heads=8, rows=8),
)
COMMAND = (
    *("accuracy", "--input", "gaussian", "--experiment", "kv", "--context", "512", "--rows", "8"),
    *("--layers", "2", "--heads", "2", "--topk", "64", "--draws", "1"),
)


pytestmark = pytest.mark.usefixtures("no_truths")


@pytest.fixture(scope="module")
def finished(no_truths, tmp_path_factory):
    return run(SETTINGS, tmp_path_factory.mktemp("run"), make_backend)


def text(result) -> str:
    return json.dumps(result, indent=1)


def test_an_interrupted_run_goes_on_where_it_was(finished, tmp_path):
    """Stopped after three units, the fourth cut short in the file: the same bytes in the end."""
    seen = []

    def stop(unit, resumed):
        seen.append(unit)
        if len(seen) == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(SETTINGS, tmp_path, make_backend, stop)
    with (tmp_path / runner.UNITS_FILE).open("a") as file:
        file.write('{"fingerprint": "cut')
    again = []
    result = run(SETTINGS, tmp_path, make_backend, lambda unit, resumed: again.append(resumed))
    assert again == [True] * 3 + [False] * (len(again) - 3)
    assert text(result) == text(finished)
    third = []
    run(SETTINGS, tmp_path, make_backend, lambda unit, resumed: third.append(resumed))
    assert all(third) and len(third) == len(runner.units(SETTINGS))


def test_other_settings_do_not_resume(finished, tmp_path):
    run(SETTINGS, tmp_path, make_backend)
    resumed = []
    other = replace(SETTINGS, seed=1, experiments=("kv",), contexts=(512,))
    run(other, tmp_path, make_backend, lambda unit, done: resumed.append(done))
    assert not any(resumed)


def test_units():
    names = [unit.label for unit in runner.units(SETTINGS)]
    assert names[0] == "truths, formula" and len(names) == len(set(names))
    assert "retrieval on planted, 768 tokens, formula" in names
    assert "kv on planted, 512 tokens, formula" not in names
    with pytest.raises(ValueError, match="no input holds as many tokens"):
        runner.units(Settings(inputs=("capture",), contexts=(8192,)))
    kernels = runner.units(replace(SETTINGS, backends=("formula", "compiled")))
    assert [u.experiment for u in kernels if u.backend == "compiled"][:2] == ["truths", "stages"]


def test_rows_at_long_contexts():
    unit = runner.Unit("kv", "gaussian", 131_072, "formula")
    assert runner.shape_of(replace(SETTINGS, shape=Shape(rows=64)), unit).rows == 16
    assert runner.shape_of(replace(SETTINGS, device="cuda", shape=Shape(rows=64)), unit).rows == 64
    group = runner.Unit("group", "gaussian", 512, "formula")
    assert runner.shape_of(SETTINGS, group).layers == 20


def test_nothing_regresses_against_itself(finished):
    assert regressions(finished, finished) == []


@pytest.mark.parametrize(
    ("experiment", "metric", "change", "axis"),
    [
        ("kv", "output error", 1.05, "main KV"),
        ("index", "recall", 0.95, "index keys"),
        ("reuse", "recall", 0.95, "reuse"),
    ],
)
def test_a_regression_names_its_axis(finished, experiment, metric, change, axis):
    worse = json.loads(text(finished))
    found = [
        r
        for r in worse["results"]
        if (r["experiment"], r["metric"]) == (experiment, metric)
        and r["bucket"] == "all"
        and r["value"] > 0.01
    ]
    found[-1]["value"] *= change
    assert [r.axis for r in regressions(worse, finished)] == [axis]
    assert regressions(finished, worse) == []  # the other way round it is better
    assert regressions(worse, finished, tolerance=0.1) == []


def test_missing_and_failing_regress(finished):
    check = {"backend": "formula", "axis": "pool", "name": "x", "value": 1.0, "holds": True}
    before = {**finished, "checks": [check]}
    after = {**finished, "results": finished["results"][1:], "checks": [{**check, "holds": False}]}
    assert [r.axis for r in regressions(after, before)] == ["main KV", "pool"]


def test_a_baseline_must_be_comparable(finished):
    other = {**finished, "settings": {**finished["settings"], "seed": 3}}
    with pytest.raises(ValueError, match="baseline's seed must be 0, got 3"):
        regressions(finished, other)
    with pytest.raises(ValueError, match="none of this run's tables"):
        regressions(finished, {**finished, "results": []})
    fewer = [r for r in finished["results"] if r["experiment"] == "kv"]
    assert regressions({**finished, "results": fewer}, finished) == []


def test_baselines_are_read(tmp_path):
    for content, expected in (("{", "cannot read"), ("[]", "must be a results.json")):
        (tmp_path / "b.json").write_text(content)
        with pytest.raises(ValueError, match=expected):
            load(tmp_path / "b.json")


class References(HTMLParser):
    """Every attribute that could make a browser fetch something."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self.tags: list[str] = []

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.found += [v for k, v in attributes if k in ("src", "href", "data", "action", "srcset")]


def test_html_opens_without_a_network(finished):
    page = html.page(finished)
    parser = References()
    parser.feed(page)
    assert all(reference.startswith("#") for reference in parser.found)
    assert not {"script", "link", "img", "iframe", "object"} & set(parser.tags)
    assert "http" not in page and "@import" not in page
    assert not [url for url in re.findall(r"url\(([^)]*)\)", page) if not url.startswith("#")]
    assert parser.tags.count("svg") == 6  # all but the decode figure
    ids = re.findall(r'\bid="([^"]+)"', page)
    assert len(set(ids)) == len(ids)
    assert {reference[1:] for reference in parser.found} <= set(ids)


def test_html_tells_what_was_fixed_and_the_samples(finished):
    page = unescape(html.page(finished))
    for name in SETTINGS.experiments:
        assert finished["experiments"][name]["held"] in page
    assert ">rows</th>" in page and "independent normal values" in page


def test_html_without_matplotlib(finished, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
    page = html.page(finished)
    assert "<svg" not in page and "need matplotlib" in page


def test_lengths():
    def answered(context, value, variant="x"):
        return {"experiment": "retrieval", "metric": "answered", "bucket": "all", "value": value,
                "context": context, "variant": variant, "backend": "formula"}  # fmt: skip

    shares = [(1024, 1.0), (4096, 1.0), (16384, 0.95), (65536, 0.7), (131072, 0.95)]
    found = summary.lengths({"results": [answered(*share) for share in shares]})
    assert found == [
        {
            "variant": "x",
            "backend": "formula",
            "declared": 1_048_576,
            "longest_measured": 131_072,
            "failure_free": 4096,
            "effective": 16_384,
        }
    ]
    assert summary.lengths({"results": [answered(1024, 0.5)]})[0]["effective"] == 0


class Coarse(Formula):
    """Main FP4 in larger groups than it says."""

    def store(self, rows, variant):
        if variant.element == "E2M1" and variant.group == 16:
            made = super().store(rows, replace(variant, group=64))
            return replace(made, variant=variant)
        return super().store(rows, variant)


def invoke(*arguments: str):
    return CliRunner().invoke(app, [str(a) for a in arguments])


def test_command(tmp_path):
    first = invoke(*COMMAND, "--out", tmp_path / "a")
    assert first.exit_code == 0, first.output
    assert "a. Format of main KV: gaussian, 512 tokens, formula" in first.stdout
    assert "held fixed: selections" in first.stdout and "E2M1 / E4M3 per 16" in first.stdout
    result = json.loads((tmp_path / "a" / "results.json").read_text())
    printed = invoke(*COMMAND, "--out", tmp_path / "a", "--json")
    assert json.loads(printed.stdout) == result
    assert (tmp_path / "a" / "report.html").read_text().startswith("<!DOCTYPE html>")
    same = invoke(*COMMAND, "--out", tmp_path / "a", "--baseline", tmp_path / "a" / "results.json")
    assert same.exit_code == 0 and "0 results worse than the baseline" in same.stdout


def test_command_guards_a_change(tmp_path, monkeypatch):
    """A worse run than the baseline's: exit code 1, and the axis."""
    assert invoke(*COMMAND, "--out", tmp_path / "a").exit_code == 0
    monkeypatch.setattr("flash_csa.cli.accuracy.FORMULA", Coarse())
    command = (*COMMAND, "--out", tmp_path / "b", "--baseline", tmp_path / "a" / "results.json")
    worse = invoke(*command)
    assert worse.exit_code == 1
    assert re.search(r"\d+ results worse than the baseline: main KV\n", worse.stdout)
    assert "regressed; axes: main KV" in (tmp_path / "b" / "report.html").read_text()


def test_command_exits_1_on_a_failed_check(tmp_path):
    command = (*COMMAND, "--out", tmp_path, "--backend", "test_accuracy_run:Coarse")
    failed = invoke(*command)
    assert failed.exit_code == 1
    assert "FAILS  main KV: E2M1 / E4M3 per 16, values that differ" in failed.stdout
    headline = failed.stdout.index(
        "first to fail in the order of the data flow: main KV. Not covered"
    )
    assert headline < failed.stdout.index("FAILS  main KV")
    page = (tmp_path / "report.html").read_text()
    assert (
        "in the order of the data flow: main KV." in page
        and "Kernel error beside format error" in page
    )


def test_kernels(tmp_path):
    """Through the ops: every stage agrees, and kernel error stands apart from format error."""
    found = invoke(*COMMAND, "--kernels", "--experiment", "reuse", "--out", tmp_path)
    assert found.exit_code == 0, found.output
    result = json.loads((tmp_path / "results.json").read_text())
    assert {check["backend"] for check in result["checks"]} == {"compiled"}
    count, level = len(result["checks"]), result["instructions"]
    assert f"{count} of {count} checks of compiled hold ({level}). Not covered: " in found.stdout
    stages = summary.stages(result)
    assert [axis for axis, _, _ in stages] == list(AXES)
    assert sum(held for _, held, _ in stages) == count
    shown = [found.stdout.index(f"{n:3} of {n:3}  {axis}\n") for axis, n, _ in stages]
    assert shown == sorted(shown)
    beside = summary.kernel_errors(result)
    assert {r["experiment"] for r in beside} == {"kv", "reuse"}
    assert all(abs(r["difference"]) < 2e-3 for r in beside)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("--experiment", "speed"), "--experiment must be one of kv, index"),
        (("--input", "absent.safetensors"), "cannot read absent.safetensors"),
        (("--baseline", "absent.json"), "cannot read absent.json"),
        (("--context", "8192", "--input", "capture"), "no input holds as many tokens"),
        (("--context", "8"), "--context"),
        (("--backend", "nowhere:Nothing"), "--backend nowhere:Nothing"),
        (("--backend", "json:JSONDecoder"), "a subclass of accuracy.Formula, got json:JSON"),
        (("--backend", "json:loads"), "--backend json:loads: loads() missing 1 required"),
    ],
)
def test_bad_input_is_one_line(arguments, expected, tmp_path):
    result = invoke("accuracy", "--out", tmp_path, *arguments)
    assert result.exit_code == 2 and result.stdout == ""
    assert expected in result.stderr and result.stderr.count("\n") == 1
    assert result.stderr.startswith(("flash_csa.accuracy: ", "flash_csa: Invalid value"))


def test_accuracy_needs_no_command_line():
    """The library alone: no typer, rich, matplotlib or safetensors until they are asked for."""
    import subprocess
    import sys

    code = "import sys, flash_csa.accuracy, flash_csa.accuracy.html; print(sorted(sys.modules))"
    loaded = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert not re.search(r"'(typer|rich|matplotlib|safetensors)'", loaded.stdout)


def test_default_settings():
    """(a) to (d) at 4096 tokens on the shipped capture."""
    default = Settings()
    assert default.contexts == (4096,) and default.inputs[0] == "capture"
    assert default.experiments[:4] == ("kv", "index", "pool", "reuse")
