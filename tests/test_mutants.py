"""The faults of tests/mutants fit the sources, and `make mutants` has shown a test for each.

Whether that test would notice today is for `make mutants` to say.
"""

from collections import Counter
from pathlib import Path

import pytest

from mutants.mutant import patched
from mutants.mutants import CUDA_STAGES, LISTS, MUTANTS, STAGES, cuda_lists

TESTS = Path(__file__).resolve().parent
CSRC = TESTS.parent / "csrc"
EVERY = [mutant for mutants in LISTS.values() for mutant in mutants]


@pytest.mark.parametrize("mutant", EVERY, ids=lambda m: f"{m.number}-{m.name.replace(' ', '-')}")
def test_patch_applies_once(mutant):
    text = (CSRC / mutant.file).read_text()
    assert patched(text, mutant) != text


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


def test_a_library_for_use_has_no_fault():
    from flash_csa import _C

    assert _C.MUTANT == 0
