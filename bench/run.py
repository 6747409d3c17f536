"""python -m bench.run: times every case, ours beside the peer, and keeps one row a case.

    python -m bench.run                                 all cases that bench/results lacks
    python -m bench.run --case 'attend.*' --redo        some, again
    python -m bench.run --compare old.jsonl             exit code 1 where a time grew
    python -m bench.run --device cpu                    every case once, tiny, untimed

The sources must be committed (`--allow-dirty` marks the rows instead). A copy without a repository
names the committed tree in FLASH_CSA_TREE: `git rev-parse HEAD:csrc`.
"""

import sys
import time
from pathlib import Path
from typing import Annotated, NoReturn

import torch
import typer
from rich import box
from rich.console import Console
from rich.table import Table

from . import dram, ours, provenance, results
from .cases import CASES, Case, matching
from .inputs import Inputs
from .measure import Bench

OUT = provenance.ROOT / "bench" / "results" / "h200.jsonl"
CEILINGS = [case for case in CASES.values() if case.kind in ("ceiling", "empty")]
FAULTS = (RuntimeError, ValueError, NotImplementedError)


def main(
    case: Annotated[list[str] | None, typer.Option(help="Glob of case names; repeatable.")] = None,
    skip: Annotated[list[str] | None, typer.Option(help="Glob of cases to leave out.")] = None,
    list_cases: Annotated[bool, typer.Option("--list", help="Print the cases and stop.")] = False,
    out: Annotated[Path, typer.Option(help="JSONL file; its current rows are kept.")] = OUT,
    compare: Annotated[Path | None, typer.Option(help="Older JSONL to compare with.")] = None,
    tolerance: Annotated[float, typer.Option(help="Growth that is no regression.")] = 0.05,
    device: Annotated[str, typer.Option(help="cuda, or cpu for a dry run.")] = "cuda",
    redo: Annotated[bool, typer.Option(help="Measure cases that have a current row.")] = False,
    budget: Annotated[float, typer.Option(help="Start no case after so many seconds.")] = 1e9,
    allow_dirty: Annotated[bool, typer.Option(help="Measure uncommitted sources.")] = False,
    count_dram: Annotated[
        bool, typer.Option("--dram", help="Count DRAM bytes of rows that lack them, under ncu.")
    ] = False,
) -> None:
    """Times the cases."""
    deadline = time.monotonic() + budget
    cases = _chosen(case or [], skip or [])
    if device not in ("cuda", "cpu"):
        _stop(f"--device must be cuda or cpu, got {device}")
    if list_cases:
        _print_cases(cases)
        return
    if not any(c.available for c in cases):
        _stop(f"not available yet: {', '.join(c.name for c in cases)}")
    if device == "cpu":
        if compare or count_dram:
            _stop("--compare and --dram need times: --device cpu takes none")
        sys.exit(_dry_run(cases))
    old, rows = _earlier(compare, out)  # out may be the file to compare with
    bench = _bench(allow_dirty)
    try:
        failures = _measure(bench, cases, rows, out, redo, deadline)
        if count_dram:
            _count_dram(cases, rows, out, deadline)
    except KeyboardInterrupt:
        _say("interrupted; run again to go on")
        sys.exit(130)
    names = dict.fromkeys(c.name for c in [*CEILINGS, *cases])
    shown = [rows[name] for name in names if name in rows]
    _print_rows(shown, failures)
    grown = results.regressions(shown, old, tolerance)
    for name, growth in grown:
        _say(f"regression: {name} {growth:+.1%}")
    sys.exit(1 if grown or failures else 0)


def _chosen(patterns: list[str], skip: list[str]) -> list[Case]:
    for pattern in (*patterns, *skip):
        if not matching([pattern]):
            _stop(f"no case matches {pattern} (--list names them)")
    left_out = matching(skip) if skip else []
    cases = [c for c in matching(patterns) if c not in left_out]
    return cases or _stop("--skip leaves no case")


def _earlier(compare: Path | None, out: Path) -> tuple[dict[str, results.Row], ...]:
    """The rows to compare with, and those of `out`."""
    if compare and not compare.exists():
        _stop(f"--compare: there is no {compare}")
    try:
        keys = ("case", "device", "ours_us")
        old = results.load(compare, keys) if compare else {}
        return old, results.load(out, results.KEYS)
    except ValueError as error:
        _stop(str(error))


def _bench(allow_dirty: bool) -> Bench:
    dirty = provenance.is_dirty()
    if dirty and not allow_dirty:
        _stop("csrc is not what is committed: commit it, set FLASH_CSA_TREE, or --allow-dirty")
    if not torch.cuda.is_available():
        _stop("the benchmark needs an H100 or H200 (--device cpu: a dry run)")
    bench = Bench(torch.device("cuda"), dirty=dirty)
    if bench.peers.missing:
        _say(bench.peers.missing)
    return bench


def _measure(
    bench: Bench,
    cases: list[Case],
    rows: dict[str, results.Row],
    out: Path,
    redo: bool,
    deadline: float,
) -> dict[str, str]:
    """Adds to the rows and writes all to `out`, case by case; returns what failed."""
    wanted = [c for c in cases if c.available and c not in CEILINGS]
    todo = [c for c in wanted if redo or not _is_current(bench, rows, c)]
    for row in bench.measure_ceilings(CEILINGS):
        rows[row["case"]] = row
    results.save(out, rows)
    failures: dict[str, str] = {}
    for number, c in enumerate(todo):
        if time.monotonic() > deadline:
            _say(f"out of time: {len(todo) - number} cases left; run again to go on")
            break
        started = time.monotonic()
        try:
            rows[c.name] = row = bench.measure(c)
        except FAULTS as error:
            failures[c.name] = str(error).splitlines()[0]
            _say(f"{c.name}: {failures[c.name]}")
            if not _device_works():
                _say("the GPU reports errors since then; run again, with --skip for this case")
                break
            continue
        results.save(out, rows)
        ratio = f"{row['ratio']:.2f}x" if row["ratio"] else "-"
        took = time.monotonic() - started
        _say(f"{c.name}: {row['ours_us']:.1f} us, {ratio} ({took:.1f} s)")
    return failures


def _count_dram(
    cases: list[Case], rows: dict[str, results.Row], out: Path, deadline: float
) -> None:
    """Fills in the DRAM bytes of a call of our own kernels and writes all rows to `out`, stage by
    stage."""
    torch.cuda.empty_cache()
    lacking = [c for c in cases if c.name in rows and rows[c.name]["dram_bytes"] is None]
    own = [c for c in lacking if c.stage and c.cost.nbytes]
    for counted in dram.count(own, _say):
        for name, item in counted.items():
            rows[name]["dram_bytes"] = item.nbytes
        results.save(out, rows)
        if time.monotonic() > deadline:
            _say("out of time: run again to go on")
            break


def _is_current(bench: Bench, rows: dict[str, results.Row], case: Case) -> bool:
    row = rows.get(case.name)
    trees = provenance.trees(case.stage)
    return row is not None and results.is_current(row, trees, bench.facts["device"])


def _device_works() -> bool:
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return False
    return True


def _dry_run(cases: list[Case]) -> int:
    """Runs each case once at a tiny size on the CPU; the number of cases that failed, at most 1."""
    inputs, failed = Inputs("cpu"), 0
    for case in cases:
        if not case.available or case in CEILINGS:
            continue
        try:
            for call in ours.build(case.small(), inputs, 1).calls:
                call()
        except FAULTS as error:
            failed = 1
            _say(f"{case.name}: {str(error).splitlines()[0]}")
        else:
            _say(f"{case.name}: runs")
    return failed


LEGEND = """\
instances: calls with inputs of their own in one graph. bytes, FLOPs: of one call, from the model.
must, aim: bars, the peer's time over ours: what a release needs, and what the design aims at.
recorded peer us: measured once on an H200 before these kernels were, to set the bars by. Not a
result: README has what `python -m bench.run` measured, ours and the peer's in one process.
(not available yet): whole steps. They have bars, but are neither built nor timed; only their stages
are, by the cases above.
"""


def _print_cases(cases: list[Case]) -> None:
    table = Table(box=box.SIMPLE_HEAD)
    for name in ("case", "stage", "bytes", "FLOPs", "instances", "must", "aim", "recorded peer us"):
        table.add_column(name, justify="left" if name in ("case", "stage") else "right")
    for case in cases:
        cost = case.cost
        table.add_row(
            case.name + ("" if case.available else "  (not available yet)"),
            case.stage,
            f"{cost.nbytes:,}" if cost.nbytes else "",
            f"{cost.flops:.3g}" if cost.flops else "",
            str(case.instances) if cost.nbytes else "",
            *(f"{value:g}" if value else "" for value in (case.must, case.aim, case.peer_us)),
        )
    Console(width=140, highlight=False).print(LEGEND, table, sep="\n", markup=False)


def _print_rows(rows: list[results.Row], failures: dict[str, str]) -> None:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("case", no_wrap=True)
    for name in ("ours us", "peer us", "ratio", "must", "GB/s", "TFLOP/s", "of ceiling"):
        table.add_column(name, justify="right")
    padded = any(map(results.best_way, rows))
    if padded:
        table.add_column(results.BEST_WAY, no_wrap=True)
    table.add_column("note", no_wrap=True)
    for row in rows:
        case = CASES[row["case"]]
        table.add_row(
            row["case"],
            f"{row['ours_us']:.1f}",
            f"{row['peer_us']:.1f}" if row["peer_us"] else "",
            f"{row['ratio']:.2f}" if row["ratio"] else "",
            f"{case.must:g}" if case.must else "",
            f"{row['gbps']:,.0f}" if row["bytes"] else "",
            f"{row['tflops']:,.1f}" if row["flops"] else "",
            f"{row['fraction']:.0%} {row['ceiling']}" if row["fraction"] else "",
            *([results.best_way(row)] if padded else []),
            row["note"][:40],
        )
    for name, message in failures.items():
        table.add_row(name, "failed", *[""] * (7 if padded else 6), message[:60])
    Console(width=190, highlight=False).print(table, *_states(rows), sep="\n")


def _states(rows: list[results.Row]) -> list[str]:
    """Where and in which state of the clocks the rows were measured, a line a device."""
    lines = []
    for device in dict.fromkeys(row["device"] for row in rows):
        own = [row for row in rows if row["device"] == device]
        parts = [device]
        for name, unit in (("clock", "MHz"), ("power", "W")):
            values = [row[name] for row in own if row[name] is not None]
            if values:
                parts.append(f"{name} {min(values):.0f} to {max(values):.0f} {unit}")
        lines.append(", ".join(parts))
    return lines


def _say(line: str) -> None:
    print(f"bench: {line}", file=sys.stderr, flush=True)


def _stop(line: str) -> NoReturn:
    _say(line)
    sys.exit(2)


if __name__ == "__main__":
    typer.run(main)
