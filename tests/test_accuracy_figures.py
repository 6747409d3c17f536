"""Accuracy: the figures of the README and of docs/accuracy.md are those of a run."""

import json
from pathlib import Path

import pytest

from flash_csa.accuracy import Settings, regressions, run
from flash_csa.cli.accuracy import make_backend

ROOT = Path(__file__).resolve().parent.parent
COMMITTED = json.loads((ROOT / "bench" / "results" / "accuracy.json").read_text())


def value(experiment: str, variant: str, metric: str) -> float:
    (found,) = [
        r["value"]
        for r in COMMITTED["results"]
        if (r["experiment"], r["variant"], r["metric"]) == (experiment, variant, metric)
    ]
    return found


def test_committed_run_is_the_default_one():
    default = Settings()
    assert COMMITTED["settings"]["contexts"] == list(default.contexts)
    assert COMMITTED["settings"]["experiments"] == list(default.experiments)
    assert COMMITTED["settings"]["inputs"] == list(default.inputs)
    assert all(check["holds"] for check in COMMITTED["checks"])
    assert {r["bucket"] for r in COMMITTED["results"]} == {"all"}


def test_findings_are_the_committed_figures():
    """Every figure of the first findings, as the document rounds it."""
    text = (ROOT / "docs" / "accuracy.md").read_text()
    findings = " ".join(text[text.index("## Findings") :].split())
    for sentence in (
        f"FP4 main KV costs {value('kv', 'E2M1 / E4M3 per 16', 'output error'):.1%}",
        f"FP8 {value('kv', 'E4M3 / UE8M0 per 32', 'output error'):.1%}",
        f"Its values err by {value('kv', 'E2M1 / E4M3 per 16', 'value error'):.2%}",
        f"UE8M0 scales cost {value('kv', 'E2M1 / UE8M0 per 16', 'output error'):.1%}",
        f"queries change {value('index', 'FP4', 'differing slots'):.1%} of the slots",
        f"the output moves by {value('index', 'FP4', 'output error'):.1%}",
        f"keeps {value('pool', '1/4 of the context, blocks of 8', 'recall'):.0%}",
        f"costs {value('reuse', 'Reuse only', 'output error'):.1%} of the output",
    ):
        assert sentence.replace("%", " %") in findings, sentence


@pytest.mark.slow
def test_a_new_run_gives_the_committed_figures(tmp_path):
    """A minute: the default run, neither worse nor better than the committed one."""
    settings = Settings()
    again = run(settings, tmp_path, make_backend)
    again["results"] = [r for r in again["results"] if r["bucket"] == "all"]
    assert regressions(again, COMMITTED) == []
    assert regressions(COMMITTED, again) == []
