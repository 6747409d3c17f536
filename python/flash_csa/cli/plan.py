"""`python -m flash_csa plan`: roles, sources, and what every layer costs in a prefill and a decode
step."""

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Annotated, Any

import typer
from rich.console import Console

from ..accounting import (
    Cost,
    attended_entries,
    cache_bytes,
    comparisons,
    layer_costs,
    scored_entries,
    spec_bytes_per_token,
    step_costs,
    table_bytes,
)
from ..cache import CacheSpec
from ..configs import BY_NAME
from ..plan import Layer, LayerPlan
from ..records import RECORDS
from . import output

CHUNK = 4096  # rows of a prefill step
WIDTH = 130
READERS = ("index_select", "reindex", "attend")  # the stages that read records
RECORD_KINDS = ("main codes", "main scales", "index keys", "window")


def command(
    config: Annotated[
        str | None, typer.Argument(metavar="|".join((*BY_NAME, "CONFIG.JSON")), help="The model.")
    ] = None,
    model: Annotated[str | None, typer.Option(help="The same, as other commands take it.")] = None,
    context: Annotated[
        int, typer.Option(min=1, help="Tokens of the request after the step.")
    ] = 131_072,
    rows: Annotated[int, typer.Option(min=1, help="Rows of a prefill step.")] = CHUNK,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """What every layer of a model computes, reads and keeps at a context length."""
    if (config is None) == (model is None):
        got = "none" if config is None else f"{config} and --model {model}"
        names = ", ".join(BY_NAME)
        raise ValueError(f"flash_csa.plan: one of {names} or a config.json must follow, got {got}")
    config = config or model
    plan = LayerPlan.from_config(config)
    result = {"config": config} | report(plan, context, min(rows, context))
    if as_json:
        output.print_json(result)
    else:
        _print(result)


def report(plan: LayerPlan, context: int, rows: int) -> dict[str, Any]:
    """As JSON holds it. decode: a step of the last token; prefill: of the last `rows` tokens.

    comparisons: index keys that the last token is compared with, over all layers; flat: if every
    indexed layer scored all visible entries. record_nbytes: main, index and window records read.
    """
    spec = CacheSpec.for_plan(plan)
    scored, flat = comparisons(plan, context)
    cache = cache_bytes(spec.layout(plan, max_tokens=context), [context])
    tables = table_bytes(spec.layout(plan, max_tokens=context))
    return {
        "context": context,
        "rows": rows,
        "spec": asdict(spec),
        "layers": [_layer(plan, spec, layer, context, rows) for layer in plan.layers],
        "comparisons": scored,
        "flat_comparisons": flat,
        "attended": sum(
            attended_entries(plan, layer, _visible(layer, context)) for layer in plan.layers
        ),
        "decode": _step(plan, spec, context, 1),
        "prefill": _step(plan, spec, context, rows),
        "memory": {
            "bytes_per_token": float(spec_bytes_per_token(plan, spec)),
            "cache_nbytes": cache.ideal,
            "cache_pages_nbytes": cache.allocated,
            "window_nbytes": cache.window_ideal,
            "tail_nbytes": cache.tails_ideal,
            **{f"{name.replace('/', ' ')}_nbytes": size for name, size in tables.items()},
        },
    }


def _visible(layer: Layer, context: int) -> int:
    return context // layer.ratio if layer.ratio else 0


def _layer(
    plan: LayerPlan, spec: CacheSpec, layer: Layer, context: int, rows: int
) -> dict[str, Any]:
    visible = _visible(layer, context)
    steps = {"decode": 1, "prefill": rows}
    costs = {name: layer_costs(plan, spec, layer, [context - n], [n]) for name, n in steps.items()}
    return {
        "layer": layer.index,
        "role": "contiguous" if layer.contiguous else layer.mode,
        "ratio": layer.ratio,
        "kv_source": layer.kv_source,
        "index_source": layer.index_source,
        "pool": "builds" if layer.builds_pool else "reads" if layer.reads_pool else None,
        "visible": visible,
        "compared": scored_entries(plan, layer, visible),
        "attended": attended_entries(plan, layer, visible),
        **{f"{name}_record_nbytes": _read(cost, *RECORD_KINDS) for name, cost in costs.items()},
        **{f"{name}_nbytes": sum(c.nbytes for c in cost.values()) for name, cost in costs.items()},
    }


def _read(costs: Mapping[str, Cost], *kinds: str) -> int:
    """Bytes of records that the stages read, of the kinds given."""
    read = [costs[stage].bytes for stage in READERS if stage in costs]
    return sum(nbytes.get(kind, 0) for nbytes in read for kind in kinds)


def _step(plan: LayerPlan, spec: CacheSpec, context: int, rows: int) -> dict[str, Any]:
    costs = step_costs(plan, spec, [context - rows], [rows])
    total = sum(costs.values(), Cost())
    return {
        "rows": rows,
        "nbytes": total.nbytes,
        "record_nbytes": _read(costs, *RECORD_KINDS),
        "main_records": _read(costs, "main codes", "main scales") // RECORDS[spec.main].bytes,
        "index_records": _read(costs, "index keys") // RECORDS[spec.index].bytes,
        "window_records": _read(costs, "window") // RECORDS[spec.window].bytes,
        "flops": total.flops,
        "stage_nbytes": {stage: cost.nbytes for stage, cost in costs.items()},
    }


def _print(result: dict[str, Any]) -> None:
    console = Console(width=max(WIDTH, output.console().width), highlight=False)
    memory = result["memory"]
    console.print(
        f"{result['config']}: {memory['bytes_per_token']:g} bytes/token, "
        f"{result['context']:,} tokens"
    )
    table = output.table(
        *("layers", "role", ">m", ">KV of", ">index of", "pool", ">visible", ">compared"),
        *(">attended", ">read, decode", f">read, {result['rows']:,} rows"),
    )
    for first, last, row in _runs(result["layers"]):
        table.add_row(
            str(first) if first == last else f"{first}-{last}",
            row["role"],
            *(
                "" if row[k] is None else str(row[k])
                for k in ("ratio", "kv_source", "index_source", "pool")
            ),
            *(f"{row[k]:,}" if row[k] else "" for k in ("visible", "compared", "attended")),
            *(output.size(row[f"{step}_record_nbytes"]) for step in ("decode", "prefill")),
        )
    console.print(table)
    share = result["comparisons"] / max(1, result["flat_comparisons"])
    step, chunk = result["decode"], result["prefill"]
    facts = {
        "comparisons": f"{result['comparisons']:,} of {result['flat_comparisons']:,} flat "
        f"({share:.2%}), for the last token",
        "main entries attended": f"{result['attended']:,}",
        "decode step": _step_text(step),
        f"prefill step, {chunk['rows']:,} rows": _step_text(chunk),
        "cache": f"{memory['cache_nbytes']:,} B ({output.size(memory['cache_nbytes'])}), in pages "
        f"{memory['cache_pages_nbytes']:,} B",
        "window, tails": f"{memory['window_nbytes']:,} B, {memory['tail_nbytes']:,} B",
    }
    console.print(output.facts(facts))


def _step_text(step: dict[str, Any]) -> str:
    return (
        f"{step['nbytes']:,} B, of these {step['record_nbytes']:,} B of records "
        f"({step['main_records']:,} main, {step['index_records']:,} index, "
        f"{step['window_records']:,} window)"
    )


def _runs(layers: list[dict[str, Any]]) -> Iterator[tuple[int, int, dict[str, Any]]]:
    """First and last layer of neighbours that differ in nothing but their number."""
    start = 0
    for number, row in enumerate(layers):
        following = layers[number + 1] if number + 1 < len(layers) else {}
        if {**row, "layer": 0} != {**following, "layer": 0}:
            yield start, number, row
            start = number + 1
