"""The faults of tests/mutants fit the sources, and `make mutants` has shown a test for each.

Whether that test would notice today is for `make mutants` to say.
"""

from collections import Counter
from pathlib import Path

import pytest

from mutants import matrix
from mutants.mutant import patched
from mutants.mutants import CUDA_STAGES, KINDS, LISTS, MUTANTS, STAGES, cuda_lists
from mutants.run import kernel_tests

TESTS = Path(__file__).resolve().parent
CSRC = TESTS.parent / "csrc"
MUTANT_FILE = "tests/mutants/mutant.py"
EVERY = [mutant for mutants in LISTS.values() for mutant in mutants]


def has_test(name: str) -> bool:
    """tests/FILE.py, or tests/FILE.py::NAME[...], is there."""
    file, _, test = name.partition("::")
    path = TESTS.parent / file
    return path.exists() and (not test or f"def {test.partition('[')[0]}(" in path.read_text())


@pytest.mark.parametrize("mutant", EVERY, ids=lambda m: f"{m.number}-{m.name.replace(' ', '-')}")
def test_patch_applies_once(mutant):
    text = (CSRC / mutant.file).read_text()
    assert patched(text, mutant).split() != text.split()
    assert mutant.test is None or has_test(mutant.test)


def test_enough_of_every_stage():
    stages = Counter(m.stage for m in MUTANTS)
    assert sum(stages.values()) >= 30
    assert set(stages) == set(STAGES)
    assert min(stages.values()) >= 4


def test_numbers_and_names_are_unique():
    assert max(Counter(m.number for m in EVERY).values()) == 1
    for name, mutants in LISTS.items():
        assert max(Counter((m.stage, m.name) for m in mutants).values()) == 1, name
    assert all(m.number // 100 == STAGES.index(m.stage) + 1 for m in MUTANTS)


def test_lists_of_cuda_stages():
    lists = {name: stage for stage in CUDA_STAGES for name in cuda_lists(stage)}
    assert lists.keys() == LISTS.keys() - {"cpu"}
    for name, stage in lists.items():
        for mutant in LISTS[name]:
            assert (mutant.stage, mutant.file[:5]) == (stage, "sm90/"), mutant.number
            assert mutant.number // 100 == CUDA_STAGES.index(stage) + 11


@pytest.mark.parametrize("name", LISTS)
def test_every_fault_is_noticed(name):
    """By a test that there still is, and as it is."""
    kills = matrix.read_kills(name)
    assert list(kills) == [str(m.number) for m in LISTS[name]], f"see the head of {MUTANT_FILE}"
    for mutant, kill in zip(LISTS[name], kills.values(), strict=True):
        assert has_test(kill["test"]), mutant.number
        assert kill["patch"] == mutant.patch, f"{mutant.number} has changed: to be shown again"


@pytest.mark.parametrize("name", [name for name in LISTS if name != "cpu"])
def test_faults_of_kernels_are_for_their_stage(name):
    for number, kill in matrix.read_kills(name).items():
        asked = {*kernel_tests(name.split("_")[1]), "tests/test_cuda_equals_cpu.py"}
        assert kill["test"].partition("::")[0] in asked, number


def test_kinds_of_fault_in_kernels():
    stages = {m.number: m.stage for m in EVERY}
    for stage, kinds in KINDS.items():
        assert len(kinds) >= 6
        assert {stages[n] for numbers in kinds.values() for n in numbers} == set(stage.split(", "))


def test_document():
    assert matrix.DOC.read_text() == matrix.document(), "python tests/mutants/run.py --render"


def test_a_library_for_use_has_no_fault():
    from flash_csa import _C

    assert _C.MUTANT == 0
