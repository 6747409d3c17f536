"""tests/sanitize.py: which calls and kernels it reaches, and what it makes of a tool's output."""

import re
from fnmatch import fnmatch
from pathlib import Path

import pytest
import torch

import sanitize
from op_calls import CALLS
from sanitize import OPS, SCENES, Part, judge

SM90 = Path(__file__).resolve().parents[1] / "csrc" / "sm90"
DONE = Part(0, "ran 0.50 a\nran 2.00 b\n", 9.6)


def test_every_call_is_in_one_process():
    assert all(sum(fnmatch(name, ops) for ops in OPS) == 1 for name in CALLS)
    assert all(any(fnmatch(name, glob) for name in CALLS) for _, glob in SCENES)


@pytest.mark.case("Head counts and real dispatch")
def test_every_kernel_is_called(cuda):
    traced = {"activities": [torch.profiler.ProfilerActivity.CUDA], "acc_events": True}
    with torch.profiler.profile(**traced) as profile:
        for ops in OPS:
            for _, call in sanitize.calls(ops):
                call()
        torch.cuda.synchronize()
    ran = " ".join({event.name for event in profile.events()})
    source = "".join(path.read_text() for path in SM90.rglob("*.cu*"))
    kernels = re.findall(r"__global__[^{]*?(\w+_kernel)\(", source)
    kernels.remove("probe_kernel")  # of no records: the call has some
    assert len(kernels) > 20
    left_out = [kernel for kernel in kernels if not re.search(rf"\b{kernel}\b", ran)]
    assert not left_out, left_out


def test_a_clean_tool():
    said = f"memcheck: clean, {2 * len(OPS)} calls, 10 s; slowest b 2.0 s, b 2.0 s, b 2.0 s"
    assert judge("memcheck", [DONE] * len(OPS)) == (True, said)


def test_complaints_of_a_tool():
    found = Part(97, "ran 1.00 a\n========= Error: Race reported\n", 1.0)
    late = Part(None, "ran 1.00 a\n", 240.0)
    sound, said = judge("racecheck", [found, late, *[DONE] * (len(OPS) - 2)])
    assert not sound
    assert f"racecheck: {OPS[0]}: exit code 97 after 1 calls\n========= Error: Race" in said
    assert f"racecheck: {OPS[1]}: not done after {sanitize.TIMEOUT} s, the last call was a" in said


def test_a_refused_device():
    refused = Part(1, "========= Error: Device not supported\n", 1.0)
    sound, said = judge("initcheck", [refused] * len(OPS))
    assert sound and said.endswith("skipped")
