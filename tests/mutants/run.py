"""Asks for every fault of mutants.py which test notices it, and writes docs/mutants.md.

usage: make mutants [ARGS="--only 101,scores --jobs 2 --fresh"]

Each worker has a tree of its own under build/mutants: this checkout with a patched csrc. There one
fault after the other is built and the tests run until the first assertion fails: first the one
that failed last time (kills.json), then those of the case from the field that the fault repeats,
those of its stage, and all others. Only a failed assertion is a kill; a crash, a timeout or an
error that a test does not expect is none. Number 0 is the control: no fault, and no test may fail.
"""

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue

from rich.console import Console
from rich.markup import escape
from rich.table import Table

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests"))

from mutants.mutant import Mutant  # noqa: E402
from mutants.mutants import MUTANTS  # noqa: E402

BUILD = ROOT / "build" / "mutants"
KILLS = Path(__file__).parent / "kills.json"
DOC = ROOT / "docs" / "mutants.md"
CONTROL = Mutant(0, "control", "no fault", "", "", "", "the tests as they are")
LEFT_OUT = ("build", "dist", "csrc", "*.so", "*.egg-info", "__pycache__", ".*")
UNRELATED = (  # to the faults: whether sources have none, and whether they compile
    "tests/test_mutants.py",
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
    "attend": ("test_attend.py",),
    "step": ("test_step.py", "test_schedule.py", "test_store.py"),
    "merge": ("test_merge.py", "test_pool.py"),
}
CRASHES = 3  # tests that may crash before the run is given up


def digest() -> str:
    """Of everything that decides a result: sources, package and tests."""
    sha = hashlib.sha256()
    for folder in ("csrc", "python", "tests"):
        for path in sorted((ROOT / folder).rglob("*")):
            if path.suffix in (".h", ".cpp", ".py", ".npz"):
                sha.update(path.read_bytes())
    return sha.hexdigest()


class Worker:
    """A tree, its objects, and the tests in it."""

    def __init__(self, number: int, timeout: float):
        self.tree = BUILD / f"tree{number}"
        self.objects = BUILD / f"objects{number}"
        self.log = BUILD / f"log{number}"
        self.timeout = timeout
        for folder in ("python", "tests"):
            shutil.rmtree(self.tree / folder, ignore_errors=True)
        ignored = shutil.ignore_patterns(*LEFT_OUT)
        shutil.copytree(ROOT, self.tree, ignore=ignored, dirs_exist_ok=True)
        paths = [str(self.tree / "python"), str(self.tree / "tests")]
        self.environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(paths),
            "FLASH_CSA_CPU_ONLY": "1",
            "MUTANT_LOG": str(self.log),
        }

    def build(self, mutant: Mutant) -> str | None:
        """None, or what went wrong."""
        command = [sys.executable, "setup.py", "build_ext", "-b", str(self.tree / "python")]
        command += ["-t", str(self.objects), "--force"]
        environment = {**self.environment, "FCSA_MUTATE": str(mutant.number)}
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
        if done.returncode != 0:
            lines = [line for line in done.stdout.splitlines() if "error" in line]
            return (lines or done.stderr.splitlines() or ["no message"])[0]
        show = "import flash_csa; print(flash_csa.__file__, flash_csa._C.MUTANT)"
        said = subprocess.run(
            [sys.executable, "-c", show],
            cwd=self.tree,
            env=self.environment,
            capture_output=True,
            text=True,
        ).stdout.strip()
        expected = f"{self.tree}/python/flash_csa/__init__.py {mutant.number}"
        return None if said == expected else f"tests would import {said!r}"

    def test(self, arguments: list[str], case: str, seconds: float) -> str | None:
        """Runs tests (of a case) that have not been started. None, or why the run ended early."""
        command = [sys.executable, "-m", "pytest", "-p", "mutants.watch", "-p", "no:cacheprovider"]
        command += ["-q", "--no-header", "--tb=no", "--hypothesis-seed=0"]
        command += [f"--deselect={test}" for test in UNRELATED]
        try:
            done = subprocess.run(
                [*command, *arguments],
                cwd=self.tree,
                env={**self.environment, "MUTANT_CASE": case},
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
        return f"pytest ended with {done.returncode}: {(done.stdout.splitlines() or [''])[-1]}"

    def events(self, kind: str) -> list[dict]:
        lines = self.log.read_text().splitlines()
        return [event for event in map(json.loads, lines) if kind in event]

    def kill(self) -> dict | None:
        return next((event for event in self.events("failed") if event["asserted"]), None)

    def ask(self, rounds: list[tuple[list[str], str]]) -> dict:
        """Runs rounds of tests one after the other until an assertion fails."""
        self.log.write_text("")
        end = time.monotonic() + self.timeout
        ends = []
        for arguments, case in rounds:
            for _ in range(CRASHES):
                why = self.test(arguments, case, end - time.monotonic())
                if kill := self.kill():
                    said = {"message": kill["message"], "cases": kill["cases"]}
                    return {"outcome": "killed", "test": kill["failed"], **said}
                if why is None:
                    break
                started = self.events("start")
                ends.append(f"{why} in {started[-1]['start'] if started else 'no test'}")
        ends += [f"{e['failed']}: {e['message']}" for e in self.events("failed")]
        return {"outcome": "survived", "others": ends}


def rounds_of(mutant: Mutant, last: dict) -> list[tuple[list[str], str]]:
    """Arguments for pytest and a case, one round after the other."""
    every = ["tests", "--ignore=tests/core"]  # that folder compiles for minutes
    rounds = []
    if (ROOT / last.get("test", "?").split("::")[0]).exists():
        rounds.append(([last["test"]], ""))
    if mutant.case:
        rounds.append((every, mutant.case))
    if mutant.stage in STAGE_TESTS:
        rounds.append(([f"tests/{name}" for name in STAGE_TESTS[mutant.stage]], ""))
    return [*rounds, (every, ""), (["tests/core"], "")]


def run_one(worker: Worker, mutant: Mutant, last: dict) -> dict:
    began = time.monotonic()
    error = worker.build(mutant)
    if error:
        result = {"outcome": "build error", "others": [error]}
    else:
        result = worker.ask(rounds_of(mutant, last))
    return {**result, "seconds": round(time.monotonic() - began)}


def is_fine(mutant: Mutant, result: dict) -> bool:
    if mutant is CONTROL:
        return result["outcome"] == "survived" and not result["others"]
    return result["outcome"] == "killed"


def short(message: str, width: int = 100) -> str:
    """First line of an assertion message."""
    line = message.strip().partition("\n")[0].removeprefix("AssertionError: ")
    return line if len(line) <= width else line[: width - 3] + "..."


def document(kills: dict[str, dict]) -> str:
    """docs/mutants.md."""
    cell = lambda text: text.replace("|", "\\|").replace("<", "&lt;")  # noqa: E731
    rows = ["| | stage | fault | noticed by | case |", "| --- | --- | --- | --- | --- |"]
    for m in MUTANTS:
        kill = kills.get(str(m.number), {})
        test = f"`{kill['test'].removeprefix('tests/')}`" if "test" in kill else "nothing"
        fault = f"**{m.name}** (`{m.file}`): {m.fault}"
        noticed = f"{test}: {cell(kill.get('message', ''))}"
        rows.append(f"| {m.number} | {m.stage} | {cell(fault)} | {noticed} | {m.case or ''} |")
    killed = sum(str(m.number) in kills for m in MUTANTS)
    return (
        "# Faults that tests notice\n\n"
        "`make mutants` builds the library with one of these faults at a time and runs the tests\n"
        "until an assertion fails: `tests/mutants` holds the patches. Those of\n"
        "`list_cases.py` and 116 were chosen with the tests in view, the others without.\n"
        "A crash, a timeout or an unexpected error does not count. Written by\n"
        f"`tests/mutants/run.py`. {len(MUTANTS)} faults, {killed} noticed.\n\n"
        + "\n".join(rows)
        + "\n"
    )


def chosen(only: str) -> list[Mutant]:
    """Mutants by number or stage, comma-separated; all if empty. The control is number 0."""
    words = set(filter(None, only.split(",")))
    unknown = words - {str(m.number) for m in MUTANTS} - {m.stage for m in MUTANTS} - {"0"}
    if unknown:
        raise SystemExit(f"--only: no number or stage {', '.join(sorted(unknown))}")
    every = (CONTROL, *MUTANTS)
    return [m for m in every if not words or str(m.number) in words or m.stage in words]


def by_files(mutants: list[Mutant]) -> list[Mutant]:
    """Those of one file together, as they compile the same objects."""
    return sorted(mutants, key=lambda m: (m.file, m.number))


def result_table(mutants: list[Mutant], results: dict[str, dict]) -> Table:
    table = Table("", "stage", "fault", "outcome", "test", "assertion", "s")
    for m in mutants:
        r = results[str(m.number)]
        outcome = r["outcome"] if is_fine(m, r) else f"[red]{r['outcome']}[/red]"
        said = short(r.get("message", ""))
        row = [str(m.number), m.stage, m.name, outcome, r.get("test", ""), said, str(r["seconds"])]
        table.add_row(*row[:4], *map(escape, row[4:]))
    return table


def record(kills: dict[str, dict], results: dict[str, dict]) -> None:
    """Brings kills.json and docs/mutants.md up to date."""
    for m in MUTANTS:
        result = results.get(str(m.number), {})
        if result.get("outcome") == "killed":
            message = short(result["message"])
            kill = {"test": result["test"], "message": message, "cases": result["cases"]}
            kills[str(m.number)] = kill
        elif result:
            kills.pop(str(m.number), None)
    kills = {str(m.number): kills[str(m.number)] for m in MUTANTS if str(m.number) in kills}
    KILLS.write_text(json.dumps(kills, indent=1) + "\n")
    DOC.write_text(document(kills))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="numbers or stages, comma-separated")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--timeout", type=float, default=1800, help="seconds of tests per fault")
    parser.add_argument("--fresh", action="store_true", help="forget results of the same sources")
    options = parser.parse_args()

    console = Console()
    BUILD.mkdir(parents=True, exist_ok=True)
    state = BUILD / "results.json"
    sources = digest()
    results = json.loads(state.read_text()) if state.exists() else {}
    if options.fresh or results.get("sources") != sources:
        results = {"sources": sources}
    kills = json.loads(KILLS.read_text()) if KILLS.exists() else {}

    todo = [m for m in by_files(chosen(options.only)) if str(m.number) not in results]
    workers: SimpleQueue[Worker] = SimpleQueue()
    for i in range(max(1, min(options.jobs, len(todo)))):
        workers.put(Worker(i, options.timeout))

    def work(mutant: Mutant) -> None:
        worker = workers.get()
        result = run_one(worker, mutant, kills.get(str(mutant.number), {}))
        workers.put(worker)
        results[str(mutant.number)] = result
        state.write_text(json.dumps(results, indent=1))
        said = escape(result.get("test") or "; ".join(result["others"])[:300])
        took = f"{result['seconds']} s"
        console.print(f"{mutant.number} {mutant.name}: {result['outcome']}, {took}, {said}")

    with ThreadPoolExecutor(max(1, options.jobs)) as pool:
        list(pool.map(work, todo))

    bad = [m for m in chosen(options.only) if not is_fine(m, results[str(m.number)])]
    console.print(result_table(chosen(options.only), results))
    console.print(f"{len(bad)} of {len(chosen(options.only))} not as they should be")
    record(kills, results)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
