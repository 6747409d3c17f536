"""python tests/sanitize.py: every op under compute-sanitizer's four tools, on small shapes.

    python tests/sanitize.py [TOOL ...]     memcheck, racecheck, synccheck, initcheck; default all
    python tests/sanitize.py --calls GLOB   only the calls, as the tools run them

A tool runs some processes at once, each some of the ops. Says so, and passes, where the sanitizer
is missing or refuses the device.
"""

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from fnmatch import fnmatch

TOOLS = ("racecheck", "synccheck", "memcheck", "initcheck")  # the slowest first
FOUND = 97  # exit code of a tool that found an error
TIMEOUT = 150  # seconds of a process: most take 40
BARRIERS = 256  # of a block, at most
REFUSALS = ("Device not supported", "not supported on", "Unable to find", "LibraryNotLoaded")
OPS = ("compress*", "attend*", "index_scores*", "index_select*", "[!cai]*")  # of a process
SEVENTY = {"start": tuple(range(70)), "rows": (1,) * 70, "pages": 9}  # more rows than half the SMs
THIRTY_FOUR = {"start": tuple(range(34)), "rows": (1,) * 34, "pages": 9}
SIXTY = {"start": tuple(range(60)), "rows": (1,) * 60, "pages": 9}
LONG = {"heads": 64, "selected": 330}  # more tiles than places for them in shared memory
ONLY_ROW = {"start": (1000,), "rows": (1,), "padding": 0, "pages": 126}
FEW_ROWS = {"start": (700, 3, 260, 90), "rows": (1,) * 4, "pages": 90}  # that share no keys
SCENES = (  # arguments of op_calls.Scene, and the calls that they are for
    ({}, "*"),  # the table's own
    ({"start": (0,), "rows": (17,), "padding": 48, "pages": 3}, "*"),  # a chunk
    ({"start": tuple(range(33)), "rows": (1,) * 33, "pages": 5}, "*"),  # many decode rows
    ({"start": (0, 0), "rows": (0, 0), "padding": 2}, "*"),  # nothing at all
    ({"start": (0,) * 33, "rows": (64,) * 33, "pages": 8}, "compress-*"),  # a long step
    ({"start": (0,), "rows": (300,), "pages": 3}, "index_select-restrict"),  # a pool from a scan
    ({"start": (8190,), "rows": (2,), "pages": 1024}, "*select-*"),  # rows for clusters
    ({"index_heads": 64}, "index_*"),
    (ONLY_ROW, "index_*"),
    (ONLY_ROW | {"index_heads": 32}, "index_*"),
    (FEW_ROWS | {"index_heads": 32}, "index_s*"),  # index_scores, index_select
    (FEW_ROWS | {"index_heads": 64}, "index_s*"),
    ({"heads": 64}, "attend-*"),
    ({"start": tuple(range(31)), "rows": (1,) * 31, "pages": 5, "heads": 64}, "attend-*"),
    (SEVENTY | {"heads": 8}, "attend-*"),
    (SEVENTY | {"heads": 16}, "attend-*"),
    (SEVENTY | {"heads": 32}, "attend-*"),
    (SEVENTY | {"heads": 64}, "attend-*"),
    (SEVENTY | {"heads": 80}, "attend-*"),
    (THIRTY_FOUR | LONG, "attend-selection"),
    (SIXTY | LONG, "attend-selection"),
)


def find_sanitizer() -> str | None:
    """The program: on the PATH, or in the toolkit."""
    toolkit = os.environ.get("CUDA_HOME", "/usr/local/cuda")
    path = os.pathsep.join([os.environ["PATH"], os.path.join(toolkit, "bin")])
    return shutil.which("compute-sanitizer", path=path)


def calls(glob: str) -> Iterator[tuple[str, object]]:
    """The calls of every scene whose names match, on the GPU, op by op."""
    from op_calls import CALLS, Scene

    for name, build in CALLS.items():
        if not fnmatch(name, glob):
            continue
        for scene, wanted in SCENES:
            if fnmatch(name, wanted):
                yield name, build(Scene("cuda", **scene))


def run_calls(glob: str) -> None:
    """Runs them, and says what each took."""
    import torch

    for name, call in calls(glob):
        torch.cuda.synchronize()
        started = time.monotonic()
        call()
        torch.cuda.synchronize()
        print(f"ran {time.monotonic() - started:.2f} {name}", flush=True)


@dataclass(frozen=True)
class Part:
    """What one process of a tool did."""

    code: int | None  # None: it was not done in time
    output: str
    seconds: float

    @property
    def ran(self) -> list[tuple[float, str]]:
        """Seconds and name of each call that ended."""
        lines = [line.split() for line in self.output.splitlines() if line[:4] == "ran "]
        return [(float(seconds), name) for _, seconds, name in lines]


def run_part(program: str, tool: str, glob: str) -> Part:
    command = [program, "--tool", tool, "--error-exitcode", str(FOUND), "--print-limit", "20"]
    if tool == "synccheck":  # its own count may be too low: launches then fail
        command += ["--num-cuda-barriers", str(BARRIERS)]
    command += [sys.executable, os.path.abspath(__file__), "--calls", glob]
    # A block of its own for every tensor: an access beyond one tensor is an access beyond a block.
    env = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    started = time.monotonic()
    merged = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    try:
        done = subprocess.run(command, env=env, text=True, timeout=TIMEOUT, **merged)
        code, output = done.returncode, done.stdout
    except subprocess.TimeoutExpired as error:
        code, output = None, (error.stdout or b"").decode()
    return Part(code, output, time.monotonic() - started)


def judge(tool: str, parts: list[Part]) -> tuple[bool, str]:
    """Whether a tool has no complaint, and what it said."""
    ran = [call for part in parts for call in part.ran]
    if not ran and any(refusal in part.output for part in parts for refusal in REFUSALS):
        return True, f"{tool}: compute-sanitizer refuses this device: skipped"
    said = []
    for glob, part in zip(OPS, parts, strict=True):
        if part.code is None:
            last = part.ran[-1][1] if part.ran else "none"
            said.append(f"{tool}: {glob}: not done after {TIMEOUT} s, the last call was {last}")
        elif part.code != 0:
            lines = [line for line in part.output.splitlines() if line[:4] != "ran "]
            said += [f"{tool}: {glob}: exit code {part.code} after {len(part.ran)} calls"]
            said += lines[-60:]
    slowest = ", ".join(f"{name} {seconds:.1f} s" for seconds, name in sorted(ran)[:-4:-1])
    text = f"{len(ran)} calls, {max(part.seconds for part in parts):.0f} s; slowest {slowest}"
    if said:
        return False, "\n".join([*said, f"{tool}: {text}"])
    return True, f"{tool}: clean, {text}"


def main(arguments: list[str]) -> int:
    if arguments[:1] == ["--calls"]:
        run_calls(arguments[1])
        return 0
    program = find_sanitizer()
    if program is None:
        print("sanitize: there is no compute-sanitizer here: skipped")
        return 0
    tools = arguments or TOOLS
    clean = True
    with ThreadPoolExecutor(len(tools) * len(OPS)) as pool:
        started = {
            tool: [pool.submit(run_part, program, tool, glob) for glob in OPS] for tool in tools
        }
        for tool, parts in started.items():
            sound, text = judge(tool, [part.result() for part in parts])
            print(f"sanitize: {text}", flush=True)
            clean &= sound
    return 0 if clean else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
