"""DRAM bytes of one cold call of each case, counted by Nsight Compute in processes of its own.

`python -m bench.dram CASE ...` is what runs under ncu; it prints the names that ran.
"""

import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby

from flash_csa.traffic import ncu

from . import ours
from .cases import CASES, Case
from .inputs import Inputs

TIMEOUT = 120  # seconds of a process: most take fifteen


def count(cases: Sequence[Case], say: Callable[[str], None]) -> Iterator[dict[str, ncu.Counted]]:
    """By case, stage by stage: cases of one share a process and its inputs. Stages that fail are
    left out."""
    if ncu.find() is None:
        say("DRAM bytes: there is no ncu here")
        return
    for stage, group in groupby(sorted(cases, key=_stage), key=_stage):
        names = [case.name for case in group]
        started = time.monotonic()
        try:
            items, printed = ncu.profile(["-m", "bench.dram", *names], [ncu.DRAM], TIMEOUT)
        except ncu.Unavailable as reason:
            say(f"DRAM bytes of {stage}: {reason}")
            continue
        ran = json.loads(printed.strip().splitlines()[-1])
        say(f"DRAM bytes of {stage}: {len(ran)} cases ({time.monotonic() - started:.1f} s)")
        yield dict(zip(ran, items, strict=True))


def _stage(case: Case) -> str:
    return case.stage


def main(names: list[str]) -> None:
    """Calls each case once warm, then once measured."""
    inputs, ran = Inputs("cuda"), []
    for name in names:
        call = ours.build(CASES[name], inputs, 1).calls[0]
        ncu.warm(call)
        with ncu.region():
            ncu.mark()
            call()
        ran.append(name)
    print(json.dumps(ran))


if __name__ == "__main__":
    main(sys.argv[1:])
