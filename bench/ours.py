"""What each case times of this library: inputs built once, then one closure per instance."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

import flash_csa as fc
from flash_csa.plan import HEAD_DIM, INDEX_DIM

from .cases import PAGE, WINDOW, Case
from .inputs import Inputs

Call = Callable[[], Any]
EPS = 1e-6


@dataclass
class Work:
    """calls: one per instance. scratch_bytes: of the workspace they share.

    content: the inputs, for the peer's builder.
    """

    calls: list[Call]
    scratch_bytes: int = 0
    content: dict[str, Any] = field(default_factory=dict)


def build(case: Case, inputs: Inputs, count: int) -> Work:
    """`count` instances of a case, each with inputs of its own."""
    inputs.restart()
    return _BUILDERS[case.kind](case, inputs, count)


# Attend


def _decode_batch(rows: int, records: int, device) -> fc.Batch:
    return fc.Batch.decode([records - 1] * rows, device=device)


def _attend(case: Case, inputs: Inputs, count: int) -> Work:
    rows, heads, k, records = (case[key] for key in ("rows", "heads", "k", "records"))
    if case.kind == "attend_prefill":
        batch = fc.Batch.build([records - rows], [rows], device=inputs.device)
    else:
        batch = _decode_batch(rows, records, inputs.device)
    schedule = inputs.schedule(batch, 3, max_entries=[records], k=k, heads=heads)
    main_table = inputs.permutation(records // PAGE)
    window_lengths = torch.full_like(batch.positions, WINDOW)
    lengths = torch.full_like(batch.positions, k)

    def lists() -> dict[str, Any]:
        positions = inputs.ascending(rows, k, records)
        slots = inputs.slots(positions, main_table)
        window = _windows(case, inputs, batch)
        return {
            "selection": fc.Selection(positions, slots, lengths),
            "window": fc.Window(window, window_lengths),
        }

    return _attend_work(case, inputs, count, batch, schedule, lists)


def _windows(case: Case, inputs: Inputs, batch: fc.Batch) -> Tensor:
    """i32 [R, 128]: of decode rows contiguous slots, of a chunk those of its last 128 tokens."""
    rows, windows = case["rows"], case["windows"]
    if case.kind == "attend_prefill":
        positions = torch.arange(WINDOW, dtype=torch.int32, device=inputs.device) - WINDOW + 1
        positions = (batch.positions[:, None] + positions).clamp(min=0) % windows
        return inputs.slots(positions, inputs.permutation(windows // PAGE))
    first = inputs.permutation(windows // WINDOW)[:rows] * WINDOW
    return first[:, None] + inputs.arange(WINDOW)


def _attend_contiguous(case: Case, inputs: Inputs, count: int) -> Work:
    rows, heads, entries, records = (case[key] for key in ("rows", "heads", "entries", "records"))
    ratio = 128
    batch = fc.Batch.decode([entries * ratio - 1] * rows, device=inputs.device)
    shape = {"ratios": [ratio], "max_entries": [entries], "contiguous_ratios": [ratio]}
    schedule = inputs.schedule(batch, 4, heads=heads, **shape)
    pages = inputs.permutation(records // PAGE)
    tables = iter(pages[: count * rows * (entries // PAGE)].view(count, rows, entries // PAGE))
    n_vis = torch.full_like(batch.positions, entries)
    window_lengths = torch.full_like(batch.positions, WINDOW)

    def lists() -> dict[str, Any]:
        return {
            "contiguous": (next(tables).contiguous(), batch.row_request, n_vis),
            "window": fc.Window(_windows(case, inputs, batch), window_lengths),
        }

    return _attend_work(case, inputs, count, batch, schedule, lists)


def _attend_work(
    case: Case,
    inputs: Inputs,
    count: int,
    batch: fc.Batch,
    schedule: Tensor,
    lists: Callable[[], dict[str, Any]],
) -> Work:
    rows, heads = case["rows"], case["heads"]
    shared = {
        "main": inputs.pages(case["record"], case["records"]),
        "window_pages": inputs.pages(case["window_record"], case["windows"]),
        "sink": inputs.f32(heads),
    }
    workspace = _workspace("attend", inputs, max_rows=rows, heads=heads)
    derotate = None
    if case["derotate"]:
        positions = batch.positions % len(inputs.cos_sin())
        derotate = (positions, inputs.cos_sin())
    instances = [
        {
            "q": inputs.q(rows, heads),
            "out": inputs.empty(rows, heads, HEAD_DIM, dtype=torch.bfloat16),
            "lse": inputs.empty(rows, heads, dtype=torch.float32),
            **lists(),
        }
        for _ in range(count)
    ]
    calls = [
        partial(
            fc.attend,
            **shared,
            **instance,
            derotate=derotate,
            schedule=schedule,
            workspace=workspace,
        )
        for instance in instances
    ]
    return Work(calls, workspace.nbytes, {"shared": shared, "instances": instances})


# Index, select


def _index_batch(case: Case, inputs: Inputs) -> fc.Batch:
    """Rows that see `entries` entries each: in a chunk because the table holds no more."""
    rows, requests, entries = (case[key] for key in ("rows", "requests", "entries"))
    start = entries - 1 if rows == requests else entries
    return fc.Batch.build([start] * requests, [rows // requests] * requests, device=inputs.device)


def _index_tables(case: Case, inputs: Inputs, count: int) -> list[Tensor]:
    """Block tables, i32 [requests, pages]; those of whole scans share no page."""
    shape = (case["requests"], case["entries"] // PAGE)
    each = shape[0] * shape[1]
    if case.kind == "select":  # reads no page
        return [inputs.permutation(each).view(shape) for _ in range(count)]

    def pages() -> Tensor:
        return inputs.permutation(case["records"] // PAGE)

    if case.kind == "reindex":
        return [pages()[:each].view(shape).clone() for _ in range(count)]
    cut = pages()
    return [cut[i * each :][:each].view(shape).clone() for i in range(count)]


def _index(case: Case, inputs: Inputs, count: int) -> Work:
    rows, entries, heads, k = (case[key] for key in ("rows", "entries", "heads", "k"))
    reindex = case.kind == "reindex"
    batch = _index_batch(case, inputs)
    shape = {"max_entries": [entries], "k": k, "index_heads": heads}
    if reindex:
        shape |= {"pool_blocks": case["pool_blocks"], "pool_ratio": 1}
    schedule = inputs.schedule(batch, 2 if reindex else 1, **shape)
    pages = inputs.pages(case["record"], case["records"], wide=case["wide"])
    op = "index_scores" if case.kind == "index_scores" else "index_select"
    builds = 0 if reindex else case["pool_blocks"]
    bounds = {"max_rows": rows, "k": k, "max_entries": entries, "pool_blocks": builds}
    workspace = _workspace(op, inputs, **bounds)
    instances = []
    for table in _index_tables(case, inputs, count):
        q, query = inputs.index_query(rows, heads, case["record"])
        instance = {"q": q, "query": query, "block_table": table}
        instance["weights"] = inputs.f32(rows, heads) / 64
        instance["pool"] = inputs.pool(rows, case["pool_blocks"], entries) if reindex else None
        instances.append(instance)

    def call(instance: dict[str, Any]) -> Call:
        arguments = {name: value for name, value in instance.items() if name != "q"}
        arguments |= {"index": pages, "batch": batch, "schedule": schedule, "ratio": 1}
        if op == "index_scores":
            out = inputs.empty(rows, entries, dtype=torch.float32)
            return partial(fc.index_scores, **arguments, workspace=workspace, out=out)
        pool = fc.Pool.empty(rows, builds, inputs.device) if builds else None
        out = (fc.Selection.empty(rows, k, inputs.device), pool)
        arguments |= {"k": k, "pool_blocks": builds}
        return partial(fc.index_select, **arguments, workspace=workspace, out=out)

    content = {"instances": instances, "batch": batch}
    return Work([call(instance) for instance in instances], workspace.nbytes, content)


def _select(case: Case, inputs: Inputs, count: int) -> Work:
    rows, entries, k = (case[key] for key in ("rows", "entries", "k"))
    batch = _index_batch(case, inputs)
    schedule = inputs.schedule(batch, 1, max_entries=[entries], k=k)
    bounds = {"max_rows": rows, "k": k, "max_entries": entries}
    workspace = _workspace("select", inputs, **bounds)
    tables = _index_tables(case, inputs, count)
    scores = [inputs.f32(rows, entries) for _ in range(count)]
    calls = [
        partial(
            fc.select,
            scores[i],
            batch,
            k,
            schedule,
            block_table=tables[i],
            ratio=1,
            page_size=PAGE,
            workspace=workspace,
            out=fc.Selection.empty(rows, k, inputs.device),
        )
        for i in range(count)
    ]
    return Work(calls, workspace.nbytes, {"scores": scores})


# Store, compress


def _rope_store(case: Case, inputs: Inputs, count: int) -> Work:
    tokens, heads, records = (case[key] for key in ("tokens", "heads", "records"))
    decode = tokens <= 256
    cos_sin = inputs.cos_sin()
    window = inputs.pages(case["record"], records)
    eps = EPS if case["q_norm"] else None
    instances = []
    for _ in range(count):
        if decode:
            positions = inputs.integers(len(cos_sin), tokens)
            slots = inputs.permutation(records)[:tokens].clone()
        else:
            positions = inputs.arange(tokens)
            slots = inputs.slots(positions, inputs.permutation(records // PAGE))
        instances.append(
            {
                "q": inputs.q(tokens, heads),
                "kv": inputs.bf16(tokens, HEAD_DIM),
                "slots": slots,
                "positions": positions,
            }
        )
    calls = [
        partial(fc.rope_store, **instance, window=window, cos_sin=cos_sin, q_norm_eps=eps)
        for instance in instances
    ]
    return Work(calls, 0, {"instances": instances, "cos_sin": cos_sin})


def _quantize_query(case: Case, inputs: Inputs, count: int) -> Work:
    tokens, heads, record = (case[key] for key in ("tokens", "heads", "record"))
    cos_sin = inputs.cos_sin()
    positions = inputs.integers(len(cos_sin), tokens)
    calls = [
        partial(
            fc.quantize_query,
            inputs.bf16(tokens, heads, INDEX_DIM),
            positions,
            cos_sin,
            record=record,
            out=fc.IndexQuery.empty(tokens, heads, record, inputs.device),
        )
        for _ in range(count)
    ]
    return Work(calls)


def _compress(case: Case, inputs: Inputs, count: int) -> Work:
    ratio, tokens, requests, dim = (case[key] for key in ("ratio", "tokens", "requests", "dim"))
    width = 2 * dim if case["overlap"] else dim
    records = case["records"]
    cos_sin = inputs.cos_sin()
    main = inputs.pages(case["main"], records) if case["main"] else None
    index = inputs.pages(case["index"], records) if case["index"] else None
    shared = {"ratio": ratio, "eps": EPS, "cos_sin": cos_sin, "main": main, "index": index}
    shared["norm_weight"] = 1 + inputs.f32(dim) / 8
    if index is not None and dim == HEAD_DIM:
        shared["key_weight"] = inputs.bf16(INDEX_DIM, dim) / 16
        shared["key_norm_weight"] = 1 + inputs.f32(INDEX_DIM) / 8
    if ratio > 2:
        shared["bias"] = inputs.f32(ratio, width)
    if dim == INDEX_DIM:
        shared["rotate"] = True
    span = 2 * ratio if case["overlap"] else ratio
    instances = []
    for _ in range(count):
        if requests > 1:  # decode: every row closes an entry
            group = inputs.integers(len(cos_sin) // ratio - 1, tokens).tolist()
            start = [(1 + entry) * ratio - 1 for entry in group]
            batch = fc.Batch.build(start, [1] * tokens, device=inputs.device)
            slots = inputs.permutation(records)[:tokens].clone()
        else:
            batch = fc.Batch.build([0], [tokens], device=inputs.device)
            table = inputs.permutation(records // PAGE)
            entry = inputs.slots(batch.positions // ratio, table)
            closes = (batch.positions + 1) % ratio == 0
            slots = torch.where(closes, entry, -1)
        instance = {"batch": batch, "entry_slots": slots}
        if ratio == 1:
            instance["kv"] = inputs.bf16(tokens, width)
        else:
            both = inputs.f32(tokens, 2 * width)
            instance |= {"kv": both[:, :width], "gate": both[:, width:]}
            instance["tail"] = fc.Tail(inputs.f32(requests, 2, span, width))
        instances.append(instance)
    calls = [partial(fc.compress, **shared, **instance) for instance in instances]
    content = {"instances": instances, "records": records, "shared": shared}
    return Work(calls, 0, content)


# Library calls, the launch floor, the step's own kernels


def _project(case: Case, inputs: Inputs, count: int) -> Work:
    tokens, groups, outputs = (case[key] for key in ("tokens", "groups", "outputs"))
    out_dtype = torch.float32 if case["out_bytes"] == 4 else torch.bfloat16
    calls = []
    for _ in range(count):
        x = inputs.bf16(tokens, groups, case["inputs"])
        weight = inputs.bf16(groups, case["inputs"], outputs)
        out = inputs.empty(tokens, groups, outputs, dtype=out_dtype)
        if groups > 1:
            calls.append(partial(torch.bmm, x.transpose(0, 1), weight, out=out.transpose(0, 1)))
        elif out_dtype == torch.float32 and inputs.device.type == "cuda":
            calls.append(partial(torch.mm, x[:, 0], weight[0], out_dtype=out_dtype, out=out[:, 0]))
        else:
            out = out.to(torch.bfloat16)
            calls.append(partial(torch.mm, x[:, 0], weight[0], out=out[:, 0]))
    return Work(calls)


def _empty(case: Case, inputs: Inputs, count: int) -> Work:
    words = inputs.empty(1 + len(fc.RECORDS))
    return Work([partial(torch.ops.flash_csa.probe, words)] * count)


def _step(case: Case, inputs: Inputs, count: int) -> Work:
    rows, requests, entries = (case[key] for key in ("rows", "requests", "entries"))
    per_request = rows // requests
    batch = fc.Batch.build(
        [entries - per_request] * requests, [per_request] * requests, device=inputs.device
    )
    columns = entries // PAGE
    if case.kind == "schedule":
        out = inputs.empty(5, fc.schedule_size(num_sms=inputs.num_sms, max_rows_total=rows))
        shape = {"ratios": [1], "max_entries": [entries], "k": 512, "heads": 64}
        shape |= {"index_heads": 32, "pool_blocks": 2048, "pool_ratio": 1}
        one = partial(fc.schedule, batch, **shape, num_sms=inputs.num_sms, out=out)
        return Work([one] * count)
    ring = -(-(WINDOW - 1 + per_request) // PAGE)
    table = inputs.permutation(requests * columns).view(requests, columns)
    window_table = inputs.permutation(requests * ring).view(requests, ring)
    pages = {"ratios": [1], "page_sizes": [PAGE], "window_page_size": PAGE}
    out = fc.StepSlots.empty(rows, 1, WINDOW, inputs.device)
    return Work([partial(fc.step_slots, batch, [table], window_table, **pages, out=out)] * count)


def _workspace(op: str, inputs: Inputs, **bounds: int) -> Tensor:
    return fc.workspace(op, device=inputs.device, num_sms=inputs.num_sms, **bounds)


_BUILDERS: dict[str, Callable[[Case, Inputs, int], Work]] = {
    "attend_decode": _attend,
    "attend_prefill": _attend,
    "attend_contiguous": _attend_contiguous,
    "index_scores": _index,
    "index_select": _index,
    "reindex": _index,
    "select": _select,
    "rope_store": _rope_store,
    "quantize_query": _quantize_query,
    "compress": _compress,
    "project": _project,
    "empty": _empty,
    "step_slots": _step,
    "schedule": _step,
}
