"""A pytest plugin that looks for one failed assertion.

A test that fails by anything else (an error raised by an op, say) shows that something is wrong,
not that the test would notice it; the run goes on and the next tests are asked. Environment:
MUTANT_LOG names a file of JSON lines: a test that starts, and how it failed. Tests that an earlier
run has started are left out, so a run can be taken up behind a crash. MUTANT_CASE: only tests of
this case from the field.
"""

import json
import os
from pathlib import Path

import hypothesis
import pytest

LOG = Path(os.environ["MUTANT_LOG"])
CASE = os.environ.get("MUTANT_CASE", "")

# An example that fails is enough; the smallest one would take minutes to find.
hypothesis.settings.register_profile(
    "mutants",
    phases=(hypothesis.Phase.explicit, hypothesis.Phase.generate),
    database=None,
    deadline=None,
    derandomize=True,
)


def write(**event: object) -> None:
    with LOG.open("a") as log:
        log.write(json.dumps(event) + "\n")


def read(log: Path) -> list[dict]:
    return [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []


def cases(item: pytest.Item) -> list[str]:
    return [mark.args[0] for mark in item.iter_markers("case")]


def pytest_configure(config):
    hypothesis.settings.load_profile("mutants")


def pytest_collection_modifyitems(config, items):
    started = {event["start"] for event in read(LOG) if "start" in event}
    items[:] = [i for i in items if i.nodeid not in started and (not CASE or CASE in cases(i))]


def pytest_runtest_logstart(nodeid, location):
    write(start=nodeid)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    if report.failed:
        error = call.excinfo.value
        # pytest.fail, which pytest.raises uses, is an assertion too; that the core's module builds
        # is none.
        asserted = isinstance(error, (AssertionError, pytest.fail.Exception))
        asserted &= call.excinfo.traceback[-1].path.name != "core_module.py"
        text = f"{type(error).__name__}: {error}" if str(error) else call.excinfo.exconly()
        write(failed=item.nodeid, asserted=asserted, message=text, cases=cases(item))
        if asserted:
            item.session.shouldstop = "an assertion failed"
    return report
