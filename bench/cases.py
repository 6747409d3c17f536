"""Every case of the benchmark: its name, shape, bytes and FLOPs, bars and recorded peer time.

Nothing here needs a GPU. `kind` names the builders in `ours` and `peers`; all shapes are in
`shape`. h = attention heads, b = rows of one query each, q = rows of a prefill chunk, t = tokens,
e = entries; index cases are rows x entries. Formulas of bytes and FLOPs are accounting's.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatch
from math import ceil
from typing import Any

from flash_csa import RECORDS, accounting
from flash_csa.accounting import Cost, expected_unique

PAGE = 64
DECODE_RECORDS = 1 << 21  # of the one cache that decode rows select from
WINDOW_RECORDS = 1 << 18
PREFILL_RECORDS = 1 << 18
INDEX_RECORDS = 1 << 24  # index keys that the instances' tables are cut from: 1.1 GB
STORE_RECORDS = 1 << 21  # records that rows are stored to: window 1.1 GB, main 0.6 GB
WINDOW = 128
INSTANCES = 20
MAX_INSTANCES = 512
WORKING_SET = 200_000_000  # bytes that the instances touch at least: four times the L2
MEMORY = 8_000_000_000  # bytes of inputs that the instances may take together


@dataclass(frozen=True)
class Case:
    """One row of the results.

    stage: folder of csrc/sm90 that it times ("a+b": two), "" for ceilings and library calls.
    unit: the ceilings that may bind it: memory pattern and matrix type.
    must, aim: bars, as the peer's time over ours. peer_us: the peer's time recorded on an H200.
    """

    name: str
    kind: str
    stage: str
    shape: Mapping[str, Any] = field(default_factory=dict)
    unit: tuple[str, str] = ("copy", "bf16")
    must: float | None = None
    aim: float | None = None
    peer_us: float | None = None

    def __getitem__(self, key: str) -> Any:
        return self.shape[key]

    @property
    def available(self) -> bool:
        """False for whole steps, which wait until their stages are fast."""
        return self.kind != "later"

    @property
    def record(self) -> str | None:
        return self.shape.get("record")

    @property
    def cost(self) -> Cost:
        return COSTS[self.kind](self) if self.kind in COSTS else Cost()

    @property
    def instances(self) -> int:
        """Calls with inputs of their own in one graph."""
        own = max(1, self.own_bytes)
        wanted = INSTANCES if self.shared_bytes >= WORKING_SET else ceil(WORKING_SET / own)
        most = min(MAX_INSTANCES, max(1, MEMORY // own), self.disjoint)
        return max(1, min(max(INSTANCES, wanted), most))

    @property
    def own_bytes(self) -> int:
        """Bytes of inputs and outputs that an instance shares with no other."""
        if self.kind == "attend_prefill":
            return 2 * self["rows"] * self["heads"] * 2 * accounting.HEAD_DIM
        scores = self["rows"] * self["entries"] * 4 if self.kind == "index_scores" else 0
        peer_scores = scores or (self["rows"] * self["entries"] * 4 if self.is_index else 0)
        return max(self.cost.nbytes, peer_scores)

    @property
    def is_index(self) -> bool:
        return self.kind in ("index_scores", "index_select", "reindex")

    @property
    def shared_bytes(self) -> int:
        """Bytes of the cache that every instance samples from; else instances have their own."""
        samples = "attend" in self.kind or self.kind == "reindex"
        return self["records"] * RECORDS[self.record].bytes if samples else 0

    @property
    def disjoint(self) -> int:
        """Instances that can have cache pages of their own."""
        if self.kind == "attend_contiguous":
            return self["records"] // (self["rows"] * self["entries"])
        if self.kind in ("index_scores", "index_select"):
            return self["records"] // (self["requests"] * self["entries"])
        return MAX_INSTANCES

    def small(self) -> "Case":
        """The same case in sizes that a CPU does in a moment, for a dry run."""
        limits = {"records": 1024, "windows": 512, "entries": 256, "k": 16, "pool_blocks": 8}
        limits |= {"rows": 4, "tokens": 128, "requests": 4}
        shape = {
            key: min(value, limits[key]) if key in limits else value
            for key, value in self.shape.items()
        }
        if self.is_index or self.kind == "select":
            shape["requests"] = min(shape["requests"], shape["rows"])
        return replace(self, shape=shape)


# Costs


def _attend(case: Case) -> Cost:
    rows, contiguous = case["rows"], case.kind == "attend_contiguous"
    picks = rows * (case["entries"] if contiguous else case["k"])
    windows = rows * WINDOW
    prefill = case.kind == "attend_prefill"
    return accounting.attend(
        rows=rows,
        heads=case["heads"],
        main_records=picks,
        unique_main=picks if contiguous else expected_unique(picks, case["records"]),
        window_records=windows,
        unique_window=rows + WINDOW - 1 if prefill else min(windows, case["windows"]),
        main=case["record"],
        window=case["window_record"],
        block_table_page=PAGE if contiguous else 0,
        derotate=case["derotate"],
    )


def _scoring(case: Case) -> dict[str, Any]:
    rows, entries = case["rows"], case["entries"]
    return {
        "rows": rows,
        "heads": case["heads"],
        "entries": rows * entries,
        "unique_entries": case["requests"] * entries,
        "record": case["record"],
    }


def _reindex(case: Case) -> Cost:
    inside = min(case["entries"], 8 * case["pool_blocks"])
    rows, requests = case["rows"], case["requests"]
    per_request = expected_unique(rows // requests * inside // 8, case["entries"] // 8) * 8
    unique = rows * inside if rows == requests else requests * per_request
    return accounting.reindex(
        **(_scoring(case) | {"entries": rows * inside, "unique_entries": unique}),
        k=case["k"],
        pool_blocks=case["pool_blocks"],
    )


def _compress(case: Case) -> Cost:
    ratio, tokens = case["ratio"], case["tokens"]
    decode = case["requests"] > 1
    span = 8 if case["overlap"] else ratio
    if ratio == 1:
        tail_rows = 0
    elif decode:  # every row closes an entry: it needs the rows before it and leaves its own
        tail_rows = tokens * span
    else:
        tail_rows = span
    return accounting.compress(
        rows=tokens,
        ratio=ratio,
        entries=tokens if decode else tokens // ratio,
        dim=case["dim"],
        overlap=case["overlap"],
        main=case["main"],
        index=case["index"],
        bias=ratio > 2,
        tail_rows=tail_rows,
    )


COSTS = {
    "attend_decode": _attend,
    "attend_prefill": _attend,
    "attend_contiguous": _attend,
    "index_scores": lambda c: accounting.index_scores(**_scoring(c)),
    "index_select": lambda c: accounting.index_select(
        **_scoring(c), k=c["k"], pool_blocks=c["pool_blocks"]
    ),
    "reindex": _reindex,
    "select": lambda c: accounting.select(
        rows=c["rows"], entries=c["rows"] * c["entries"], k=c["k"], pool_blocks=c["pool_blocks"]
    ),
    "rope_store": lambda c: accounting.rope_store(
        rows=c["tokens"], heads=c["heads"], window=c["record"], q_norm=c["q_norm"]
    ),
    "quantize_query": lambda c: accounting.quantize_query(
        rows=c["tokens"], heads=c["heads"], record=c["record"]
    ),
    "compress": _compress,
    "project": lambda c: accounting.project(
        rows=c["tokens"],
        inputs=c["inputs"],
        outputs=c["outputs"],
        groups=c["groups"],
        out_bytes=c["out_bytes"],
    ),
}

# The list


def _ceilings() -> Iterator[Case]:
    for name in ("copy", "read", "gather", "bf16", "fp8"):
        yield Case(f"ceiling.{name}", "ceiling", "", {"what": name})
    yield Case("method.empty", "empty", "")


_ATTEND_PEER_US = {
    64: {1: 15.4, 8: 17.0, 64: 45.2, 128: 45.9, 256: 87.2, 512: 170.0},
    128: {1: 14.7, 8: 18.5, 64: 38.0, 128: 73.6, 256: 143.0, 512: 283.0},
}
_PREFILL_PEER_US = {8: 763.0, 16: 772.0, 32: 1346.0, 64: 821.0, 128: 1491.0}


def _attend_case(name: str, kind: str, rows: int, heads: int, bars=(None, None), **shape) -> Case:
    defaults = {
        "rows": rows,
        "heads": heads,
        "k": 512,
        "records": PREFILL_RECORDS if kind == "attend_prefill" else DECODE_RECORDS,
        "windows": WINDOW_RECORDS,
        "record": "MainFp4",
        "window_record": "WindowFp8",
        "derotate": False,
    }
    peer = None
    if kind == "attend_decode" and shape.get("k", 512) == 512:
        peer = _ATTEND_PEER_US[max(64, heads)].get(rows)
    elif kind == "attend_prefill":
        peer = _PREFILL_PEER_US[heads]
    unit = ("gather", "bf16")
    return Case(name, kind, "attend", defaults | shape, unit, *bars, peer_us=peer)


_MIXED = {"record": "MixedFp8", "window_record": "MixedFp8"}


def _attend_cases() -> Iterator[Case]:
    decode_bars = {
        (64, 1): (1.7, 2.5),
        (64, 8): (1.7, 2.5),
        (64, 64): (2.5, 3.3),
        (64, 128): (2.0, 2.6),
        (64, 256): (1.8, 2.3),
        (128, 128): (1.6, 2.0),
        (128, 256): (1.6, 2.0),
        (32, 256): (2.5, 3.5),
        (16, 256): (3.5, 5.0),
        (8, 256): (3.5, 5.0),
    }

    def decode(heads: int, rows: int) -> Case:
        bars = decode_bars.get((heads, rows), (None, None))
        return _attend_case(f"attend.decode.h{heads}.b{rows}", "attend_decode", rows, heads, bars)

    for heads, rows in decode_bars:
        yield decode(heads, rows)
    for heads, rows in ((64, 128), (64, 256), (128, 128), (128, 256)):
        name = f"attend.decode.mixed.h{heads}.b{rows}"
        yield _attend_case(name, "attend_decode", rows, heads, (1.2, 1.6), **_MIXED)
    bars = {64: (1.15, 1.4), 128: (1.2, 1.4), 32: (2.5, 3.5), 16: (2.5, 3.5), 8: (2.5, 3.5)}
    for heads, pair in bars.items():
        yield _attend_case(f"attend.prefill.h{heads}.q4096", "attend_prefill", 4096, heads, pair)
    name = "attend.contiguous.h64.b64.e8192"
    hca = {"entries": 8192, **_MIXED}
    yield _attend_case(name, "attend_contiguous", 64, 64, (1.2, 1.5), **hca)
    # Beyond the bars: more rows, shards of few heads, V4-Pro.
    for heads, rows in ((64, 512), (128, 1), (128, 8), (128, 64), (128, 512)):
        yield decode(heads, rows)
    for heads, rows in ((32, 64), (16, 64), (8, 64), (8, 1)):
        yield decode(heads, rows)
    yield _attend_case("attend.derotate.h64.b64", "attend_decode", 64, 64, derotate=True)
    name = "attend.decode.mixed.h128.k1024.b128"
    yield _attend_case(name, "attend_decode", 128, 128, k=1024, **_MIXED)
    name = "attend.contiguous.h128.b64.e8192"
    yield _attend_case(name, "attend_contiguous", 64, 128, **hca)


_SCORES_PEER_US = {
    (1, 131072): 8.4,
    (1, 1048576): 39.5,
    (8, 131072): 39.6,
    (32, 65536): 73.9,
    (64, 131072): 278.0,
    (256, 16384): 142.0,
}
_TOPK_PEER_US = {
    (1, 131072): 20.0,
    (1, 1048576): 80.1,
    (8, 131072): 52.4,
    (32, 65536): 96.2,
    (64, 131072): 308.0,
    (256, 16384): 158.0,
}


def _index_case(
    name: str, kind: str, rows: int, entries: int, bars=(None, None), peer=None, **shape
) -> Case:
    defaults = {
        "rows": rows,
        "requests": rows,
        "entries": entries,
        "heads": 32,
        "k": 512,
        "pool_blocks": 2048 if kind == "reindex" else 0,
        "records": INDEX_RECORDS,
        "record": "IndexFp4",
        "wide": False,
    }
    stage = {"index_scores": "index", "select": "select"}.get(kind, "index+select")
    return Case(name, kind, stage, defaults | shape, ("read", "fp8"), *bars, peer_us=peer)


def _index_cases() -> Iterator[Case]:
    bars = {
        (1, 1048576): (1.8, 2.3),
        (8, 131072): (1.8, 2.3),
        (32, 65536): (2.0, 2.4),
        (1, 131072): (1.5, 2.3),
    }
    for size in (*bars, (64, 131072), (256, 16384)):
        name, pair = f"index.decode.{size[0]}x{size[1]}", bars.get(size, (None, None))
        yield _index_case(name, "index_scores", *size, pair, _SCORES_PEER_US[size])
    one = {"requests": 1}
    name, scores = "4096x65536", "index_scores"
    yield _index_case(f"index.prefill.{name}", scores, 4096, 65536, (1.0, 1.15), 2425.0, **one)
    wide = one | {"wide": True}
    yield _index_case(f"index.prefill.wide.{name}", scores, 4096, 65536, (None, 1.0), None, **wide)
    yield _index_case("index.prefill.2048x262144", scores, 2048, 262144, peer=4950.0, **one)
    fp8 = {"record": "IndexFp8"}
    for rows, entries in ((1, 1048576), (32, 65536)):
        yield _index_case(f"index.decode.fp8.{rows}x{entries}", scores, rows, entries, **fp8)
    v4 = {"heads": 64}
    yield _index_case("index.decode.h64.1x262144", scores, 1, 262144, **v4)
    yield _index_case("index.decode.h64.64x32768", scores, 64, 32768, **v4)


def _select_cases() -> Iterator[Case]:
    bars = {(1, 1048576): (2.3, 3.0), (32, 65536): (2.0, 2.4), (1, 131072): (1.8, 2.5)}
    for size in (*bars, (8, 131072), (64, 131072), (256, 16384)):
        name, pair = f"index_select.{size[0]}x{size[1]}", bars.get(size, (None, None))
        yield _index_case(name, "index_select", *size, pair, _TOPK_PEER_US[size])
    one = {"requests": 1}
    name = "index_select.prefill.4096x65536"
    yield _index_case(name, "index_select", 4096, 65536, (1.3, 1.6), 3219.0, **one)
    pool = {"pool_blocks": 2048}  # as the candidate source runs it
    yield _index_case("index_select.pool.1x1048576", "index_select", 1, 1048576, **pool)
    yield _index_case("index_select.1x524288", "index_select", 1, 524288)  # ratio 2 of 1M tokens
    pro = {"heads": 64, "k": 1024}
    yield _index_case("index_select.h64.k1024.1x262144", "index_select", 1, 262144, **pro)

    for size, pair, peer in (
        ((1, 131072), (1.4, 2.0), 12.0),
        ((1, 1048576), (1.4, 2.0), 25.5),
        ((8, 131072), (1.4, 2.0), 13.0),
        ((64, 131072), (1.4, 2.0), 31.1),
        ((4096, 65536), (1.7, 2.3), 794.0),
    ):
        rows = {"requests": 1} if size[0] > 64 else {}
        yield _index_case(f"select.{size[0]}x{size[1]}", "select", *size, pair, peer, **rows)

    yield _index_case("reindex.1x1048576", "reindex", 1, 1048576, (6.0, 10.0), 80.1)
    yield _index_case("reindex.1x131072", "reindex", 1, 131072, peer=20.0)
    yield _index_case("reindex.1x65536", "reindex", 1, 65536)
    yield _index_case("reindex.64x131072", "reindex", 64, 131072, (5.0, 7.0), 308.0)
    name = "reindex.prefill.4096x131072"
    yield _index_case(name, "reindex", 4096, 131072, (2.0, 3.0), **one)


def _store_cases() -> Iterator[Case]:
    bars = {(64, 8192): (5.0, 6.5), (8, 8192): (8.0, 12.0), (64, 64): (1.8, 2.2)}
    peers = {(64, 8192): 285.0, (8, 8192): 186.0, (64, 64): 7.2, (8, 64): 3.9}
    plain = {"records": STORE_RECORDS, "record": "WindowFp8", "q_norm": False}
    for size in (*bars, (8, 64), (16, 8192), (32, 8192)):
        shape = {"heads": size[0], "tokens": size[1], **plain}
        name, pair = f"store.window.h{size[0]}.t{size[1]}", bars.get(size, (None, None))
        yield Case(name, "rope_store", "store", shape, ("copy", "bf16"), *pair, peers.get(size))
    pro = {"heads": 128, "tokens": 64, **plain, "record": "MixedFp8", "q_norm": True}
    yield Case("store.window.v4.h128.t64", "rope_store", "store", pro)
    for tokens in (64, 8192):
        shape = {"heads": 32, "tokens": tokens, "record": "IndexFp4"}
        yield Case(f"query.h32.t{tokens}", "quantize_query", "store", shape)


def _compress_cases() -> Iterator[Case]:
    v41 = {"dim": 512, "overlap": False, "main": "MainFp4", "index": "IndexFp4"}

    def case(name: str, ratio: int, tokens: int, bars=(None, None), peer=None, **shape) -> Case:
        full = {"ratio": ratio, "tokens": tokens, "requests": 1, **v41, **shape}
        full["records"] = STORE_RECORDS
        full["record"] = full["main"] or full["index"]
        return Case(f"compress.{name}", "compress", "compress", full, ("copy", "bf16"), *bars, peer)

    for ratio, tokens, bars, peer in (
        (2, 32768, (1.8, 2.5), 103.0),
        (2, 131072, (1.8, 2.5), 378.0),
        (1, 32768, (4.0, 6.0), 102.0),
        (1, 131072, (None, None), 376.0),
    ):
        yield case(f"r{ratio}.t{tokens}", ratio, tokens, bars, peer)
    for ratio, peer in ((2, 11.5), (1, 10.0)):
        yield case(f"r{ratio}.decode64", ratio, 64, (1.8, 2.5), peer, requests=64)
    v4 = {"main": "MixedFp8", "index": None}
    yield case("r4.t32768", 4, 32768, overlap=True, **v4)
    yield case("r128.t32768", 128, 32768, **v4)
    keys = {"dim": 128, "overlap": True, "main": None}
    yield case("r4.index.t32768", 4, 32768, **keys)


def _project_cases() -> Iterator[Case]:
    """The library GEMMs of a V4.1 layer; the last two belong to Full and indexed layers."""
    linear = {
        "q_a": (5120, 1280),
        "q_b": (1280, 64 * 512),
        "window_kv": (5120, 512),
        "out": (8 * 1024, 5120),
        "kv_gate": (5120, 2 * 512),
        "index_q": (1280, 32 * 128),
    }
    for tokens in (1, 64, 256, 4096):
        grouped = {"groups": 8, "inputs": 64 // 8 * 512, "outputs": 1024}
        yield _project(f"project.grouped.t{tokens}", tokens, **grouped)
    for name, (inputs, outputs) in linear.items():
        for tokens in (64, 4096):
            out_bytes = 4 if name == "kv_gate" else 2
            size = {"groups": 1, "inputs": inputs, "outputs": outputs, "out_bytes": out_bytes}
            yield _project(f"project.{name}.t{tokens}", tokens, **size)


def _project(name: str, tokens: int, out_bytes: int = 2, **shape) -> Case:
    full = {"tokens": tokens, "out_bytes": out_bytes, **shape}
    return Case(name, "project", "", full, ("read", "bf16"))


def _step_cases() -> Iterator[Case]:
    for rows in (1, 64, 4096):
        shape = {"rows": rows, "requests": 1 if rows > 64 else rows, "entries": 131072}
        yield Case(f"step.slots.b{rows}", "step_slots", "step", shape)
        yield Case(f"step.schedule.b{rows}", "schedule", "step", shape)
    for name, must, aim in (
        ("step.v41.b1.ctx1048576", 2.2, 3.0),
        ("step.v41.b1.ctx131072", 2.0, 2.5),
        ("step.v41.b64.ctx131072.h64", 2.5, 3.5),
        ("step.v41.b64.ctx131072.h8", 3.5, 6.0),
        ("step.v41.b256.ctx16384.h8", 3.0, 5.0),
        ("step.v41.b256.ctx16384.h64", 2.2, 3.0),
        ("prefill.v41.t4096.ctx131072.h64", 1.4, 1.8),
        ("prefill.v41.t4096.ctx131072.h8", 2.0, 3.0),
    ):
        yield Case(name, "later", "", must=must, aim=aim)


CASES: dict[str, Case] = {
    case.name: case
    for cases in (
        _ceilings,
        _attend_cases,
        _index_cases,
        _select_cases,
        _store_cases,
        _compress_cases,
        _project_cases,
        _step_cases,
    )
    for case in cases()
}


def matching(patterns: list[str]) -> list[Case]:
    """The cases whose name matches one of the globs, in the order of the list; none given: all."""
    return [
        case
        for name, case in CASES.items()
        if not patterns or any(fnmatch(name, pattern) for pattern in patterns)
    ]
