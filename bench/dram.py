"""DRAM bytes of one cold call of each case, counted by Nsight Compute in processes of its own.

`python -m bench.dram CASE ...` is what runs under ncu; it prints the names that ran.
"""

import json
import sys
from collections.abc import Callable, Sequence
from itertools import groupby

from flash_csa.traffic import ncu

from . import ours
from .cases import CASES, Case
from .inputs import Inputs


def count(cases: Sequence[Case], say: Callable[[str], None]) -> dict[str, ncu.Counted]:
    """By case; cases of one kind share a process and its inputs. Those that fail are left out."""
    counted: dict[str, ncu.Counted] = {}
    for kind, group in groupby(cases, key=lambda case: case.kind):
        names = [case.name for case in group]
        try:
            items, printed = ncu.profile(["-m", "bench.dram", *names], [ncu.DRAM])
        except ncu.Unavailable as reason:
            say(f"DRAM bytes of {kind}: {reason}")
            continue
        ran = json.loads(printed.strip().splitlines()[-1])
        counted |= dict(zip(ran, items, strict=True))
    return counted


def main(names: list[str]) -> None:
    """Calls each case once warm, then once measured."""
    inputs, ran = Inputs("cuda"), []
    for name in names:
        call = ours.build(CASES[name], inputs, 1).calls[0]
        call()
        with ncu.region():
            ncu.mark()
            call()
        ran.append(name)
    print(json.dumps(ran))


if __name__ == "__main__":
    main(sys.argv[1:])
