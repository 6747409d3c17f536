"""Asks for every fault of tests/mutants which test notices it, and writes docs/mutants.md.

usage: make mutants [ARGS="--only 101,scores --jobs 2 --fresh"]      make gpu-mutants [ARGS=...]

Each worker has a tree of its own under build/mutants: this checkout with a patched csrc. There one
fault after the other is built and the tests run until the first assertion fails: first the one
that failed last time (kills/*.json; one of the case from the field, if the fault repeats any) or
that the fault names, then those of the case, those of the fault's stage, and all others. Faults of
kernels are for the tests of their stage to notice: no others are asked. Only a failed assertion is
a kill; a crash or an error that a test does not expect is none, and a fault whose tests took too
long is not said to have survived them. Number 0 is the control: no fault, and no test may fail.
"""

import argparse
import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue

from rich.console import Console
from rich.markup import escape
from rich.table import Table

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests"))

from mutants.build import Library  # noqa: E402
from mutants.matrix import DOC, document, read_kills, record, short  # noqa: E402
from mutants.mutant import Mutant  # noqa: E402
from mutants.mutants import LISTS  # noqa: E402

CONTROL = Mutant(0, "control", "no fault", "", "", "", "the tests as they are")
LEFT_OUT = ("build", "dist", "csrc", "*.so", "*.egg-info", "__pycache__", ".*")
UNRELATED = (  # to the faults: what judges sources and documents, and whether these compile
    "tests/test_mutants.py",
    "tests/test_architecture.py",
    "tests/test_cases.py",
    "tests/test_readme.py",
    "tests/test_packaging.py",  # judges folders, which a mutant's tree has of its own
    "tests/core/test_core.py::test_header_compiles_alone",
)
STAGE_TESTS = {  # asked first
    "codec": ("test_numerics.py", "test_store.py"),
    "causal": ("test_causal.py", "test_step.py", "test_schedule.py", "test_select.py"),
    "compressor": ("test_compress.py", "test_compress_steps.py", "test_numerics.py"),
    "scores": ("test_scoring.py", "test_index.py", "test_store.py"),
    "select": ("test_select.py", "test_scoring.py"),
    "pool": ("test_pool.py", "test_select.py"),
    "attend": ("test_attend.py", "test_attend_repeats.py"),
    "step": ("test_step.py", "test_schedule.py", "test_store.py"),
    "merge": ("test_merge.py", "test_pool.py"),
}
ALSO = {  # tests of a CUDA stage that have another name than it
    "step": ("test_schedule.py",),
    "select": ("test_pool.py", "test_index_shapes.py"),
    "attend": ("test_merge.py",),
}
OPS = {  # of a CUDA stage, in the names of tests: those that are not its own name
    "store": ("load", "quantize"),
    "step": ("schedule",),
    "select": ("pool", "merge_selections"),
    "attend": ("merge",),
}
OUT_OF_TIME = "out of time"
UNKNOWN = {"outcome": OUT_OF_TIME}
CRASHES = 3  # tests that may crash before the run is given up


def digest(device: str) -> str:
    """Of what decides a result. Kernels and tests of CUDA alone decide none of the CPU's."""
    sha = hashlib.sha256()
    for folder in ("csrc", "python", "tests"):
        for path in sorted((ROOT / folder).rglob("*")):
            cuda = "sm90" in path.parts or "cuda" in path.stem
            if path.suffix in (".h", ".cpp", ".cu", ".cuh", ".py", ".npz"):
                sha.update(b"" if cuda and device == "cpu" else path.read_bytes())
    return sha.hexdigest()


def environment(device: str) -> dict[str, str]:
    cpu = {"FLASH_CSA_CPU_ONLY": "1", "CUDA_VISIBLE_DEVICES": ""} if device == "cpu" else {}
    return {**os.environ, **cpu}


class Worker:
    """A tree, and the tests in it."""

    def __init__(self, number: int, device: str, library: Library, timeout: float):
        self.device, self.library, self.timeout = device, library, timeout
        self.tree = library.folder.parent / f"tree{number}"
        self.log = self.tree / "log"
        for folder in ("python", "tests"):
            shutil.rmtree(self.tree / folder, ignore_errors=True)
        ignored = shutil.ignore_patterns(*LEFT_OUT)
        shutil.copytree(ROOT, self.tree, ignore=ignored, dirs_exist_ok=True)
        inherited = environment(device)
        paths = [str(self.tree / "python"), str(self.tree / "tests")]
        paths += filter(None, [inherited.get("PYTHONPATH")])
        self.environment = {
            **inherited,
            "PYTHONPATH": os.pathsep.join(paths),
            "MUTANT_LOG": str(self.log),
        }

    def test(self, mutant: Mutant, arguments: list[str], case: str, seconds: float) -> str | None:
        """Runs tests (of a case) that have not been started. None, or why the run ended early."""
        command = [sys.executable, "-m", "pytest", "-p", "mutants.watch", "-p", "no:cacheprovider"]
        command += ["-q", "--no-header", "--tb=no", "--hypothesis-seed=0"]
        command += [f"--device={self.device}", *(f"--deselect={test}" for test in UNRELATED)]
        about = {"MUTANT_CASE": case, "MUTANT": f"{self.tree}/python/flash_csa {mutant.number}"}
        try:
            done = subprocess.run(
                [*command, *arguments],
                cwd=self.tree,
                env={**self.environment, **about},
                capture_output=True,
                text=True,
                timeout=max(seconds, 1),
            )
        except subprocess.TimeoutExpired:
            return "timeout"
        if done.returncode in (0, 1, 5):  # passed, failed, nothing left to run
            return None
        if done.returncode == 2 and self.kill():
            return None
        said = [*done.stdout.splitlines(), *done.stderr.splitlines()]
        return f"pytest ended with {done.returncode}: {(said or [''])[-1]}"

    def events(self, kind: str) -> list[dict]:
        lines = self.log.read_text().splitlines()
        return [event for event in map(json.loads, lines) if kind in event]

    def kill(self) -> dict | None:
        return next((event for event in self.events("failed") if event["asserted"]), None)

    def ask(self, mutant: Mutant, rounds: list[tuple[list[str], str]]) -> dict:
        """Runs rounds of tests one after the other until an assertion fails."""
        self.log.write_text("")
        end = time.monotonic() + self.timeout
        ends = []
        for arguments, case in rounds:
            for _ in range(CRASHES):
                why = self.test(mutant, arguments, case, end - time.monotonic())
                if kill := self.kill():
                    said = {"message": kill["message"], "cases": kill["cases"]}
                    return {"outcome": "killed", "test": kill["failed"], **said}
                if why is None:
                    break
                started = self.events("start")
                ends.append(f"{why} in {started[-1]['start'] if started else 'no test'}")
                if time.monotonic() > end:
                    return {"outcome": OUT_OF_TIME, "others": ends}
        ends += [f"{e['failed']}: {e['message']}" for e in self.events("failed")]
        return {"outcome": "survived", "others": ends}

    def run(self, mutant: Mutant, last: dict) -> dict:
        began = time.monotonic()
        try:
            self.library.build(mutant, self.tree)
            result = self.ask(mutant, rounds_of(mutant, last, self.device))
        except RuntimeError as error:
            result = {"outcome": "build error", "others": [str(error)]}
        return {**result, "seconds": round(time.monotonic() - began)}


def stage_tests(mutant: Mutant) -> list[str]:
    return [f"tests/{name}" for name in STAGE_TESTS.get(mutant.stage, ())]


def kernel_tests(stage: str) -> list[str]:
    """Files with the tests of a CUDA stage."""
    own = sorted((ROOT / "tests").glob(f"test_{stage}*.py"))
    return [f"tests/{name}" for name in (*(path.name for path in own), *ALSO.get(stage, ()))]


def case_tests(mutant: Mutant, files: list[str]) -> list[str]:
    """Those of the files that have tests of the case that the fault repeats."""
    mark = f'case("{mutant.case}")'
    return [file for file in files if mark in (ROOT / file).read_text()]


def rounds_of(mutant: Mutant, last: dict, device: str) -> list[tuple[list[str], str]]:
    """Arguments for pytest and a case, one round after the other."""
    every = ["tests", "--ignore=tests/core"]  # that folder compiles for minutes
    if mutant is CONTROL:
        spread = importlib.util.find_spec("xdist") is not None
        cores = ["-n", str(min(8, os.cpu_count() or 1))] if spread else []
        return [([*every, *cores], ""), (["tests/core"], "")]
    named = [test for test in (last.get("test"), mutant.test) if test]
    again = [([test], "") for test in named if (ROOT / test.split("::")[0]).exists()]
    if device == "cuda":
        ops = " or ".join((mutant.stage, *OPS.get(mutant.stage, ())))
        files = kernel_tests(mutant.stage)
        after = [(files, ""), (["tests/test_cuda_equals_cpu.py", "-k", ops], "")]
    else:
        files = [f"tests/{path.name}" for path in sorted((ROOT / "tests").glob("test_*.py"))]
        of_stage = [(tests, "")] if (tests := stage_tests(mutant)) else []
        after = [*of_stage, (every, ""), (["tests/core"], "")]
    of_case = [(tests, mutant.case)] if (tests := case_tests(mutant, files)) else []
    if mutant.case in (None, *last.get("cases", ())):
        return [*again, *of_case, *after]
    return [*of_case, *again, *after]


def is_fine(mutant: Mutant, result: dict) -> bool:
    if mutant is CONTROL:
        return result["outcome"] == "survived" and not result["others"]
    return result["outcome"] == "killed"


def chosen(only: str, device: str) -> dict[Mutant, str]:
    """Mutants by number or stage, comma-separated and in that order, and their lists; all if empty.
    The control is number 0."""
    own = {m: name for name, mutants in LISTS.items() for m in mutants if name[:3] == device[:3]}
    every = {CONTROL: "control", **own}
    picked = {}
    for word in filter(None, only.split(",")):
        meant = [m for m in every if word in (str(m.number), m.stage)]
        if not meant:
            raise SystemExit(f"--only: no number or stage {word}")
        picked |= {m: every[m] for m in meant}
    return picked or every


def result_table(mutants: dict[Mutant, str], results: dict[str, dict]) -> Table:
    table = Table("", "stage", "fault", "outcome", "test", "assertion", "s")
    for m in mutants:
        r = results[str(m.number)]
        outcome = r["outcome"] if is_fine(m, r) else f"[red]{r['outcome']}[/red]"
        said = short(r.get("message", ""))
        row = [str(m.number), m.stage, m.name, outcome, r.get("test", ""), said, str(r["seconds"])]
        table.add_row(*row[:4], *map(escape, row[4:]))
    return table


def run_all(mutants: dict[Mutant, str], results: dict[str, dict], options, state: Path) -> None:
    """Fills `results`, and keeps them and the kills as they come: a run can be taken up again."""
    todo = [m for m in mutants if results.get(str(m.number), UNKNOWN)["outcome"] == OUT_OF_TIME]
    if not todo:
        return
    console, lock = Console(), threading.Lock()
    base = state.parent / "base"
    library = Library(ROOT, base, environment(options.device))
    workers: SimpleQueue[Worker] = SimpleQueue()
    jobs = max(1, min(options.jobs, len(todo)))
    for i in range(jobs):
        workers.put(Worker(i, options.device, library, options.timeout))
    kills = {name: read_kills(name) for name in LISTS}

    def work(mutant: Mutant) -> None:
        name, worker = mutants[mutant], workers.get()
        result = worker.run(mutant, kills.get(name, {}).get(str(mutant.number), {}))
        workers.put(worker)
        said = escape(result.get("test") or "; ".join(result["others"])[:300])
        with lock:
            took = f"{result['seconds']} s"
            console.print(f"{mutant.number} {mutant.name}: {result['outcome']}, {took}, {said}")
            results[str(mutant.number)] = result
            state.write_text(json.dumps(results, indent=1))
            if mutant is not CONTROL and result["outcome"] != OUT_OF_TIME:
                record(name, {str(mutant.number): result})

    with ThreadPoolExecutor(jobs) as pool:
        list(pool.map(work, todo))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--only", default="", help="numbers or stages, comma-separated")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--timeout", type=float, default=1800, help="seconds of tests per fault")
    parser.add_argument("--fresh", action="store_true", help="forget results of the same sources")
    parser.add_argument("--render", action="store_true", help="only write docs/mutants.md anew")
    options = parser.parse_args()
    if options.render:
        DOC.write_text(document())
        return 0

    state = ROOT / "build" / "mutants" / options.device / "results.json"
    state.parent.mkdir(parents=True, exist_ok=True)
    sources = digest(options.device)
    results = json.loads(state.read_text()) if state.exists() else {}
    if options.fresh or results.get("sources") != sources:
        results = {"sources": sources}
    mutants = chosen(options.only, options.device)
    run_all(mutants, results, options, state)
    bad = [m for m in mutants if not is_fine(m, results[str(m.number)])]
    console = Console()
    console.print(result_table(mutants, results))
    console.print(f"{len(bad)} of {len(mutants)} not as they should be")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
