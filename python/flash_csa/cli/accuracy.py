"""`python -m flash_csa accuracy`: what quantisation, selection and sharing cost."""

import importlib
import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console

from ..accuracy import EXPERIMENTS, Shape, html, summary
from ..accuracy.backends import Formula
from ..accuracy.baseline import TOLERANCE, Regression, comparable, load, regressions
from ..accuracy.case import FORMULA
from ..accuracy.compiled import Compiled
from ..accuracy.inputs import CAPTURE, SETS
from ..accuracy.runner import Settings, Unit, run, units
from . import output

FULL_CONTEXTS = (4096, 16_384, 65_536, 131_072)
CUDA_CONTEXTS = (*FULL_CONTEXTS, 1_048_576)
BRIEF = {  # experiment: variants of the terminal's table; none: all
    "kv": ("BF16", "E4M3 / UE8M0 per 32", "E4M3 / UE8M0 per 64 + 64 BF16", "E2M1 / E4M3 per 16",
           "E2M1 / UE8M0 per 32", "E4M3 / FP32 per 128 + 64 BF16"),
}  # fmt: skip


def command(
    inputs: Annotated[
        list[str] | None,
        typer.Option(
            "--input",
            metavar="SET|FILE",
            help=f"{CAPTURE} (shipped), {', '.join(SETS)} or a capture file; may be repeated.",
        ),
    ] = None,
    experiments: Annotated[
        list[str] | None,
        typer.Option("--experiment", help=f"{', '.join(EXPERIMENTS)}; may be repeated."),
    ] = None,
    context: Annotated[
        list[int] | None, typer.Option(min=256, help="Tokens; may be repeated.")
    ] = None,
    full: Annotated[
        bool, typer.Option("--full", help="All experiments, all sets, all contexts; hours.")
    ] = False,
    kernels: Annotated[
        bool, typer.Option("--kernels", help="Also through the compiled ops of --device.")
    ] = False,
    backend: Annotated[
        str | None,
        typer.Option(metavar="MODULE:CLASS", help="Also through a back end of your own."),
    ] = None,
    baseline: Annotated[
        Path | None, typer.Option(help="A results.json; exit code 1 if something is worse now.")
    ] = None,
    tolerance: Annotated[
        float, typer.Option(min=0.0, help="Relative change that counts as worse.")
    ] = TOLERANCE,
    out: Annotated[
        Path, typer.Option(help="Folder of results.json, report.html and the units done.")
    ] = Path("accuracy"),
    rows: Annotated[int, typer.Option(min=2, help="Query rows of a draw.")] = 32,
    draws: Annotated[int, typer.Option(min=1, help="Draws of weights and sets.")] = 2,
    layers: Annotated[int, typer.Option(min=2, help="Layers of a drawn group.")] = 8,
    heads: Annotated[int, typer.Option(min=1, help="Attention heads of a drawn group.")] = 16,
    topk: Annotated[int, typer.Option(min=1, max=65_536, help="Entries that a row selects.")] = 512,
    seed: Annotated[int, typer.Option(min=0, max=2**32 - 1, help="Of the first draw.")] = 0,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    as_json: Annotated[bool, typer.Option("--json", help="Print results.json.")] = False,
) -> None:
    """Measures what FP4/FP8 KV, FP4/FP8 index keys, the pool and reuse cost, each by itself.

    Exit code 1 if a known truth fails or a result is worse than the baseline's.

    An interrupted run goes on where it was when it is started again.
    """
    before = None if baseline is None else load(baseline)
    settings = replace(
        _defaults(full, device),
        k=topk,
        draws=draws,
        seed=seed,
        shape=Shape(layers=layers, heads=heads, rows=rows),
        backends=tuple(dict.fromkeys(filter(None, ("formula", kernels and "compiled", backend)))),
    )
    given = {"inputs": inputs, "contexts": context, "experiments": experiments}
    settings = replace(settings, **{k: tuple(dict.fromkeys(v)) for k, v in given.items() if v})
    _check(settings, before)
    result = _run(settings, out, quiet=as_json)
    worse = None if before is None else regressions(result, before, tolerance)
    _write(out, result, worse)
    if as_json:
        output.print_json(result)
    else:
        show(output.console(), result, worse, out)
    if worse or not all(check["holds"] for check in result["checks"]):
        raise typer.Exit(1)


def make_backend(name: str) -> Formula:
    """A back end by its name: formula, compiled or module:Class."""
    if name in ("formula", "compiled"):
        return FORMULA if name == "formula" else Compiled()
    module, _, attribute = name.partition(":")
    try:
        made = getattr(importlib.import_module(module), attribute)()
    except Exception as error:  # the module is the user's
        raise ValueError(f"flash_csa.accuracy: --backend {name}: {error}") from error
    if not isinstance(made, Formula):
        raise ValueError(
            f"flash_csa.accuracy: --backend must be a subclass of accuracy.Formula, got {name}"
        )
    made.name = name
    return made


def _check(settings: Settings, before: dict[str, Any] | None) -> None:
    """What can be said before anything is measured."""
    for name in settings.experiments:
        if name not in EXPERIMENTS:
            raise ValueError(
                f"flash_csa.accuracy: --experiment must be one of {', '.join(EXPERIMENTS)}, "
                f"got {name}"
            )
    _check_device(settings.device)
    for name in settings.backends:
        make_backend(name)
    if before is not None:
        comparable(asdict(settings), before)


def _check_device(name: str) -> None:
    if name == "cpu":
        return
    try:
        if torch.device(name).type == "cuda" and torch.cuda.is_available():
            torch.empty(0, device=name)
            return
    except RuntimeError:
        pass
    present = "cpu or a CUDA device" if torch.cuda.is_available() else "cpu (there is no GPU here)"
    raise ValueError(f"flash_csa.accuracy: --device must be {present}, got {name!r}")


def _defaults(full: bool, device: str) -> Settings:
    if not full:
        return Settings(device=device)
    return Settings(
        inputs=(CAPTURE, *SETS),
        contexts=CUDA_CONTEXTS if device.startswith("cuda") else FULL_CONTEXTS,
        experiments=tuple(EXPERIMENTS),
        device=device,
    )


def _run(settings: Settings, out: Path, *, quiet: bool) -> dict[str, Any]:
    planned = units(settings)
    with output.progress(quiet=quiet) as bars:
        task = bars.add_task(planned[0].label, total=len(planned))
        names = [*(unit.label for unit in planned[1:]), "report"]

        def advance(unit: Unit, resumed: bool) -> None:
            bars.update(task, advance=1, description=names.pop(0))

        return run(settings, out, make_backend, advance)


def _write(out: Path, result: dict[str, Any], worse: list[Regression] | None) -> None:
    page = html.page(result, worse)
    try:
        (out / "results.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        (out / "report.html").write_text(page, encoding="utf-8")
    except OSError as error:
        raise ValueError(f"flash_csa.accuracy: cannot write {out}: {error}") from error


def show(
    console: Console, result: dict[str, Any], worse: list[Regression] | None, out: Path
) -> None:
    """The terminal's report: one table a view, checks that fail, what regressed."""
    for view in summary.views(result):
        _view(console, result, view)
    lengths = summary.lengths(result)
    if lengths:
        keys = ("declared", "longest_measured", "failure_free", "effective")
        table = output.table("planted evidence", *(f">{k.replace('_', ' ')}" for k in keys))
        for each in lengths:
            cells = (f"{each[k]:,}" for k in keys)
            table.add_row(f"{each['variant']} ({each['backend']})", *cells)
        console.print(table)
    if result["checks"]:
        console.print(summary.headline(result), soft_wrap=True)
    for axis, held, total in summary.stages(result):
        console.print(f"  {held:3} of {total:3}  {axis}", highlight=False)
    for check in summary.failures(result):
        console.print(
            f"FAILS  {check['axis']}: {check['name']} ({check['backend']}): "
            f"{summary.number(check['value'])}, allowed {summary.number(check['low'])} to "
            f"{summary.number(check['high'])}",
            soft_wrap=True,
        )
    if worse is not None:
        axes = ", ".join(dict.fromkeys(r.axis for r in worse))
        console.print(
            f"{len(worse)} results worse than the baseline" + (f": {axes}" if axes else "")
        )
        for each in worse[:10]:
            console.print(
                f"  {each.axis}: {each.what}: {summary.number(each.baseline)} -> "
                f"{summary.number(each.value)}",
                soft_wrap=True,
            )
    console.print(f"{out / 'report.html'}, {out / 'results.json'}", soft_wrap=True)


def _view(console: Console, result: dict[str, Any], view: tuple) -> None:
    experiment, name, context, backend = view
    found = summary.rows(result, view)
    brief = BRIEF.get(experiment)
    found = [row for row in found if brief is None or row["variant"] in brief]
    if not found:
        return
    facts = [f for f in summary.FACTS if any(f in row["facts"] for row in found)]
    metrics = [m for m in summary.SHOWN[experiment] if any(m in row for row in found)][:3]
    rows = next(row[m]["n"] for row in found for m in metrics if m in row)
    told = result["experiments"][experiment]
    table = output.table(
        f"{rows} rows",
        *(f">{summary.FACTS[f]}" for f in facts),
        *(f">{m}" for m in metrics),
        title=f"{told['title']}: {name}, {context:,} tokens, {backend}",
    )
    for row in found:
        cells = [summary.number(row["facts"].get(f)) for f in facts]
        cells += [summary.estimate(row[m]) if m in row else "" for m in metrics]
        table.add_row(row["variant"], *cells)
    console.print(table)
    console.print(f"held fixed: {told['held']}\n", style="dim")
