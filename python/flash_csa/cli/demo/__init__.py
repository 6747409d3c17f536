"""`python -m flash_csa demo`: one attention stack, two ways through it, and what it costs."""

import time
from collections.abc import Callable
from dataclasses import asdict, replace
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.progress import Progress
from torch import Tensor

from ...accounting import cache_bytes, layer_costs, scored_entries, spec_bytes_per_token
from ...plan import Layer, LayerPlan
from ...records import RECORDS
from ...reference.rope import cos_sin_table
from .. import output
from . import report
from .compare import compare
from .inputs import REAL_HIDDEN, Hidden, read_hidden, synthetic_hidden
from .model import Projector
from .passes import Pass, chunk_cuts, token_cuts
from .references import References, role_of

MODEL = "v41-flash"
# Last tokens of the prompt that attend; V4-Pro would need a gigabyte more for 64.
PREFILL_QUERIES = {"v41": 64, "v4": 16}
DECODE_STEPS = 16
# Of the records the reference must make byte for byte, see References; of few, all but two.
IDENTICAL = 0.99
FEW = 2
PLAN_FIELDS = ("hidden", "heads", "q_lora_rank", "index_heads", "topk", "pool_blocks", "window")
READ_KINDS = ("main codes", "main scales", "index keys", "window")


def command(
    model: output.Model = MODEL,
    source: Annotated[
        Path | None,
        typer.Option(
            "--input",
            metavar="FILE.safetensors",
            help="BF16 hidden_states [tokens, width]; default: the capture that comes along.",
        ),
    ] = None,
    synthetic: Annotated[
        bool, typer.Option("--synthetic", help="Seeded hidden states, of any length.")
    ] = False,
    tokens: Annotated[int, typer.Option(min=1, max=131072, help="Tokens of the prompt.")] = 4096,
    pool_blocks: Annotated[
        int | None,
        typer.Option(min=1, max=16384, help="Blocks of the candidate pool; default: the model's."),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of weights and synthetic input.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Runs a model's attention on real activations, as a prompt and token by token.

    Exit code 1 if the two differ, or if they differ from the reference.
    """
    if source is not None and synthetic:
        raise ValueError("flash_csa.demo: give --input or --synthetic, not both")
    plan = LayerPlan.from_config(model)
    if pool_blocks is not None:
        if plan.pool_blocks == 0:
            raise ValueError(f"flash_csa.demo: --pool-blocks: {model} has no candidate pool")
        plan = replace(plan, pool_blocks=pool_blocks)
    if synthetic:
        hidden = synthetic_hidden(tokens + DECODE_STEPS, seed)
    else:
        hidden = read_hidden(source or REAL_HIDDEN, tokens)
    with output.progress(quiet=as_json) as bars:
        result = {"model": model} | run(plan, hidden, tokens, seed, bars)
    if as_json:
        output.print_json(result)
    else:
        report.show(result)
    if not result["passed"]:
        raise typer.Exit(1)


def run(plan: LayerPlan, hidden: Hidden, tokens: int, seed: int, bars: Progress) -> dict[str, Any]:
    """The whole demo; returns what `--json` prints, but for the name of the model."""
    began = time.perf_counter()
    rows = tokens + DECODE_STEPS
    queries = min(PREFILL_QUERIES[plan.family], tokens) + DECODE_STEPS
    projector = Projector(plan, hidden.first(rows), queries, seed)
    inputs = projector.run(_bar(bars, "projections", len(plan.layers)))
    tables = {
        "window": cos_sin_table(rows, plan.theta, yarn=False),
        "compressed": cos_sin_table(rows, plan.compressed_theta, yarn=True),
    }
    projected = time.perf_counter()

    def passed(name: str, cuts: list[int], number: int) -> Pass:
        each = Pass(plan, inputs, tables, cuts=cuts, seed=seed + number)
        return each.run(_bar(bars, name, rows))

    prefill = passed("prefill, in chunks", chunk_cuts(inputs), 1)
    decode = passed("token by token", token_cuts(inputs), 2)
    compared = time.perf_counter()
    agreements = compare(prefill, decode)
    references = References(prefill, checked_rows(queries))
    errors = references.layers(_bar(bars, "references", len(plan.layers)))
    identical = references.identical_records()
    ended = time.perf_counter()

    equal = not any(found.different for found in agreements)
    sound = all(error.wrong == 0 and error.of_bound <= 1 for error in errors)
    sound = sound and all(_nearly_all(same) for same in identical.values())
    return {
        "input": {
            "origin": hidden.origin,
            "width": hidden.states.shape[1],
            "seed": seed,
            "repeated": max(0, rows - len(hidden.states)),
        },
        "tokens": rows,
        "prompt_tokens": tokens,
        "decode_steps": DECODE_STEPS,
        "query_rows": queries,
        "uncut_query_rows": min(PREFILL_QUERIES["v41"], tokens) + DECODE_STEPS,
        "plan": {name: getattr(plan, name) for name in PLAN_FIELDS},
        "passes": {"prefill": _passed(prefill), "decode": _passed(decode)},
        "layers": [_layer(prefill, layer) for layer in plan.layers],
        "cache": _cache(prefill),
        "agreement": [asdict(found) for found in agreements],
        "checked_rows": len(references.rows),
        "errors": [asdict(error) for error in errors],
        "identical_records": {kind: _share(same) for kind, same in identical.items()},
        "seconds": {
            "projections": projected - began,
            "prefill": prefill.seconds,
            "decode": decode.seconds,
            "references": ended - compared,
            "total": ended - began,
        },
        "equal": equal,
        "passed": equal and sound,
    }


def _nearly_all(same: Tensor) -> bool:
    return int((~same).sum()) <= max(FEW, (1 - IDENTICAL) * len(same))


def _share(same: Tensor) -> float:
    return same.float().mean().item() if len(same) else 1.0


def _passed(run: Pass) -> dict[str, Any]:
    return {
        "steps": len(run.cuts) - 1,
        "most_rows": max(end - start for start, end in pairwise(run.cuts)),
        "stage_seconds": dict(run.clock.seconds),
    }


def _layer(run: Pass, layer: Layer) -> dict[str, Any]:
    """What the last row of the pass saw of a layer, and the bytes of its records."""
    plan, layout, tokens = run.plan, run.cache.layout, run.inputs.tokens
    visible = tokens // layer.ratio if layer.ratio else 0
    selected = 0
    if layer.index_source is not None:
        selected = int((run.results[layer.index_source].selections[-1][-1] >= 0).sum())
    cost = cache_bytes(layout, [tokens])
    reads = layer_costs(plan, layout.spec, layer, [tokens - 1], [1])
    return {
        "layer": layer.index,
        "role": role_of(layer),
        "ratio": layer.ratio,
        "visible": visible,
        "scored": scored_entries(plan, layer, visible),
        "selected": selected,
        "record_nbytes": sum(r.ideal for r in cost.records if r.source == layer.index),
        "window_nbytes": min(tokens, plan.window) * RECORDS[layout.spec.window].bytes,
        "read_nbytes": sum(
            reads[stage].bytes.get(kind, 0)
            for stage in ("index_select", "reindex", "attend")
            if stage in reads
            for kind in READ_KINDS
        ),
        "builds_pool": layer.builds_pool,
        "reads_pool": layer.reads_pool,
    }


def _cache(run: Pass) -> dict[str, Any]:
    """The global cache, from the tensors that the pass allocated."""
    layout = run.cache.layout
    tensors = [
        pages.data for group in run.cache.groups for pages in (group.main, group.index) if pages
    ]
    nbytes = sum(tensor.nbytes for tensor in tensors)
    room = layout.num_spans * layout.span_tokens
    return {
        "tensors": len(tensors),
        "nbytes": nbytes,
        "tokens": room,
        "bytes_per_token": nbytes / room,
        "padding_bytes_per_token": _padding(run) / room,
        "stated_bytes_per_token": float(spec_bytes_per_token(run.plan, layout.spec)),
        "page_sizes": layout.spec.page_sizes,
    }


def _padding(run: Pass) -> int:
    """Bytes of the pages that no record can use: V4's end at a multiple of their row."""
    pages = [pages for group in run.cache.groups for pages in (group.main, group.index) if pages]
    used = (len(each.data) * each.page_size * RECORDS[each.record].bytes for each in pages)
    return sum(each.data.nbytes for each in pages) - sum(used)


def checked_rows(queries: int) -> list[int]:
    """The first and the last row of the prompt's queries and of the decode steps."""
    return sorted({0, queries - DECODE_STEPS - 1, queries - DECODE_STEPS, queries - 1})


def _bar(bars: Progress, name: str, total: int) -> Callable[..., None]:
    """A new bar; the result advances it."""
    task = bars.add_task(name, total=total)
    return lambda steps=1: bars.advance(task, steps)
