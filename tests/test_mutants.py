"""The faults of tests/mutants fit the sources; whether tests notice them is for `make mutants`."""

from collections import Counter
from pathlib import Path

import pytest

from mutants.mutant import patched
from mutants.mutants import MUTANTS, STAGES

CSRC = Path(__file__).resolve().parent.parent / "csrc"


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda m: f"{m.number}-{m.name.replace(' ', '-')}")
def test_patch_applies_once(mutant):
    text = (CSRC / mutant.file).read_text()
    assert patched(text, mutant) != text


def test_enough_of_every_stage():
    stages = Counter(m.stage for m in MUTANTS)
    assert sum(stages.values()) >= 30
    assert set(stages) == set(STAGES)
    assert min(stages.values()) >= 4


def test_numbers_and_names_are_unique():
    assert max(Counter(m.number for m in MUTANTS).values()) == 1
    assert max(Counter((m.stage, m.name) for m in MUTANTS).values()) == 1
    assert all(m.number // 100 == STAGES.index(m.stage) + 1 for m in MUTANTS)


def test_a_library_for_use_has_no_fault():
    from flash_csa import _C

    assert _C.MUTANT == 0
