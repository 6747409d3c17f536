"""Which test notices which fault: kills/*.json, one file a list, and docs/mutants.md."""

import json
from pathlib import Path

from mutants.mutant import Mutant
from mutants.mutants import CUDA_STAGES, KINDS, LISTS, cuda_lists

KILLS = Path(__file__).parent / "kills"
DOC = Path(__file__).resolve().parents[2] / "docs" / "mutants.md"
HEADING = """\
# Faults that tests notice

`make mutants` builds the library with one of these faults at a time and runs the tests until an
assertion fails; `make gpu-mutants` does so for faults of CUDA kernels. A crash, a timeout or an
unexpected error does not count. `tests/mutants` holds the patches. Those of `list_cases.py` and
116 were chosen with the tests in view, the others of the CPU back end without. What notices a
fault of a kernel is in the suite that `make gpu-test` runs.
Written by `tests/mutants/run.py`.
"""


def read_kills(name: str) -> dict[str, dict]:
    """By the mutant's number: test, message and cases of the kill that a run has shown, and the
    patch that it was shown for."""
    path = KILLS / f"{name}.json"
    return json.loads(path.read_text()) if path.exists() else {}


def short(message: str, width: int = 100) -> str:
    """First line of an assertion message."""
    line = message.strip().partition("\n")[0].removeprefix("AssertionError: ")
    return line if len(line) <= width else line[: width - 3] + "..."


def table(mutants: tuple[Mutant, ...], kills: dict[str, dict]) -> list[str]:
    if not mutants:
        return ["None yet."]
    cell = lambda text: text.replace("|", "\\|").replace("<", "&lt;")  # noqa: E731
    killed = sum(str(m.number) in kills for m in mutants)
    rows = [f"{len(mutants)} faults, {killed} noticed.", ""]
    rows += ["| | stage | fault | noticed by | case |", "| --- | --- | --- | --- | --- |"]
    for m in mutants:
        kill = kills.get(str(m.number), {})
        fault = f"**{m.name}** (`{m.file}`): {m.fault}"
        noticed = "nothing"
        if kill:
            noticed = f"`{kill['test'].removeprefix('tests/')}`: {cell(kill['message'])}"
        rows.append(f"| {m.number} | {m.stage} | {cell(fault)} | {noticed} | {m.case or ''} |")
    return rows


def kind_table() -> list[str]:
    rows = ["| stage | kind of fault | faults |", "| --- | --- | --- |"]
    for stage, kinds in KINDS.items():
        for kind, numbers in kinds.items():
            rows.append(f"| {stage} | {kind} | {', '.join(map(str, numbers))} |")
    return rows


def document() -> str:
    """docs/mutants.md. Every CUDA stage has its heading, so that lists grow independently."""
    lines = [HEADING]
    titles = {"CPU": ["cpu"]} | {f"CUDA: {stage}": cuda_lists(stage) for stage in CUDA_STAGES}
    for title, names in titles.items():
        mutants = tuple(mutant for name in names for mutant in LISTS[name])
        kills = {number: kill for name in names for number, kill in read_kills(name).items()}
        lines += [f"## {title}", "", *table(mutants, kills), ""]
    lines += ["## Kinds of fault in kernels", "", *kind_table(), ""]
    return "\n".join(lines)


def record(name: str, results: dict[str, dict]) -> None:
    """Brings the kills of a list and the document up to date with new results."""
    kills = read_kills(name)
    mutants = {str(m.number): m for m in LISTS[name]}
    for number, result in results.items():
        kills.pop(number, None)
        if result["outcome"] == "killed":
            kills[number] = {
                "test": result["test"],
                "message": short(result["message"]),
                "cases": result["cases"],
                "patch": mutants[number].patch,
            }
    ordered = {number: kills[number] for number in mutants if number in kills}
    KILLS.mkdir(exist_ok=True)
    (KILLS / f"{name}.json").write_text(json.dumps(ordered, indent=1) + "\n")
    DOC.write_text(document())
