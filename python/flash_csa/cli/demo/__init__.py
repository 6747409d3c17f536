"""`python -m flash_csa demo`: one attention stack, two ways through it, and what it costs."""

import time
from collections.abc import Callable
from dataclasses import asdict, replace
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.progress import Progress

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
from .references import References

MODEL = "v41-flash"
PREFILL_QUERIES = 64  # last tokens of the prompt that attend
DECODE_STEPS = 16
IDENTICAL = 0.99  # of the records the reference must make byte for byte; see References
PLAN_FIELDS = ("hidden", "heads", "q_lora_rank", "index_heads", "topk", "pool_blocks", "window")
READ_KINDS = ("main codes", "main scales", "index keys", "window")


def command(
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
    """Runs V4.1-Flash attention on real activations, as a prompt and token by token.

    Exit code 1 if the two differ, or if they differ from the reference.
    """
    if source is not None and synthetic:
        raise ValueError("flash_csa demo: give --input or --synthetic, not both")
    plan = LayerPlan.from_config(MODEL)
    if pool_blocks is not None:
        plan = replace(plan, pool_blocks=pool_blocks)
    if synthetic:
        hidden = synthetic_hidden(tokens + DECODE_STEPS, seed)
    else:
        hidden = read_hidden(source or REAL_HIDDEN, tokens)
    with output.progress(quiet=as_json) as bars:
        result = run(plan, hidden, tokens, seed, bars)
    if as_json:
        output.print_json(result)
    else:
        report.show(result)
    if not result["passed"]:
        raise typer.Exit(1)


def run(plan: LayerPlan, hidden: Hidden, tokens: int, seed: int, bars: Progress) -> dict[str, Any]:
    """The whole demo; returns what `--json` prints."""
    began = time.perf_counter()
    rows, queries = tokens + DECODE_STEPS, min(PREFILL_QUERIES, tokens) + DECODE_STEPS
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
    sound = sound and min(identical.values()) >= IDENTICAL
    return {
        "model": MODEL,
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
        "plan": {name: getattr(plan, name) for name in PLAN_FIELDS},
        "passes": {"prefill": _passed(prefill), "decode": _passed(decode)},
        "layers": [_layer(prefill, layer) for layer in plan.layers],
        "cache": _cache(prefill),
        "agreement": [asdict(found) for found in agreements],
        "checked_rows": len(references.rows),
        "errors": [asdict(error) for error in errors],
        "identical_records": identical,
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
    if layer.ratio:
        selected = int((run.results[layer.index_source].selections[-1][-1] >= 0).sum())
    cost = cache_bytes(layout, [tokens])
    reads = layer_costs(plan, layout.spec, layer, [tokens - 1], [1])
    return {
        "layer": layer.index,
        "role": layer.mode,
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
        "stated_bytes_per_token": float(spec_bytes_per_token(run.plan, layout.spec)),
        "page_sizes": layout.spec.page_sizes,
    }


def checked_rows(queries: int) -> list[int]:
    """The first and the last row of the prompt's queries and of the decode steps."""
    return sorted({0, queries - DECODE_STEPS - 1, queries - DECODE_STEPS, queries - 1})


def _bar(bars: Progress, name: str, total: int) -> Callable[..., None]:
    """A new bar; the result advances it."""
    task = bars.add_task(name, total=total)
    return lambda steps=1: bars.advance(task, steps)
