"""Libraries with a fault: the whole is built once, then per fault what reads the patched file."""

import json
import os
import shlex
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from mutants.mutant import Mutant
from mutants.mutants import mutated_copy

COMPILERS = ThreadPoolExecutor(int(os.environ.get("MAX_JOBS", os.cpu_count() or 1)))


def run(command: list[str], **options) -> str:
    """Standard output, or RuntimeError with the first error that the command reports."""
    done = subprocess.run(command, capture_output=True, text=True, **options)
    if done.returncode != 0:
        said = [*done.stdout.splitlines(), *done.stderr.splitlines()]
        errors = [line for line in said if "error" in line.lower()]
        raise RuntimeError((errors or said[-1:] or ["no message"])[0])
    return done.stdout


@dataclass(frozen=True)
class Unit:
    """An object of the library: how it is compiled and what of csrc it reads."""

    object: str
    command: str
    reads: frozenset[str]


class Library:
    """The library without a fault, in `folder`, and how each of its parts was made."""

    def __init__(self, root: Path, folder: Path, environment: dict[str, str]):
        self.root, self.folder = root, folder
        command = [sys.executable, "setup.py", "build_ext", "-b", str(folder / "python")]
        command += ["-t", str(folder / "objects"), "--force"]
        said = run(command, cwd=root, env={**environment, "FCSA_MUTATE": "0"})
        self.link = next(line for line in said.splitlines() if " -shared " in line)
        reads = self.reads()
        self.units = [
            Unit(entry["output"], entry["command"], reads[entry["output"]])
            for entry in json.loads(self.ninja("compdb"))
            if entry["output"] in reads
        ]

    def ninja(self, tool: str) -> str:
        path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
        command = ["ninja", "-C", str(self.folder / "objects"), "--quiet", "-t", tool]
        return run(command, env={**os.environ, "PATH": path})

    def reads(self) -> dict[str, frozenset[str]]:
        """By object: the files of csrc that its compilation read."""
        csrc = f"{self.folder}/csrc/"
        found = {}
        for block in filter(None, self.ninja("deps").split("\n\n")):
            head, *files = (line.strip() for line in block.splitlines())
            own = (file.removeprefix(csrc) for file in files if file.startswith(csrc))
            found[head.partition(":")[0]] = frozenset(own)
        return found

    def build(self, mutant: Mutant, tree: Path) -> None:
        """Puts the library with the fault into `tree`; RuntimeError if it does not compile."""
        mutated_copy(mutant.number, self.root / "csrc", tree / "csrc")

        def here(text: str) -> str:
            return text.replace(f"{self.folder}/", f"{tree}/")

        def compiled(unit: Unit) -> None:
            Path(here(unit.object)).parent.mkdir(parents=True, exist_ok=True)
            run(shlex.split(here(unit.command)))

        # The module says which fault it has.
        units = [u for u in self.units if u.reads & {mutant.file, "ops/module.cpp"}]
        list(COMPILERS.map(compiled, units))
        library = f"{self.folder}/python/"
        link = self.link.replace(library, here(library))
        for unit in units:
            link = link.replace(f" {unit.object} ", f" {here(unit.object)} ")
        run(shlex.split(link))
