"""The list of cases from the field (cases.md) and the tests that are marked with them agree."""

import ast
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

from mutants.matrix import read_kills
from mutants.mutants import LISTS

TESTS = Path(__file__).resolve().parent
PLACES = {"CPU": {"CPU"}, "GPU": {"GPU"}, "both": {"CPU", "GPU"}, "later": set()}
ON_DEVICE = {"device", "scene"}  # fixtures of tests that run where --device says
GPU_ONLY = {"cuda", "_needs_cuda"}  # the second one is of all tests of a file that has it


@dataclass(frozen=True)
class Case:
    heading: str
    fault: str
    runs_on: str
    notes: str


@cache
def cases() -> list[Case]:
    """Rows of the table."""
    lines = (TESTS / "cases.md").read_text().splitlines()
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines if line[:1] == "|"]
    assert rows[0] == ["case", "the fault", "runs on", "notes"]
    return [Case(*row) for row in rows[2:]]


@dataclass(frozen=True)
class Mark:
    heading: str
    where: str
    places: frozenset[str]  # CPU, GPU or both


def heading_of(node: ast.AST) -> str | None:
    """The heading of `pytest.mark.case("heading")`."""
    if not (isinstance(node, ast.Call) and ast.unparse(node.func) == "pytest.mark.case"):
        return None
    (argument,) = node.args
    assert isinstance(argument, ast.Constant), ast.unparse(node)
    return argument.value


def names_of(node: ast.AST) -> set[str]:
    """What a file uses for all its tests: fixtures that a mark names, or that it has by import or
    definition."""
    if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "pytestmark":
        return {part.value for part in ast.walk(node) if isinstance(part, ast.Constant)}
    if isinstance(node, ast.ImportFrom):
        return {alias.name for alias in node.names}
    autouse = isinstance(node, ast.FunctionDef) and "autouse=True" in map(
        ast.unparse, (k for d in node.decorator_list for k in getattr(d, "keywords", []))
    )
    return {node.name} if autouse else set()


@cache
def marks() -> list[Mark]:
    """Every mark of every test, of functions and of whole files."""
    found = []
    for path in sorted(TESTS.rglob("test_*.py")):
        tree = ast.parse(path.read_text())
        functions = [
            node
            for node in tree.body
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
        ]
        of_gpu = any(names_of(node) & GPU_ONLY for node in tree.body)
        of_file = [
            heading
            for node in tree.body
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "pytestmark"
            for part in ast.walk(node)
            if (heading := heading_of(part)) is not None
        ]
        for function in functions:
            fixtures = {argument.arg for argument in function.args.args}
            if of_gpu or fixtures & GPU_ONLY:
                places = {"GPU"}
            else:
                places = {"CPU"} | ({"GPU"} if fixtures & ON_DEVICE else set())
            for heading in [*map(heading_of, function.decorator_list), *of_file]:
                if heading is not None:
                    where = f"{path.name}::{function.name}"
                    found.append(Mark(heading, where, frozenset(places)))
        calls = sum(heading_of(node) is not None for node in ast.walk(tree))
        placed = sum(heading_of(d) is not None for f in functions for d in f.decorator_list)
        assert calls == placed + len(of_file), f"{path.name}: a mark that marks no test"
    return found


def test_every_case_is_listed_once():
    headings = [case.heading for case in cases()]
    assert len(headings) == len(set(headings)) >= 66
    for case in cases():
        assert case.runs_on in PLACES, case
        assert case.fault and (case.notes or case.runs_on != "later"), case


@pytest.mark.parametrize("case", cases(), ids=lambda case: case.heading)
def test_cases_have_tests_where_they_run(case):
    own = [mark for mark in marks() if mark.heading == case.heading]
    reached = {place for mark in own for place in mark.places}
    assert case.runs_on == "later" or PLACES[case.runs_on] == reached, own


def test_marks_name_cases():
    headings = {case.heading for case in cases()}
    for mark in marks():
        assert mark.heading in headings, mark
    for mutant in (mutant for mutants in LISTS.values() for mutant in mutants):
        assert mutant.case is None or mutant.case in headings, mutant.number


@pytest.mark.parametrize("case", cases(), ids=lambda case: case.heading)
def test_cases_can_fail(case):
    """A test of the case has noticed a fault, or the notes name a control."""
    if "CPU" in PLACES[case.runs_on]:
        noticed = {heading for kill in read_kills("cpu").values() for heading in kill["cases"]}
        assert case.heading in noticed or "control: " in case.notes
