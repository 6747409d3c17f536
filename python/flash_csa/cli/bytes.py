"""python -m flash_csa bytes: what a cache costs, stated, allocated and modelled."""

import json
from dataclasses import asdict
from typing import Annotated, Any

import typer
from rich.table import Table

from ..accounting import (
    CacheBytes,
    cache_bytes,
    comparison,
    spec_bytes_per_token,
    step_bytes,
    table_bytes,
)
from ..cache import CacheLayout, CacheSpec
from ..plan import LayerPlan
from ..sizes import workspace_bytes
from . import output

CHUNK = 4096  # rows of the prefill chunk that the transient window is stated for
DRAFTS = 3  # draft tokens of a step that the tail rings are stated for
SMS = 144  # workers that workspaces are stated for: no Hopper has more; CPUs take no scratch
REAL_LIMIT = 1 << 30  # bytes that are really allocated; they are never touched
OPS = ("attend", "index_scores", "select", "index_select", "compress")


def command(
    model: output.Model = "v41-flash",
    context: Annotated[int, typer.Option(help="Tokens of each request.")] = 1_048_576,
    batch: Annotated[int, typer.Option(help="Requests.")] = 1,
    page_size: Annotated[
        int | None, typer.Option(help="Entries of every page, 1 to 256; default: the model's.")
    ] = None,
    main: Annotated[str | None, typer.Option(help="Record of main KV.")] = None,
    index: Annotated[str | None, typer.Option(help="Record of index keys.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Bytes of a model's cache: per layer group and record, and everything beside it."""
    plan = LayerPlan.from_config(model)
    records = {name: value for name, value in (("main", main), ("index", index)) if value}
    spec = CacheSpec.for_plan(plan, page_size=page_size, **records)
    for name, value in (("--context", context), ("--batch", batch)):
        if value < 1:
            raise ValueError(f"flash_csa.bytes: {name} must be at least 1, got {value}")
    result = report(plan, spec, context, batch) | {"model": model}
    if as_json:
        print(json.dumps(result, indent=1))
    else:
        _print(plan, result)


def report(plan: LayerPlan, spec: CacheSpec, context: int, batch: int = 1) -> dict[str, Any]:
    """The figures of `batch` requests of `context` tokens, in bytes, as JSON holds them.

    bytes_per_token: stated. tokens, nbytes_total, nbytes_per_token: of main and index pages
    really allocated, for whole spans; model_nbytes_total: the same pages by the model alone.
    ideal_nbytes, allocated_nbytes: complete entries and whole pages at this context.
    """

    def layout(**sizes: int) -> CacheLayout:
        return spec.layout(plan, max_tokens=context, max_requests=batch, **sizes)

    def cost(**sizes: int) -> CacheBytes:
        return cache_bytes(layout(**sizes), [context] * batch)

    decode = cost()
    return {
        "context": context,
        "batch": batch,
        "spec": asdict(spec),
        "bytes_per_token": float(spec_bytes_per_token(plan, spec)),
        **_really_allocated(plan, spec, decode.allocated, context, batch),
        "ideal_nbytes": decode.ideal,
        "allocated_nbytes": decode.allocated,
        "padding_nbytes": decode.allocated - decode.ideal,
        "records": [
            {
                "group": record.group,
                "layers": list(plan.groups[record.group].layers),
                "ratio": plan.groups[record.group].ratio,
                "kind": record.kind,
                "record": record.record,
                "entries_per_token": float(record.entries_per_token),
                "bytes_per_token": float(record.bytes_per_token),
                "ideal_nbytes": record.ideal,
                "allocated_nbytes": record.allocated,
                "share": record.ideal / decode.ideal if decode.ideal else 0.0,
            }
            for record in decode.records
        ],
        "window_nbytes": decode.window_ideal,
        "window_ring_nbytes": decode.window_allocated,
        "window_transient_nbytes": cost(max_rows=CHUNK).window_allocated,
        "tail_nbytes": decode.tails_ideal,
        "tail_ring_nbytes": cost(max_draft=DRAFTS).tails_allocated,
        "step_nbytes": step_bytes(layout(), batch),
        "table_nbytes": table_bytes(layout()),
        "workspace_nbytes": {op: _workspace(op, layout(), batch) for op in OPS},
        "comparison": {name: float(value) for name, value in comparison()},
    }


def _really_allocated(
    plan: LayerPlan, spec: CacheSpec, needed: int, context: int, batch: int
) -> dict[str, Any]:
    """Pages of this context, or of one span a request where they would be too many."""
    tokens = context if needed <= REAL_LIMIT else 1
    layout = spec.layout(plan, max_tokens=tokens, max_requests=batch)
    pages = layout.allocate().nbytes
    total = pages["main"] + pages["index"]
    whole = layout.num_spans * layout.span_tokens
    return {
        "tokens": whole,
        "nbytes_total": total,
        "nbytes_per_token": total / whole,
        "model_nbytes_total": cache_bytes(layout, [tokens] * batch).allocated,
    }


def _workspace(op: str, layout: CacheLayout, rows: int) -> int:
    plan = layout.plan
    return workspace_bytes(
        op,
        max_rows=rows,
        heads=plan.heads,
        k=plan.topk,
        max_entries=max((layout.max_entries(ratio) for ratio in plan.ratios), default=0),
        pool_blocks=plan.pool_blocks,
        num_sms=SMS,
    )


def _print(plan: LayerPlan, result: dict[str, Any]) -> None:
    console = output.console()
    console.print(
        f"{result['model']}: {result['bytes_per_token']:g} bytes/token; "
        f"{result['batch']} x {result['context']:,} tokens"
    )
    table = _table("layers", "ratio", "record", "entries/token", "B/token")
    for name in ("ideal", "allocated", "share"):
        table.add_column(name, justify="right")
    for record in result["records"]:
        layers = record["layers"]
        table.add_row(
            f"{layers[0]}-{layers[-1]}" if len(layers) > 1 else str(layers[0]),
            str(record["ratio"]),
            record["record"],
            f"{record['entries_per_token']:g}",
            f"{record['bytes_per_token']:g}",
            output.size(record["ideal_nbytes"], 6),
            output.size(record["allocated_nbytes"], 6),
            f"{record['share']:.1%}",
        )
    table.add_section()
    table.add_row(
        "all",
        "",
        "",
        "",
        f"{result['bytes_per_token']:g}",
        output.size(result["ideal_nbytes"], 6),
        output.size(result["allocated_nbytes"], 6),
        "100.0%",
    )
    console.print(table)
    console.print(
        f"{result['nbytes_total']:,} B of pages allocated for {result['tokens']:,} tokens: "
        f"{result['nbytes_per_token']:g} bytes/token (model {result['model_nbytes_total']:,} B)",
        soft_wrap=True,
    )
    beside = _table("beside the global cache", "bytes")
    for name, size in _beside(plan, result):
        beside.add_row(name, f"{size:,}")
    console.print(beside)
    others = _table("cache", "bytes/token")
    for name, value in result["comparison"].items():
        others.add_row(name, f"{value:,.10g}")
    console.print(others)


def _beside(plan: LayerPlan, result: dict[str, Any]) -> list[tuple[str, int]]:
    rows = f"{result['batch']} row{'s' * (result['batch'] > 1)}"
    workspaces = result["workspace_nbytes"].items()
    return [
        (f"window, {len(plan.layers)} layers x {plan.window} tokens", result["window_nbytes"]),
        ("window, whole pages", result["window_ring_nbytes"]),
        (f"window, while chunks of {CHUNK} rows run", result["window_transient_nbytes"]),
        ("tails, rows of open groups", result["tail_nbytes"]),
        (f"tails, rings with {DRAFTS} drafts", result["tail_ring_nbytes"]),
        *((f"{name}, {rows}", size) for name, size in result["step_nbytes"].items()),
        *result["table_nbytes"].items(),
        *((f"workspace of {op}, {SMS} SMs (no Hopper has more)", size) for op, size in workspaces),
    ]


def _table(first: str, *rest: str) -> Table:
    table = Table(box=None, header_style="bold", padding=(0, 1))
    table.add_column(first)
    for name in rest:
        table.add_column(name, justify="right")
    return table
