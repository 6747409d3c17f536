"""Bytes and FLOPs of every record and stage: the only place that counts them.

Cache: `bytes_per_token` is the published figure, `cache_bytes` sets it beside what a layout
allocates, `step_bytes` and `table_bytes` count what lies beside it. Work: one function per stage
gives its Cost from shapes, `layer_costs` and `step_costs` add them up over a plan. Costs are
models: every byte that must cross HBM once, and nothing else.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction

import numpy as np

from .cache import CacheLayout, CacheSpec, ceil_div
from .configs import V4_FLASH, V4_PRO, V41_FLASH
from .plan import HEAD_DIM, INDEX_DIM, POOL_BLOCK, ROPE_DIMS, GroupPlan, Layer, LayerPlan
from .records import RECORDS

BF16 = 2
F32 = 4
I32 = 4


# Cache


def bytes_per_token(plan: LayerPlan, main: int, index: int, *, shared: bool = True) -> Fraction:
    """Global cache bytes of one token, for entries of `main` and `index` bytes.

    shared=False: as if every compressed layer kept records of its own.
    """
    copies = ((group, 1 if shared else len(group.layers)) for group in plan.groups)
    return sum(
        (Fraction(copy * (main + index * group.indexed), group.ratio) for group, copy in copies),
        Fraction(0),
    )


def spec_bytes_per_token(plan: LayerPlan, spec: CacheSpec) -> Fraction:
    """`bytes_per_token` in the formats of `spec`."""
    return bytes_per_token(plan, RECORDS[spec.main].bytes, RECORDS[spec.index].bytes)


def comparison() -> list[tuple[str, Fraction]]:
    """Bytes per token of the published caches and of formats that this library does not store."""
    v41, v4, pro = (LayerPlan.from_config(c) for c in (V41_FLASH, V4_FLASH, V4_PRO))
    size = {name: record.bytes for name, record in RECORDS.items()}
    fp4 = (size["MainFp4"], size["IndexFp4"])
    mixed = (size["MixedFp8"], size["IndexFp4"])
    # 512 E4M3 with 4 FP32 scales, 64 BF16
    v32_main = HEAD_DIM + 4 * F32 + ROPE_DIMS * BF16
    return [
        ("V4.1, FP4 main + FP4 index (official)", bytes_per_token(v41, *fp4)),
        ("V4.1, FP8 main + FP4 index", bytes_per_token(v41, size["WindowFp8"], fp4[1])),
        ("V4.1, FP8 main + FP8 index", bytes_per_token(v41, size["WindowFp8"], size["IndexFp8"])),
        ("V4.1, as served on Hopper", bytes_per_token(v41, size["MixedFp8"], size["IndexFp8"])),
        ("V4.1, BF16", bytes_per_token(v41, HEAD_DIM * BF16, INDEX_DIM * BF16)),
        ("V4.1, without cross-layer sharing", bytes_per_token(v41, *fp4, shared=False)),
        ("V4-Flash", bytes_per_token(v4, *mixed)),
        ("V4-Pro", bytes_per_token(pro, *mixed)),
        ("V3.2", Fraction(61 * (v32_main + size["IndexFp8"]))),
    ]


@dataclass(frozen=True)
class RecordBytes:
    """The main or the index records of one group."""

    group: int
    source: int  # the layer that writes them
    kind: str  # "main" or "index"
    record: str
    entries_per_token: Fraction
    entries: int  # complete entries of all requests
    ideal: int  # their bytes
    allocated: int  # whole pages of every span of the layout

    @property
    def bytes_per_token(self) -> Fraction:
        return self.entries_per_token * RECORDS[self.record].bytes


@dataclass(frozen=True)
class CacheBytes:
    """What requests need beside what a layout allocates for them, in bytes."""

    records: tuple[RecordBytes, ...]
    window_ideal: int  # `window` records per layer and request
    window_steady: int  # pages that decoding requests hold at most
    window_allocated: int  # every ring whole, as while long chunks run
    tails_ideal: int  # the rows that an open group may need
    tails_allocated: int  # rings with room for drafts

    @property
    def ideal(self) -> int:
        """Main and index records of complete entries."""
        return sum(record.ideal for record in self.records)

    @property
    def allocated(self) -> int:
        """Main and index pages."""
        return sum(record.allocated for record in self.records)


def cache_bytes(layout: CacheLayout, tokens: Sequence[int]) -> CacheBytes:
    """Bytes of requests of `tokens` tokens each in caches of `layout`."""
    plan, spec = layout.plan, layout.spec
    requests, layers = len(tokens), len(plan.layers)
    window_page = RECORDS[spec.window].page_bytes(spec.window_page_size)
    # A decode step touches its rows and the window before them, wherever pages begin.
    live = plan.window + layout.max_draft
    steady = min(ceil_div(live - 1, spec.window_page_size) + 1, layout.window_columns)
    tail_rows = [(group.span, layout.tail_shapes(group).values()) for group in plan.groups]
    return CacheBytes(
        records=tuple(_record_bytes(layout, tokens)),
        window_ideal=requests * layers * plan.window * RECORDS[spec.window].bytes,
        window_steady=requests * layers * steady * window_page,
        window_allocated=layers * layout.window_pages * window_page,
        tails_ideal=sum(
            requests * 2 * span * width * F32 for span, shapes in tail_rows for *_, width in shapes
        ),
        tails_allocated=sum(
            slots * 2 * ring * width * F32
            for _, shapes in tail_rows
            for slots, _, ring, width in shapes
        ),
    )


def _record_bytes(layout: CacheLayout, tokens: Sequence[int]) -> Iterator[RecordBytes]:
    for group in layout.plan.groups:
        entries = sum(count // group.ratio for count in tokens)
        kinds = {"main": layout.spec.main} | ({"index": layout.spec.index} if group.indexed else {})
        for kind, record in kinds.items():
            page = RECORDS[record].page_bytes(layout.spec.page_sizes[group.ratio])
            yield RecordBytes(
                group=group.index,
                source=group.source,
                kind=kind,
                record=record,
                entries_per_token=Fraction(1, group.ratio),
                entries=entries,
                ideal=entries * RECORDS[record].bytes,
                allocated=layout.num_pages(group.ratio) * page,
            )


def step_bytes(layout: CacheLayout, rows: int) -> dict[str, int]:
    """Bytes of the lists of a step of `rows` rows, which all layers share."""
    plan = layout.plan
    return {
        "selection": rows * _list_bytes(2 * plan.topk),
        "pool": rows * _list_bytes(plan.pool_blocks) if plan.pool_blocks else 0,
        "window lists": rows * (_list_bytes(plan.window) + I32),
        "entry slots and n_vis": rows * 2 * len(plan.ratios) * I32,
    }


def table_bytes(layout: CacheLayout) -> dict[str, int]:
    """Bytes of the tables that live as long as the cache."""
    plan = layout.plan
    columns = sum(layout.max_pages(ratio) for ratio in plan.ratios) + layout.window_columns
    thetas = {layer.ratio > 0 for layer in plan.layers}
    return {
        "block tables": layout.max_requests * columns * I32,
        "cos/sin tables": len(thetas) * plan.max_positions * ROPE_DIMS * F32,
    }


def _list_bytes(columns: int) -> int:
    """A row of a list and its length."""
    return (columns + 1) * I32


# Comparisons


def pool_positions(plan: LayerPlan, visible: int) -> int:
    """Entries inside the pool of a query that sees `visible` entries.

    The newest block is always in, and is the only one that may be partly visible.
    """
    if ceil_div(visible, POOL_BLOCK) <= plan.pool_blocks:
        return visible
    return plan.pool_blocks * POOL_BLOCK - (-visible % POOL_BLOCK)


def scored_entries(plan: LayerPlan, layer: Layer, visible: int) -> int:
    """Index keys that one query of the layer is compared with."""
    if not layer.scores:
        return 0
    return pool_positions(plan, visible) if layer.reads_pool else visible


def attended_entries(plan: LayerPlan, layer: Layer, visible: int) -> int:
    """Main records that one query of the layer reads."""
    if layer.kv_source is None:
        return 0
    if layer.contiguous:
        return visible
    return min(plan.topk, scored_entries(plan, plan.layers[layer.index_source], visible))


def comparisons(plan: LayerPlan, tokens: int) -> tuple[int, int]:
    """Index comparisons of a query after `tokens` tokens: with this plan, and if every indexed
    layer scored all visible entries itself."""
    indexed = [layer for layer in plan.layers if layer.index_source is not None]
    visible = [tokens // layer.ratio for layer in indexed]
    scored = zip(indexed, visible, strict=True)
    return sum(scored_entries(plan, layer, n) for layer, n in scored), sum(visible)


# Stages


@dataclass(frozen=True)
class Cost:
    """Bytes by kind and FLOPs (2 per multiply-add of dot products and rotations).

    Kinds: main codes, main scales, index keys, window (records), inputs (vectors of the layer),
    queries, weights, lists, tables, scores, tails, outputs.
    """

    bytes: Mapping[str, int] = field(default_factory=dict)
    flops: int = 0

    @property
    def nbytes(self) -> int:
        return sum(self.bytes.values())

    def __add__(self, other: "Cost") -> "Cost":
        kinds = dict.fromkeys((*self.bytes, *other.bytes))
        total = {kind: self.bytes.get(kind, 0) + other.bytes.get(kind, 0) for kind in kinds}
        return Cost(total, self.flops + other.flops)


ROTATION = 6 * ROPE_DIMS // 2  # FLOPs of one vector
COS_SIN = ROPE_DIMS * F32  # a row of the cos/sin table


def _main(record: str, count: int) -> dict[str, int]:
    row = RECORDS[record]
    return {"main codes": count * row.data_bytes, "main scales": count * row.scale_bytes}


def store(*, rows: int, record: str) -> Cost:
    """store, and load into BF16: vectors one way, records the other."""
    row = RECORDS[record]
    return Cost(
        {"inputs": rows * row.dims * BF16, "outputs": rows * row.bytes, "lists": rows * I32}
    )


def rope_store(*, rows: int, heads: int, window: str = "WindowFp8", q_norm: bool = False) -> Cost:
    """rope_store: q rotates in place (with q_norm all of it moves), kv becomes window records."""
    moved = HEAD_DIM if q_norm else ROPE_DIMS
    return Cost(
        {
            "queries": rows * heads * moved * BF16 * 2,
            "inputs": rows * HEAD_DIM * BF16,
            "window": rows * RECORDS[window].bytes,
            "lists": rows * 2 * I32,
            "tables": rows * COS_SIN,
        },
        rows * (heads + 1) * ROTATION,
    )


def quantize_query(*, rows: int, heads: int, record: str = "IndexFp4") -> Cost:
    """quantize_query: BF16 heads in, codes and scales out."""
    return Cost(
        {
            "inputs": rows * heads * INDEX_DIM * BF16,
            "queries": rows * heads * RECORDS[record].bytes,
            "lists": rows * I32,
            "tables": rows * COS_SIN,
        },
        rows * heads * ROTATION,
    )


def compress(
    *,
    rows: int,
    ratio: int,
    entries: int | None = None,
    dim: int = HEAD_DIM,
    overlap: bool = False,
    main: str | None = "MainFp4",
    index: str | None = "IndexFp4",
    bias: bool = False,
    latent: bool = False,
    tail_rows: int = 0,
) -> Cost:
    """compress: `rows` tokens close `entries` entries (default rows // ratio).

    main, index: the records written, or None. With dim 512, index keys are projected from the
    latent; with dim 128 they are the pooled vectors. tail_rows: kv and gate rows read from and
    written to tails.
    """
    closed = rows // ratio if entries is None else entries
    width = 2 * dim if overlap else dim
    row_bytes = dim * BF16 if ratio == 1 else 2 * width * F32
    project = index is not None and dim == HEAD_DIM
    pooled = 0 if ratio == 1 else closed * (2 * ratio if overlap else ratio)
    key_weights = (INDEX_DIM * HEAD_DIM * BF16 + INDEX_DIM * F32) if project else 0
    moved = {
        "inputs": rows * row_bytes,
        "weights": dim * F32 + key_weights + (ratio * width * F32 if bias else 0),
        "lists": rows * 3 * I32,  # position, request, entry slot
        "tables": closed * COS_SIN,
        "tails": tail_rows * 2 * width * F32,
    }
    if main is not None:
        moved |= _main(main, closed)
    if index is not None:
        moved["index keys"] = closed * RECORDS[index].bytes
    if latent:
        moved["outputs"] = closed * dim * BF16
    projected = closed * 2 * HEAD_DIM * INDEX_DIM if project else 0
    rotated = closed * ROTATION * ((main is not None) + (index is not None))
    return Cost(moved, pooled * 2 * dim + projected + rotated)


def index_scores(
    *,
    rows: int,
    heads: int,
    entries: int,
    unique_entries: int | None = None,
    record: str = "IndexFp4",
    weight_bytes: int = F32,
    pool_blocks: int = 0,
    write_scores: bool = True,
) -> Cost:
    """index_scores: `entries` (query, key) pairs over `unique_entries` keys (default: all differ).

    pool_blocks: columns of the block list that restricts each row.
    """
    keys = entries if unique_entries is None else unique_entries
    moved = {
        "queries": rows * heads * (RECORDS[record].bytes + weight_bytes),
        "index keys": keys * RECORDS[record].bytes,
        "lists": rows * 2 * I32 + (rows * _list_bytes(pool_blocks) if pool_blocks else 0),
    }
    if write_scores:
        moved["scores"] = entries * F32
    return Cost(moved, entries * heads * 2 * INDEX_DIM)


def select(
    *, rows: int, entries: int, k: int, pool_blocks: int = 0, read_scores: bool = True
) -> Cost:
    """select: `entries` scores in all; positions, slots and lengths out, and the pool it builds."""
    moved = {
        "lists": rows * 2 * I32,
        "outputs": rows * (_list_bytes(2 * k) + (_list_bytes(pool_blocks) if pool_blocks else 0)),
    }
    if read_scores:
        moved["scores"] = entries * F32
    return Cost(moved)


def index_select(
    *, rows: int, heads: int, entries: int, k: int, pool_blocks: int = 0, **scoring
) -> Cost:
    """index_select, the fused pair: scores never reach HBM. pool_blocks: of the pool built."""
    scores = index_scores(rows=rows, heads=heads, entries=entries, write_scores=False, **scoring)
    chosen = select(rows=rows, entries=entries, k=k, pool_blocks=pool_blocks, read_scores=False)
    return scores + chosen


def reindex(*, rows: int, heads: int, entries: int, k: int, pool_blocks: int, **scoring) -> Cost:
    """index_select inside a pool: a row scores the `entries / rows` keys of its own pool."""
    scores = index_scores(
        rows=rows,
        heads=heads,
        entries=entries,
        pool_blocks=pool_blocks,
        write_scores=False,
        **scoring,
    )
    return scores + select(rows=rows, entries=entries, k=k, read_scores=False)


def attend(
    *,
    rows: int,
    heads: int,
    main_records: int,
    window_records: int,
    unique_main: int | None = None,
    unique_window: int | None = None,
    main: str = "MainFp4",
    window: str = "WindowFp8",
    block_table_page: int = 0,
    out_bytes: int = BF16,
    lse: bool = True,
    derotate: bool = True,
) -> Cost:
    """attend: (query, record) pairs of both lists, over so many different records.

    block_table_page: page size of `contiguous`, where a block table replaces the slots.
    """
    main_read = main_records if unique_main is None else unique_main
    window_read = window_records if unique_window is None else unique_window
    slots = ceil_div(main_read, block_table_page) if block_table_page else main_records
    return Cost(
        {
            **_main(main, main_read),
            "window": window_read * RECORDS[window].bytes,
            "lists": (slots + window_records + 2 * rows) * I32,
            "queries": rows * heads * HEAD_DIM * BF16,
            "tables": heads * F32 + (rows * (COS_SIN + I32) if derotate else 0),
            "outputs": rows * heads * (HEAD_DIM * out_bytes + (F32 if lse else 0)),
        },
        (main_records + window_records) * heads * 4 * HEAD_DIM
        + (rows * heads * ROTATION if derotate else 0),
    )


def merge(
    *, parts: int, rows: int, heads: int, part_bytes: int = F32, out_bytes: int = BF16
) -> Cost:
    """merge: partial outputs and their lse in, one output and lse out."""
    values = rows * heads
    return Cost(
        {
            "inputs": parts * values * (HEAD_DIM * part_bytes + F32),
            "outputs": values * (HEAD_DIM * out_bytes + F32),
        },
        2 * parts * values * HEAD_DIM,
    )


def project(
    *, rows: int, inputs: int, outputs: int, groups: int = 1, out_bytes: int = BF16
) -> Cost:
    """A library GEMM: in each group [rows, inputs] x [inputs, outputs], BF16 operands."""
    return Cost(
        {
            "inputs": groups * rows * inputs * BF16,
            "weights": groups * inputs * outputs * BF16,
            "outputs": groups * rows * outputs * out_bytes,
        },
        2 * groups * rows * inputs * outputs,
    )


# What memory moves beyond a Cost

SECTOR = 32  # bytes: the smallest piece of HBM that a kernel can fetch


def sector_bytes(record: str, page_size: int, run: int = 1) -> Fraction:
    """Bytes of the sectors that one record of a run of `run` neighbours costs, on average.

    Runs begin at multiples of `run` in a page (the last may be shorter); pages begin at a sector.
    """
    row, touched = RECORDS[record], 0
    for first in range(0, page_size, run):
        last = min(first + run, page_size) - 1
        data, scales = row.data_at(first), row.scale_at(first, page_size)
        data_end = row.data_at(last) + row.data_bytes
        scale_end = row.scale_at(last, page_size) + row.scale_bytes
        if row.page_order == "token-major":
            spans = [(data, scale_end)]
        else:
            spans = [(data, data_end), (scales, scale_end)]
        touched += len({s for a, b in spans for s in range(a // SECTOR, ceil_div(b, SECTOR))})
    return Fraction(touched * SECTOR, page_size)


def expected_unique(picks: int, items: int) -> int:
    """Different items among uniform picks, rounded down."""
    return int(items * (1 - (1 - 1 / items) ** picks)) if items else 0


def score_scratch(entries: int) -> int:
    """What index_select moves on top: scores and the maxima of their blocks written to the
    workspace, the maxima read from it. Less where a tile of rows stays in the L2."""
    return (entries + 2 * (entries // POOL_BLOCK)) * F32


def gather_bytes(*, records: int = 0, scores: int = 0) -> int:
    """What a path through temporaries moves on top: each record written and read as a BF16 vector,
    each score written and read in FP32."""
    return 2 * (records * HEAD_DIM * BF16 + scores * F32)


# A whole step


def layer_costs(
    plan: LayerPlan, spec: CacheSpec, layer: Layer, start: Sequence[int], rows: Sequence[int]
) -> dict[str, Cost]:
    """Cost of each stage of one layer in a step: request r adds rows[r] rows after start[r].

    Rows of one request share its window records and index keys; main records and the keys of pools
    count once where its rows select more than it has.
    """
    total = sum(rows)
    requests = [_Rows(plan, layer, s, n) for s, n in zip(start, rows, strict=True)]
    costs = {
        "rope_store": rope_store(
            rows=total,
            heads=plan.heads,
            window=spec.window,
            q_norm=plan.q_norm_eps is not None,
        ),
        "attend": attend(
            rows=total,
            heads=plan.heads,
            main_records=sum(r.attended for r in requests),
            unique_main=sum(min(r.attended, r.last_visible) for r in requests),
            window_records=sum(r.window for r in requests),
            unique_window=sum(r.window_unique for r in requests),
            main=spec.main,
            window=spec.window,
            block_table_page=spec.page_sizes[layer.ratio] if layer.contiguous else 0,
        ),
    }
    if layer.mode == "full":
        costs |= _compress_costs(plan, spec, plan.groups[layer.group], start, rows)
    if layer.scores:
        shape = {
            "rows": total,
            "heads": plan.index_heads,
            "entries": sum(r.scored for r in requests),
            "k": plan.topk,
            "record": spec.index,
        }
        costs["quantize_query"] = quantize_query(
            rows=total, heads=plan.index_heads, record=spec.index
        )
        if layer.reads_pool:
            costs["reindex"] = reindex(
                **shape,
                unique_entries=sum(min(r.scored, r.last_visible) for r in requests),
                pool_blocks=plan.pool_blocks,
            )
        else:
            costs["index_select"] = index_select(
                **shape,
                unique_entries=sum(r.last_visible for r in requests),
                pool_blocks=plan.pool_blocks if layer.builds_pool else 0,
            )
    return costs


def step_costs(
    plan: LayerPlan, spec: CacheSpec, start: Sequence[int], rows: Sequence[int]
) -> dict[str, Cost]:
    """`layer_costs` of all layers, added up per stage."""
    total: dict[str, Cost] = {}
    for layer in plan.layers:
        for stage, cost in layer_costs(plan, spec, layer, start, rows).items():
            total[stage] = total.get(stage, Cost()) + cost
    return total


class _Rows:
    """Sums over the rows of one request at one layer."""

    def __init__(self, plan: LayerPlan, layer: Layer, start: int, rows: int) -> None:
        positions = np.arange(start, start + rows)
        visible = (positions + 1) // layer.ratio if layer.ratio else np.zeros_like(positions)
        self.last_visible = int(visible[-1]) if rows else 0
        self.attended = sum(attended_entries(plan, layer, n) for n in visible.tolist())
        self.scored = sum(scored_entries(plan, layer, n) for n in visible.tolist())
        self.window = int(np.minimum(positions + 1, plan.window).sum())
        self.window_unique = min(start, plan.window - 1) + rows if rows else 0


def _compress_costs(
    plan: LayerPlan, spec: CacheSpec, group: GroupPlan, start: Sequence[int], rows: Sequence[int]
) -> dict[str, Cost]:
    """The compressor of a Full layer and, at overlapping groups, that of its index keys."""
    ratio, pairs = group.ratio, list(zip(start, rows, strict=True))
    earlier = group.span - ratio  # rows of the group before, which the next entry needs too
    read = sum(min(s, s % ratio + earlier) for s, n in pairs if n)
    written = sum(min(n, group.span) for _, n in pairs)
    shape = {
        "rows": sum(rows),
        "ratio": ratio,
        "entries": sum((s + n) // ratio - s // ratio for s, n in pairs),
        "overlap": group.overlap,
        "bias": plan.family == "v4",
        "tail_rows": 0 if ratio == 1 else read + written,
    }
    own_keys = group.index_width > 0
    from_latent = spec.index if group.indexed and not own_keys else None
    costs = {"compress": compress(**shape, main=spec.main, index=from_latent)}
    if own_keys:
        costs["compress_index"] = compress(**shape, dim=INDEX_DIM, main=None, index=spec.index)
    return costs
