"""`python -m flash_csa traffic`: HBM bytes of a step, modelled and measured."""

import json
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich import box
from rich.console import Console
from rich.table import Table

from ..accounting import SECTOR
from ..cache import CacheSpec
from ..plan import LayerPlan
from ..traffic import ncu, plot
from ..traffic.model import KINDS, Shape, report
from . import output

WIDTH = 190
ROWS = Path("bench/results/h200.jsonl")


def command(
    model: output.Model = "v41-flash",
    context: Annotated[int, typer.Option(help="Tokens of each request after the step.")] = 131_072,
    batch: Annotated[int, typer.Option(help="Requests.")] = 1,
    rows: Annotated[int, typer.Option(help="Rows of each request: 1 decodes.")] = 1,
    measure: Annotated[
        bool, typer.Option("--measure", help="Count each kernel's bytes under Nsight Compute.")
    ] = False,
    kernels: Annotated[
        str | None, typer.Option(help="Glob of the kernels to measure; default: all.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    figure: Annotated[
        Path | None, typer.Option("--plot", help="Write bytes over context, and a roofline.")
    ] = None,
    results: Annotated[
        Path | None, typer.Option(help=f"Benchmark rows for the roofline; {ROWS} if it is there.")
    ] = None,
) -> None:
    """HBM bytes of one step over all layers: the model, and what the GPU counted."""
    if kernels is not None and not measure:
        raise ValueError("flash_csa.traffic: --kernels must come with --measure, got it alone")
    if figure is not None:
        plot.check(figure)
    plan = LayerPlan.from_config(model)
    shape = Shape(context, batch, rows)
    points = [] if figure is None else _benchmark_rows(results)
    result = report(plan, CacheSpec.for_plan(plan), shape) | {"model": model}
    if measure:
        result |= _measured(model, shape, "*" if kernels is None else kernels)
    if as_json:
        print(json.dumps(result, indent=1))
    else:
        _print(result)
    if figure is not None:
        plot.save(plan, points, figure)


def _measured(model: str, shape: Shape, glob: str) -> dict[str, Any]:
    """Kernels with the model's and the counted bytes; or why there are none."""
    if not torch.cuda.is_available():
        return {"not_measured": "there is no GPU here"}
    numbers = map(str, (shape.context, shape.batch, shape.rows))
    program = ["-m", "flash_csa.traffic.kernels", model, *numbers, glob]
    try:
        counted, printed = ncu.profile(program)
    except ncu.Unavailable as reason:
        return {"not_measured": str(reason)}
    expected = json.loads(printed.strip().splitlines()[-1])
    return {"kernels": [_beside(e, c) for e, c in zip(expected, counted, strict=True)]}


def _beside(expected: dict[str, Any], counted: ncu.Counted) -> dict[str, Any]:
    nbytes = sum(expected["bytes"].values())
    records = expected["records"]
    return {
        "kernel": expected["kernel"],
        "model_nbytes": nbytes,
        "dram_nbytes": counted.nbytes,
        "dram_read_nbytes": counted.read_nbytes,
        "dram_written_nbytes": counted.written_nbytes,
        "ratio": counted.nbytes / nbytes,
        "scratch_nbytes": expected["scratch"],
        "ratio_with_scratch": counted.nbytes / (nbytes + expected["scratch"]),
        "sectors": counted.sectors,
        "sectors_per_record": counted.sectors / records if records else None,
        "l2_hit_rate": counted.hit_rate,
        "time_us": counted.time_us,
        "launches": counted.launches,
    }


def _benchmark_rows(path: Path | None) -> list[dict[str, Any]]:
    if path is None and not ROWS.exists():
        return []
    path = path or ROWS
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise ValueError(f"flash_csa.traffic: --results: {error}") from error
    rows = []
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
            rows.append({key: row[key] for key in plot.ROW_KEYS})
        except (ValueError, KeyError, TypeError) as error:
            message = f"--results: {path}, line {number}: no row of the benchmark"
            raise ValueError(f"flash_csa.traffic: {message}") from error
    return rows


def _print(result: dict[str, Any]) -> None:
    console = Console(width=WIDTH, highlight=False)
    console.print(
        f"{result['model']}: {result['batch']} x {result['rows']} rows at {result['context']:,} "
        f"tokens; {result['nbytes']:,} bytes, {result['flops'] / 1e9:,.3f} GFLOP"
    )
    kinds = [kind for kind in KINDS if kind in result["kinds"]]
    table = _table("bytes by kind", *result["stages"], "all")
    for kind in kinds:
        cells = [stage["bytes"].get(kind, 0) for stage in result["stages"].values()]
        table.add_row(kind, *(f"{n:,}" if n else "" for n in (*cells, result["kinds"][kind])))
    table.add_section()
    sums = [stage["nbytes"] for stage in result["stages"].values()]
    table.add_row("all", *(f"{n:,}" for n in (*sums, result["nbytes"])))
    console.print(table)
    beside = _table("beside these", "")
    for name, value in _beside_these(result):
        beside.add_row(name, f"{value:,}")
    console.print(beside)
    if "not_measured" in result:
        console.print(f"not measured: {result['not_measured']}")
    elif "kernels" in result:
        console.print(_kernel_table(result["kernels"]))


def _beside_these(result: dict[str, Any]) -> list[tuple[str, int]]:
    waste = result["sector_waste_nbytes"].items()
    gathered = result["gather_nbytes"].items()
    return [
        *((f"unique pages, {kind}", n) for kind, n in result["unique_pages"].items()),
        ("page waste of the cache, bytes", result["page_waste_nbytes"]),
        *((f"sector waste ({SECTOR} B), {kind}, bytes", n) for kind, n in waste),
        ("tails read and written, bytes", result["tail_nbytes"]),
        *((f"temporaries of a gather-based path, {kind}, bytes", n) for kind, n in gathered),
    ]


def _kernel_table(kernels: list[dict[str, Any]]) -> Table:
    table = _table(
        *("MB", "model", "scratch", "DRAM", "read", "written", "ratio", "with scratch"),
        *("sectors", "per record", "L2 hits", "us", "launches"),
    )
    for k in kernels:
        per_record = k["sectors_per_record"]
        table.add_row(
            k["kernel"],
            f"{k['model_nbytes'] / 1e6:,.2f}",
            f"{k['scratch_nbytes'] / 1e6:,.2f}" if k["scratch_nbytes"] else "",
            *(f"{k[f'dram_{way}nbytes'] / 1e6:,.2f}" for way in ("", "read_", "written_")),
            f"{k['ratio']:.2f}",
            f"{k['ratio_with_scratch']:.2f}" if k["scratch_nbytes"] else "",
            f"{k['sectors']:,}",
            "" if per_record is None else f"{per_record:.1f}",
            f"{k['l2_hit_rate']:.0%}",
            f"{k['time_us']:.1f}",
            str(k["launches"]),
        )
    return table


def _table(first: str, *rest: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column(first, no_wrap=True)
    for name in rest:
        table.add_column(name, justify="right")
    return table
