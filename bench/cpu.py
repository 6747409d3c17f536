"""python -m bench.cpu: the CPU back end beside PyTorch's best formulation of the same stage.

    python -m bench.cpu                       every case, into bench/results/cpu.jsonl
    python -m bench.cpu --case 'attend.*'     some
    python -m bench.cpu --quick               a few samples, no torch.compile, nothing kept

One process and two threads; ours and the formulations of `cpu_peers` take turns, from the same
pages, in the same types, indices and tables built beforehand. Where others use the machine, add
--realtime (it needs the right to) and read the minima beside the medians.
"""

import json
import math
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from fnmatch import fnmatch
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich import box
from rich.console import Console
from rich.table import Table
from torch import Tensor

import flash_csa as fc
from flash_csa import _C, RECORDS
from flash_csa.plan import HEAD_DIM
from flash_csa.reference import quant
from flash_csa.reference.layout import record_of

from . import cases, ours, provenance, results
from . import cpu_peers as peers
from .inputs import Inputs

OUT = provenance.ROOT / "bench" / "results" / "cpu.jsonl"
PAGE = cases.PAGE
WARM_UPS = 2
SAMPLES = 31
QUICK_SAMPLES = 5
TOKENS = 1024  # of a store or compress call
KEYS = (
    *("case", "stage", "shape", "threads", "samples", "ours_us", "ours_min_us"),
    *("peer", "peer_us", "peer_min_us", "ratio", "min_ratio"),
    *("bare_peer", "bare_peer_us", "bare_peer_min_us", "bare_ratio"),
    *("mb_per_s_per_core", "bar", "met", "peers_us", "device", "level", "torch"),
    *("tree_core", "tree_cpu", "dirty", "date"),
)

Call = Callable[[], Any]
Compile = Callable[..., Callable]  # torch.compile, with options or without


@dataclass(frozen=True)
class Case:
    """bar: the least ratio to the fastest peer, or, for store and compress, MB/s per core."""

    name: str
    stage: str
    shape: dict[str, Any]
    bar: float | None = None

    @property
    def is_rate(self) -> bool:
        return self.stage in ("store", "compress")

    def small(self) -> "Case":
        """The same case in sizes for a test."""
        limits = {"records": 1024, "entries": 1024, "k": 32, "tokens": 256}
        shape = {k: min(v, limits[k]) if k in limits else v for k, v in self.shape.items()}
        return Case(self.name, self.stage, shape, self.bar)


@dataclass
class Work:
    """Closures that compute the same.

    bare_peers: from records that are dequantised already. off: how far a peer's result is from
    ours, in units of what is allowed. input_bytes: read by one call.
    """

    ours: Call
    peers: dict[str, Call]
    off: Callable[[Any, Any], float]
    bare_peers: dict[str, Call] = field(default_factory=dict)
    input_bytes: int = 0


def _all_cases() -> Iterator[Case]:
    for rows in (1, 8):
        attend = {"rows": rows, "heads": 64, "k": 512, "records": 65536, "windows": 1024}
        attend |= {"record": "MainFp4", "window_record": "WindowFp8", "derotate": False}
        yield Case(f"attend.r{rows}.h64.n640", "attend", attend, 1.5 if rows == 8 else None)
    for rows in (1, 8):
        index = {"rows": rows, "requests": 1, "entries": 65536, "heads": 32, "k": 512}
        index |= {"records": 65536, "record": "IndexFp4", "wide": False, "pool_blocks": 0}
        yield Case(f"index_scores.r{rows}.h32.e65536", "index", index, 1.0)
    for rows in (1, 8):
        select = {"rows": rows, "requests": 1, "entries": 131072, "k": 512}
        yield Case(f"select.r{rows}.e131072.k512", "select", select, 1.5)
    for record in RECORDS:
        yield Case(f"store.{record}", "store", {"tokens": 4 * TOKENS, "record": record}, 150)
    for ratio, main, index in (
        (1, "MainFp4", "IndexFp4"),
        (2, "MainFp4", "IndexFp4"),
        (4, "MixedFp8", None),
        (128, "MixedFp8", None),
    ):
        shape = {"ratio": ratio, "tokens": TOKENS, "requests": 1, "dim": 512, "main": main}
        shape |= {"index": index, "overlap": ratio == 4, "records": TOKENS}
        yield Case(f"compress.r{ratio}", "compress", shape, 100)


CASES = {case.name: case for case in _all_cases()}


# ---- What each case calls


def _our_call(case: Case, kind: str, inputs: Inputs) -> tuple[partial, dict[str, Any]]:
    """Ours and what it was built from, by the builder that the GPU's cases use."""
    work = ours.build(cases.Case(case.name, kind, "", case.shape), inputs, 1)
    return work.calls[0], work.content


def _with_compiled(
    functions: dict[str, Callable], names: tuple[str, ...], compiler: Compile | None
) -> dict[str, Callable]:
    compiled = {f"compiled {name}": compiler(functions[name]) for name in names} if compiler else {}
    return functions | compiled


def _calls(functions: dict[str, Callable], *arguments) -> dict[str, Call]:
    return {name: partial(function, *arguments) for name, function in functions.items()}


def _equal(ours: Tensor, theirs: Tensor) -> float:
    return 0.0 if torch.equal(ours, theirs) else math.inf


def _close(ours: Tensor, theirs: Tensor) -> float:
    """BF16 products and sums in any order: within 2 % of the largest value."""
    return ((ours - theirs).abs().max() / (0.02 * ours.abs().max())).item()


def _attend(case: Case, inputs: Inputs, compiler: Compile | None) -> Work:
    call, content = _our_call(case, "attend_decode", inputs)
    shared, instance = content["shared"], content["instances"][0]
    pages = {name: shared[name] for name in ("main", "window_pages")}
    slots = {"main": instance["selection"].slots, "window_pages": instance["window"].slots}
    flat = [
        (p.data.view(-1, RECORDS[p.record].bytes), slots[name].flatten())
        for name, p in pages.items()
    ]
    (main, main_slots), (window, window_slots) = flat
    functions = {
        f"{dequantise.__name__}, {name}": peers.attend_of(dequantise, peers.ATTENTIONS[name])
        for dequantise, name in (
            (peers.scaled_table, "softmax, bf16"),
            (peers.scaled_table, "exp, bf16"),
            (peers.scaled_table, "softmax, fp32"),
            (peers.scaled_table, "sdpa"),
            (peers.pair_table, "softmax, bf16"),
            (peers.bit_operations, "softmax, bf16"),
            (peers.float8_codes, "softmax, bf16"),
        )
    }
    compiled = ("scaled_table, softmax, bf16", "scaled_table, exp, bf16")
    compiled += ("pair_table, softmax, bf16",)
    functions = _with_compiled(functions, compiled, compiler)
    kv = torch.cat(
        [
            fc.load(p, slots[name].flatten()).view(case.shape["rows"], -1, HEAD_DIM)
            for name, p in reversed(pages.items())
        ],
        1,
    )
    q, sink = instance["q"], shared["sink"]
    bare = _with_compiled(dict(peers.ATTENTIONS), ("softmax, bf16",), compiler)
    return Work(
        call,
        _calls(functions, q, main, main_slots, window, window_slots, sink),
        _close,
        _calls(bare, q, kv, sink),
    )


def _index(case: Case, inputs: Inputs, compiler: Compile | None) -> Work:
    call, content = _our_call(case, "index_scores", inputs)
    instance, pages = content["instances"][0], call.keywords["index"]
    table, weights = instance["block_table"][0], instance["weights"]
    query, record = instance["query"], record_of("IndexFp4")
    stored = query.scales.view(torch.uint8).view(*query.scales.shape, -1)
    q = quant.dequantize(query.codes, stored, record).bfloat16()
    functions = {
        "scaled_table, bf16": peers.index_scores_of(peers.scaled_table, peers.scores_bf16),
        "scaled_table, fp32": peers.index_scores_of(peers.scaled_table, peers.scores_fp32),
    }
    functions |= {
        f"{d.__name__} in parts, bf16": peers.index_scores_of(d, peers.scores_bf16, peers.PART_KEYS)
        for d in (peers.scaled_table, peers.pair_table, peers.bit_operations)
    }
    compiled = ("scaled_table, bf16", "pair_table in parts, bf16")
    functions = _with_compiled(functions, compiled, compiler)
    slots = (table[:, None] * PAGE + inputs.arange(PAGE)).flatten()
    bare = _with_compiled(dict(peers.SCORERS), ("bf16",), compiler)
    return Work(
        call,
        _calls(functions, q, pages.data, table, record, PAGE, weights),
        _close,
        _calls(bare, q, fc.load(pages, slots), weights),
    )


def _select(case: Case, inputs: Inputs, compiler: Compile | None) -> Work:
    call, content = _our_call(case, "select", inputs)
    out, table = call.keywords["out"], call.keywords["block_table"][0].long()
    functions = {name: peers.select_of(selector) for name, selector in peers.SELECTORS.items()}
    functions = _with_compiled(functions, ("topk of parts, sort",), compiler)
    scores, k = content["scores"][0], case.shape["k"]

    def select() -> Tensor:
        call()
        return torch.stack([out.positions, out.slots])

    return Work(
        select,
        _calls(functions, scores, k, table, PAGE),
        _equal,
    )


def _store(case: Case, inputs: Inputs, compiler: Compile | None) -> Work:
    inputs.restart()
    record, tokens = record_of(case.shape["record"]), case.shape["tokens"]
    pages = fc.Pages.empty(tokens // PAGE, record.name, PAGE, inputs.device)
    rows, slots = inputs.bf16(tokens, record.dims), inputs.permutation(tokens)
    functions = {name: peers.store_of(encoder) for name, encoder in peers.ENCODERS.items()}
    functions = _with_compiled(functions, ("rounding", "adding"), compiler)
    theirs = pages.data.clone()

    def store() -> Tensor:
        fc.store(rows, pages, slots)
        return pages.data

    return Work(
        store,
        _calls(functions, rows, theirs, slots.long(), record, PAGE),
        _equal,
        input_bytes=rows.nbytes,
    )


def _compress(case: Case, inputs: Inputs, compiler: Compile | None) -> Work:
    call, content = _our_call(case, "compress", inputs)
    shared, instance = content["shared"], content["instances"][0]
    kv, gate, ratio = instance["kv"], instance.get("gate"), shared["ratio"]
    closing = instance["entry_slots"] >= 0
    slots = instance["entry_slots"][closing].long()
    turns = shared["cos_sin"][torch.arange(len(slots)) * ratio]
    stores = [
        (p.data.clone(), slots, record_of(p.record), p.page_size)
        for p in (shared["main"], shared["index"])
        if p is not None
    ]
    functions = {
        f"{pool}, {encoder}": peers.compress_of(peers.POOLS[pool], peers.ENCODERS[encoder])
        for pool, encoder in (("softmax", "rounding"), ("softmax", "adding"), ("exp", "rounding"))
    }
    if compiler:  # a fused kernel would leave out the BF16 borders
        compiler = partial(compiler, options={"emulate_precision_casts": True})
    functions = _with_compiled(functions, ("softmax, rounding", "softmax, adding"), compiler)
    arguments = (kv, gate, shared.get("bias"), shared["norm_weight"], turns)
    arguments += (shared.get("key_weight"), shared.get("key_norm_weight"), shared["eps"])

    def compress() -> Tensor:
        call()
        return shared["main"].data

    return Work(
        compress,
        _calls(functions, *arguments, ratio, stores),
        lambda a, b: (a != b).float().mean().item() / 1e-3,  # exp and sums in another order
        input_bytes=kv.numel() * kv.element_size() * (1 if gate is None else 2),
    )


BUILDERS = {
    "attend": _attend,
    "index": _index,
    "select": _select,
    "store": _store,
    "compress": _compress,
}


def build(case: Case, inputs: Inputs, compiler: Compile | None = None) -> Work:
    """A case's calls; with a compiler some formulations also compiled."""
    return BUILDERS[case.stage](case, inputs, compiler)


def worst_peer(work: Work) -> tuple[str, float]:
    """The peer that is farthest from ours, and by how much of what is allowed."""
    result = work.ours()
    off = {name: work.off(result, call()) for name, call in (work.peers | work.bare_peers).items()}
    name = max(off, key=off.__getitem__)
    return name, off[name]


# ---- Timing


@contextmanager
def undisturbed(wanted: bool) -> Iterator[None]:
    """Real-time priority for all threads of the process: others wait while it times."""
    threads = [int(task.name) for task in Path("/proc/self/task").iterdir()] if wanted else []
    for thread in threads:
        os.sched_setscheduler(thread, os.SCHED_FIFO, os.sched_param(1))
    try:
        yield
    finally:
        for thread in threads:
            os.sched_setscheduler(thread, os.SCHED_OTHER, os.sched_param(0))


def interleaved(calls: dict[str, Call], samples: int) -> dict[str, list[float]]:
    """Microseconds of each call, all taking turns."""
    taken: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(WARM_UPS + samples):
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            if turn >= WARM_UPS:
                taken[name].append((time.perf_counter() - start) * 1e6)
    return taken


def _fastest(times: dict[str, list[float]], names: dict[str, Call]) -> tuple[str, float, float]:
    """Name, median and minimum of the lowest median."""
    name = min(names, key=lambda name: statistics.median(times[name]))
    return name, statistics.median(times[name]), min(times[name])


def measure(
    case: Case,
    inputs: Inputs,
    samples: int,
    compiler: Compile | None = None,
    realtime: bool = False,
) -> results.Row:
    """One row of results.

    Raises:
        RuntimeError: a peer computes something else.
    """
    torch.compiler.reset()
    work = build(case, inputs, compiler)
    name, off = worst_peer(work)
    if not off <= 1:
        raise RuntimeError(f"{case.name}: {name} is off by {off:.2f} of what is allowed")
    bare = {f"bare {name}": call for name, call in work.bare_peers.items()}
    with undisturbed(realtime):
        times = interleaved({"ours": work.ours} | work.peers | bare, samples)
    us, least = statistics.median(times["ours"]), min(times["ours"])
    row: results.Row = dict.fromkeys(KEYS)
    row["peer"], row["peer_us"], row["peer_min_us"] = _fastest(times, work.peers)
    if bare:
        name, row["bare_peer_us"], row["bare_peer_min_us"] = _fastest(times, bare)
        row["bare_peer"] = name.removeprefix("bare ")
        row["bare_ratio"] = row["bare_peer_us"] / us
    threads = torch.get_num_threads()
    row |= {
        "case": case.name,
        "stage": case.stage,
        "shape": case.shape,
        "threads": threads,
        "samples": samples,
        "ours_us": us,
        "ours_min_us": least,
        "ratio": row["peer_us"] / us,
        "min_ratio": row["peer_min_us"] / least,
        "mb_per_s_per_core": work.input_bytes / us / threads if case.is_rate else None,
        "bar": case.bar,
        "peers_us": {name: round(statistics.median(times[name]), 1) for name in work.peers},
        "device": _processor(),
        "level": _C.cpu_level(),
        "torch": torch.__version__,
        "tree_core": provenance.tree_hash(provenance.ROOT / "csrc" / "core"),
        "tree_cpu": provenance.tree_hash(provenance.ROOT / "csrc" / "cpu"),
        "dirty": provenance.is_dirty(),
        "date": provenance.now(),
    }
    reached = row["mb_per_s_per_core"] if case.is_rate else row["ratio"]
    row["met"] = reached >= case.bar if case.bar else None
    return row


def _processor() -> str:
    """The processor's name, as Linux or Python knows it."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


# ---- Command line


def main(
    case: Annotated[list[str] | None, typer.Option(help="Glob of case names; repeatable.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print rows, not a table.")] = False,
    quick: Annotated[bool, typer.Option(help="Few samples, no torch.compile, no file.")] = False,
    out: Annotated[Path, typer.Option(help="JSONL file; its other rows are kept.")] = OUT,
    threads: Annotated[int, typer.Option(help="Threads of both sides.")] = 2,
    realtime: Annotated[
        bool, typer.Option("--realtime", help="Let nothing else run while it times.")
    ] = False,
) -> None:
    """Times the cases; exit code 1 where a bar is missed."""
    chosen = [c for c in CASES.values() if any(fnmatch(c.name, glob) for glob in case or ["*"])]
    if not chosen:
        _say("no case matches")
        sys.exit(2)
    torch.set_num_threads(threads)
    inputs = Inputs("cpu")
    compiler = None if quick else partial(torch.compile, fullgraph=True, dynamic=False)
    rows = {}
    for c in chosen:
        samples = QUICK_SAMPLES if quick else SAMPLES
        rows[c.name] = row = measure(c, inputs, samples, compiler, realtime)
        _say(f"{c.name}: {row['ours_us']:.0f} us, {row['ratio']:.2f}x of {row['peer']}")
        if not quick:
            results.save(out, results.load(out) | {c.name: row}, KEYS, CASES)
    if as_json:
        for row in rows.values():
            print(json.dumps(row))
    else:
        _print_rows(rows)
    sys.exit(any(row["met"] is False for row in rows.values()) and not quick)


def _print_rows(rows: dict[str, results.Row]) -> None:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("case", no_wrap=True)
    for name in ("ours us", "(min)", "peer us", "(min)", "ratio", "without dequant.", "MB/s/core"):
        table.add_column(name, justify="right")
    table.add_column("bar", justify="right")
    table.add_column("fastest peer", no_wrap=True)
    for name, row in rows.items():
        rate = row["mb_per_s_per_core"]
        mark = {True: " met", False: " MISSED", None: ""}[row["met"]]
        table.add_row(
            name,
            *(f"{row[key]:,.0f}" for key in ("ours_us", "ours_min_us", "peer_us", "peer_min_us")),
            f"{row['ratio']:.2f}",
            f"{row['bare_ratio']:.2f}" if row["bare_ratio"] else "",
            f"{rate:,.0f}" if rate else "",
            f"{row['bar']:g}{mark}" if row["bar"] else "",
            row["peer"],
        )
    Console(width=150, highlight=False).print(table)


def _say(line: str) -> None:
    print(f"bench: {line}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    typer.run(main)
