"""A pytest plugin that looks for one failed assertion.

A test that fails by anything else (an error raised by an op, say) shows that something is wrong,
not that the test would notice it; the run goes on and the next tests are asked. Environment:
MUTANT_LOG names a file of JSON lines: a test that starts, and how it failed. Tests that an earlier
run has started are left out, so a run can be taken up behind a crash. MUTANT_CASE: only tests of
this case from the field. MUTANT: the package's folder and the fault that it must have.
"""

import json
import os
from pathlib import Path

import hypothesis
import pytest
import torch

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
    import flash_csa

    found = f"{Path(flash_csa.__file__).parent} {flash_csa._C.MUTANT}"
    if found != os.environ["MUTANT"]:
        raise pytest.UsageError(f"tests would import {found}")


def pytest_collection_modifyitems(config, items):
    started = {event["start"] for event in read(LOG) if "start" in event}
    items[:] = [i for i in items if i.nodeid not in started and (not CASE or CASE in cases(i))]


def pytest_runtest_logstart(nodeid, location):
    write(start=nodeid)


def device_is_lost() -> bool:
    """After a kernel has crashed, every call to CUDA of its process fails."""
    if torch.cuda.is_initialized():
        try:
            torch.cuda.synchronize()
        except RuntimeError:
            return True
    return False


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
        elif device_is_lost():
            item.session.shouldstop = "no kernel runs in this process any more"
    return report
