"""The demo's result for people; `--json` holds the same figures."""

from statistics import fmean
from typing import Any

from rich.console import Console

from ...plan import HEAD_DIM, INDEX_DIM, POOL_BLOCK
from .. import output

NAMES = {"v41-flash": "V4.1-Flash", "v4-flash": "V4-Flash", "v4-pro": "V4-Pro"}
ROLES = {
    "window": "attends to its last {window} tokens alone",
    "full": "makes entries of its tokens (ratio tokens each), scores all of them, selects {topk}",
    "contiguous": "makes entries of its tokens and attends to all of them, no index",
    "reindex": "takes a full layer's entries, scores those in the candidate pool, selects anew",
    "reuse": "takes a full layer's entries and the selection of a layer below",
}


def show(result: dict[str, Any]) -> None:
    console = output.console()
    parts = (_setup, _layers, _cache, _agreement, _quantised, _unquantised, _times, _verdict)
    for part in parts:
        part(console, result)


def _roles(result: dict[str, Any]) -> list[str]:
    """The roles that the model has."""
    present = {layer["role"] for layer in result["layers"]}
    return [role for role in ROLES if role in present]


def _setup(console: Console, result: dict[str, Any]) -> None:
    plan, source = result["plan"], result["input"]
    prefill, decode = result["passes"]["prefill"], result["passes"]["decode"]
    pool = f", pool of {plan['pool_blocks']:,} blocks x {POOL_BLOCK}" if plan["pool_blocks"] else ""
    attending, uncut = result["query_rows"], result["uncut_query_rows"]
    cut = f"; {attending} tokens attend instead of {uncut}" if attending < uncut else ""
    name = NAMES.get(result["model"], result["model"])
    facts = {
        "model": f"{name} attention, {len(result['layers'])} layers: {plan['heads']} heads x "
        f"{HEAD_DIM}, {plan['index_heads']} index heads x {INDEX_DIM}, window {plan['window']}, "
        f"top-{plan['topk']}{pool}",
        "simplified": f"hidden {source['width']:,} instead of {plan['hidden']:,}; weights drawn "
        f"(seed {source['seed']}), queries made to resemble keys; every layer is fed the same "
        f"normed hidden states; no output projection, no MLP{cut}",
        "input": f"{source['origin']}: {result['prompt_tokens']:,} tokens, then "
        f"{result['decode_steps']} decode steps"
        + (", on the first tokens again" if source["repeated"] else ""),
        "prefill": f"{prefill['steps']} chunks of at most {prefill['most_rows']} tokens; the last "
        f"{result['query_rows']} tokens attend",
        "decode": f"the same tokens, {decode['steps']:,} steps of one",
        "caches": "one for each, filled with 0xFF before, pages in another order",
    }
    console.print(output.facts(facts))
    _title(console, "What a layer does")
    roles = {role: ROLES[role].format(**plan) for role in _roles(result)}
    console.print(output.facts(roles))


def _title(console: Console, text: str) -> None:
    console.print(f"\n{text}", style="bold underline")


def _layers(console: Console, result: dict[str, Any]) -> None:
    sharing = any(layer["role"] == "reuse" for layer in result["layers"])
    _title(console, f"Layers, as token {result['tokens'] - 1:,} sees them")
    names = (">layer", "role", ">ratio", ">visible", ">scored", ">selected")
    sizes = ("record_nbytes", "window_nbytes", "read_nbytes")
    table = output.table(*names, ">records", ">window", ">read")
    for layer in result["layers"]:
        cells = [layer["ratio"], layer["visible"], layer["scored"], layer["selected"]]
        table.add_row(
            str(layer["layer"]),
            layer["role"],
            *(f"{cell:,}" if cell else "-" for cell in cells),
            *(output.size(layer[name]) if layer[name] else "-" for name in sizes),
            style="bold" if sharing and layer["role"] != "reuse" else None,
        )
    table.add_section()
    totals = [sum(layer[name] for layer in result["layers"]) for name in sizes]
    table.add_row("all", "", "", "", "", "", *map(output.size, totals))
    console.print(table)
    written = "the layer wrote, main and index.\n"
    if sharing:
        written = "a full layer wrote, main and index, for all layers up to the next\nfull one. "
    console.print(
        f"records: entries that {written}window: the layer's own last tokens. "
        "read: what this one token reads."
    )
    if result["plan"]["pool_blocks"]:
        console.print(_pool_note(result))


def _pool_note(result: dict[str, Any]) -> str:
    source = next(layer for layer in result["layers"] if layer["builds_pool"])
    scored = next(layer["scored"] for layer in result["layers"] if layer["reads_pool"])
    blocks, visible = result["plan"]["pool_blocks"], source["visible"]
    pool = f"The candidate pool of layer {source['layer']}, {blocks:,} blocks of {POOL_BLOCK}, "
    if scored == visible:
        return pool + "covers everything here;\n--pool-blocks 128 shows it at work."
    return pool + f"leaves reindex layers\n{scored:,} of {visible:,} entries to score."


def _cache(console: Console, result: dict[str, Any]) -> None:
    cache = result["cache"]
    _title(console, "Global cache")
    console.print(
        f"{cache['nbytes']:,} bytes in {cache['tensors']} tensors of pages, for "
        f"{cache['tokens']:,} tokens: [bold]{cache['bytes_per_token']:,.10g} bytes/token[/bold]"
    )
    if cache["padding_bytes_per_token"]:
        console.print(
            f"{cache['padding_bytes_per_token']:,.10g} of them pad pages; records alone: "
            f"[bold]{cache['stated_bytes_per_token']:,.10g} bytes/token[/bold]"
        )


def _agreement(console: Console, result: dict[str, Any]) -> None:
    _title(console, "Prefill against decode")
    table = output.table("compared", ">number", "")
    for found in result["agreement"]:
        different = found["different"]
        verdict = f"[bold red]{different:,} DIFFER[/]" if different else "[green]all equal[/]"
        table.add_row(found["what"], f"{found['compared']:,}", verdict)
    console.print(table)


def _quantised(console: Console, result: dict[str, Any]) -> None:
    errors, identical = result["errors"], result["identical_records"]
    wrong = sum(error["wrong"] for error in errors)
    rounding = max(error["rounding"] for error in errors)
    of_bound = max(error["of_bound"] for error in errors)
    choosing = sum(error["mode"] in ("full", "reindex") for error in errors)
    rows = result["checked_rows"] * choosing
    _title(console, f"Against the quantised reference (FP64, {_rows(result)})")
    facts = {
        "records": " and ".join(f"{share:.3%} of {kind}" for kind, share in identical.items())
        + " records equal byte for byte (all rows; sums in another order move a few)",
        "selections": f"[bold red]{wrong} of {rows} DIFFER[/]" if wrong else f"all {rows} equal",
        "outputs": f"relative error at most {rounding:.1e}, element error at most {of_bound:.0%} "
        "of what BF16 allows",
    }
    console.print(output.facts(facts))


def _unquantised(console: Console, result: dict[str, Any]) -> None:
    _title(console, f"What FP4 and FP8 cost: against FP32, nothing rounded ({_rows(result)})")
    table = output.table("role", ">layers", ">error", ">shared", ">kept")
    for role in _roles(result):
        errors = [error for error in result["errors"] if error["mode"] == role]
        means = (_mean(errors, name) for name in ("quantisation", "shared", "kept"))
        table.add_row(role, str(len(errors)), *means)
    console.print(table)
    console.print(
        "error: of a row's output, relative. shared: part of a selection that the unquantised\n"
        "indexer selects too. kept: part of the attention over everything visible that falls on\n"
        "window and selection; the rest is what the model gives up by selecting."
    )


def _rows(result: dict[str, Any]) -> str:
    return f"{result['checked_rows']} rows of every layer"


def _mean(errors: list[dict[str, Any]], name: str) -> str:
    values = [error[name] for error in errors if error[name] is not None]
    return f"{fmean(values):.1%}" if values else "-"


def _times(console: Console, result: dict[str, Any]) -> None:
    _title(console, "Seconds")
    seconds, passes = result["seconds"], result["passes"]
    table = output.table("stage", ">prefill", ">token by token")
    stages = {name: run["stage_seconds"] for name, run in passes.items()}
    for stage in stages["prefill"]:
        table.add_row(stage, *(f"{stages[name][stage]:.2f}" for name in stages))
    around = (seconds[name] - sum(stages[name].values()) for name in stages)
    table.add_row("around the stages", *(f"{value:.2f}" for value in around))
    table.add_section()
    table.add_row("pass", *(f"{seconds[name]:.2f}" for name in stages))
    console.print(table)
    console.print(
        f"projections {seconds['projections']:.2f}, comparison and references "
        f"{seconds['references']:.2f}, all {seconds['total']:.2f}"
    )


def _verdict(console: Console, result: dict[str, Any]) -> None:
    if not result["equal"]:
        console.print("\nPrefill and decode DIFFER.", style="bold red")
    elif not result["passed"]:
        console.print("\nResults DIFFER from the quantised reference.", style="bold red")
    else:
        console.print(
            "\nPrefill and decode are equal: records byte for byte, selections exactly.",
            style="bold green",
        )
