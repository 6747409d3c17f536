"""python tests/sanitize.py: every op under compute-sanitizer's four tools, on small shapes.

    python tests/sanitize.py [TOOL ...]     memcheck, racecheck, synccheck, initcheck; default all
    python tests/sanitize.py --calls        only the calls, as the tools run them

Says so, and passes, where the sanitizer is missing or refuses the device.
"""

import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor, as_completed

TOOLS = ("memcheck", "racecheck", "synccheck", "initcheck")
FOUND = 97  # exit code of a tool that found an error
TIMEOUT = 420  # seconds
# Warps of many_heads_kernel meet at named barriers from different places in the code, some of them
# arriving without waiting (bar.arrive): racecheck and synccheck do not follow that; repeated runs
# compare bits instead (tests/test_attend_repeats.py). In few_heads_kernel one lane arrives for its
# warp, which racecheck does not follow either.
UNFOLLOWED = {
    "racecheck": ("many_heads_kernel", "few_heads_kernel"),
    "synccheck": ("many_heads_kernel",),
}
REFUSALS = ("Device not supported", "not supported on", "Unable to find", "LibraryNotLoaded")
SCENES = (  # requests' starts and rows: the table's own, a chunk, many decode rows, nothing at all
    {},
    {"start": (0,), "rows": (17,), "padding": 48, "pages": 3},
    {"start": tuple(range(33)), "rows": (1,) * 33, "pages": 5},
    {"start": (0, 0), "rows": (0, 0), "padding": 2},
)


def find_sanitizer() -> str | None:
    """The program: on the PATH, or in the toolkit."""
    toolkit = os.environ.get("CUDA_HOME", "/usr/local/cuda")
    path = os.pathsep.join([os.environ["PATH"], os.path.join(toolkit, "bin")])
    return shutil.which("compute-sanitizer", path=path)


def run_calls() -> None:
    """Every call of the table in every scene, on the GPU."""
    import torch

    from op_calls import CALLS, Scene

    for scene in SCENES:
        for name, build in CALLS.items():
            call = build(Scene("cuda", **scene))
            call()
            torch.cuda.synchronize()
            print(f"ran {name}", flush=True)


def sanitize(program: str, tool: str) -> tuple[bool, str]:
    """Whether a tool has no complaint, and what it said."""
    command = [program, "--tool", tool, "--error-exitcode", str(FOUND)]
    for kernel in UNFOLLOWED.get(tool, ()):
        command += ["--kernel-name-exclude", f"kernel_substring={kernel}"]
    command += ["--print-limit", "20", sys.executable, os.path.abspath(__file__), "--calls"]
    # A block of its own for every tensor: an access beyond one tensor is an access beyond a block.
    env = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    try:
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=TIMEOUT)
    except subprocess.TimeoutExpired as error:
        output = error.stdout.decode() if isinstance(error.stdout, bytes) else error.stdout or ""
        calls = [line.removeprefix("ran ") for line in output.splitlines() if line[:4] == "ran "]
        last = f", the last of them {calls[-1]}" if calls else ""
        return False, f"{tool}: not done after {TIMEOUT} s, {len(calls)} calls ran{last}"
    output = done.stdout + done.stderr
    ran = done.stdout.count("ran ")
    if ran == 0 and any(refusal in output for refusal in REFUSALS):
        return True, f"{tool}: compute-sanitizer refuses this device: skipped"
    if done.returncode == 0:
        left_out = ", ".join(UNFOLLOWED.get(tool, ()))
        return True, f"{tool}: clean, {ran} calls" + (f" (without {left_out})" if left_out else "")
    complaints = [line for line in output.splitlines() if not line.startswith("ran ")]
    text = "\n".join(complaints[-60:])
    return False, f"{tool}: exit code {done.returncode} after {ran} calls\n{text}"


def main(arguments: list[str]) -> int:
    if arguments == ["--calls"]:
        run_calls()
        return 0
    program = find_sanitizer()
    if program is None:
        print("sanitize: there is no compute-sanitizer here: skipped")
        return 0
    tools = arguments or TOOLS
    clean = True
    with ThreadPoolExecutor(len(tools)) as pool:
        for done in as_completed([pool.submit(sanitize, program, tool) for tool in tools]):
            sound, text = done.result()
            print(f"sanitize: {text}", flush=True)
            clean &= sound
    return 0 if clean else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
