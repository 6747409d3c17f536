"""What a mutant is: an exact patch of one file of csrc.

Faults of a CUDA stage go into list_cuda_<stage>.py, or list_cuda_<stage>_<part>.py, as a tuple
MUTANTS; <stage> is a folder of csrc/sm90. Nothing else names the file. Numbers: 1101.. for store,
1201.. step, 1301.. compress, 1401.. index, 1501.. select, 1601.. attend (CUDA_STAGES in
mutants.py). On a machine with a GPU

    make gpu-mutants ARGS="--only attend"        or: --only 1601,1602; --jobs 8; --timeout 60

builds the library once, then for each fault what reads the patched file, and asks the stage's tests
(tests/test_<stage>*.py, then those of its ops in test_cuda_equals_cpu.py) with --device=cuda. Only
a failed assertion is a kill: a crash, a hang or a CUDA error is none. It writes
kills/cuda_<stage>...json and docs/mutants.md, to be committed with the list; test_mutants.py
compares the three, and whether a patch is still the one that was noticed
(`python tests/mutants/run.py --render` writes the document anew after a merge).
"""

import hashlib
from dataclasses import dataclass


@dataclass(frozen=True)
class Mutant:
    number: int
    stage: str
    name: str
    file: str  # below csrc
    old: str  # occurs once in it
    new: str
    fault: str  # how it comes to be written
    case: str | None = None  # the case from the field, by its heading, that it repeats
    test: str | None = None  # asked before its stage's: a file of tests, or tests/...py::test_name

    @property
    def patch(self) -> str:
        """Kept with a kill: a patch that has changed since is to be shown again."""
        text = "\0".join((self.file, self.old, self.new))
        return hashlib.sha256(text.encode()).hexdigest()[:12]


def replace_once(text: str, old: str, new: str, what: str) -> str:
    count = text.count(old)
    if count != 1:
        raise ValueError(f"{what}: the text to replace occurs {count} times, not once")
    return text.replace(old, new)


def patched(text: str, mutant: Mutant) -> str:
    """`text`, the content of mutant.file, with the fault."""
    return replace_once(text, mutant.old, mutant.new, f"mutant {mutant.number}, {mutant.file}")
