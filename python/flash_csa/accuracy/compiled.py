"""The library's ops as a back end: records in pages of permuted ids, one request for each row."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, repeat

import torch
from torch import Tensor

from ..attend import attend, merge
from ..batch import Batch
from ..cache import ceil_div
from ..compress import Tail, compress
from ..index import IndexQuery, index_scores, quantize_query
from ..plan import HEAD_DIM, INDEX_DIM, POOL_BLOCK
from ..records import RECORDS, Pages
from ..reference import index as reference
from ..reference import pages as reference_pages
from ..select import (
    Pool,
    Selection,
    index_select,
    merge_pools,
    merge_selections,
    normalize_pool,
    select,
)
from ..sizes import default_num_sms
from ..step import Window, schedule, step_slots
from ..store import load, rope_store, store
from .activations import EPS, Activations
from .backends import Formula, Stored, Where
from .formats import INDEX_FP4, MAIN_FP8, Variant
from .library_group import run_group

PAGE_SIZE = 64
SMALL_PAGE = 16  # of what is selected from given scores and of shards
PADDING = 48  # bytes between pages that lie apart
RING = 3  # pages of a window: the least that hold 128 records wherever they begin
CHUNKS = (1, 1, 2, 3, 5, 127, 769)  # rows of calls to compress, the last one's again and again
MAX_K = 1 << 16
DIFFER = -2  # in the place of what outputs of one op do not agree on
NOT_SCORED = -3e38  # in the place of scores that are not written


@dataclass(frozen=True)
class Held:
    """Pages, and in `table` i32 [pages] where each of the sequence's pages lies."""

    pages: Pages
    table: Tensor

    @classmethod
    def empty(cls, count: int, variant: Variant, device: torch.device, padding: int = 0) -> "Held":
        """`count` pages in a permuted order, with bytes of `padding` between them."""
        random = torch.Generator().manual_seed(count)
        table = torch.randperm(count, generator=random).int().to(device)
        size = RECORDS[variant.record].page_bytes(PAGE_SIZE)
        data = torch.zeros(count, size + padding, dtype=torch.uint8, device=device)[:, :size]
        return cls(Pages(data, variant.record, PAGE_SIZE), table)

    def read(self, count: int, variant: Variant) -> Stored:
        """The first `count` records."""
        slots = self.slots(torch.arange(count, device=self.table.device))
        return Stored(load(self.pages, slots, dtype=torch.float32), variant, self)

    def slots(self, positions: Tensor) -> Tensor:
        """i32, -1 where a position is."""
        page = self.table[positions.clamp(min=0).long() // PAGE_SIZE]
        slots = page * PAGE_SIZE + positions.clamp(min=0) % PAGE_SIZE
        return torch.where(positions >= 0, slots, -1).int()


class Compiled(Formula):
    """Kernels of the device that the tensors live on. Formats and pools that have no kernel are
    not measured."""

    name = "compiled"
    pool_block = POOL_BLOCK
    exact_scores = True

    def __init__(self, out: torch.dtype = torch.bfloat16) -> None:
        """out: what attention writes, bf16 as in serving or f32, which kernels sum otherwise."""
        self.out = out

    def outputs(self) -> dict[str, Formula]:
        return {"BF16": Compiled(), "FP32": Compiled(torch.float32)}

    def supports(self, variant: Variant) -> bool:
        return variant.record is not None

    def store(self, rows: Tensor, variant: Variant) -> Stored:
        return self._store(rows, variant)

    def store_apart(self, rows: Tensor, variant: Variant) -> Stored:
        """`store` in pages that are parts of larger ones."""
        return self._store(rows, variant, PADDING)

    def _store(self, rows: Tensor, variant: Variant, padding: int = 0) -> Stored:
        held = Held.empty(ceil_div(len(rows), PAGE_SIZE), variant, rows.device, padding)
        slots = held.slots(torch.arange(len(rows), device=rows.device))
        store(rows.to(torch.bfloat16).contiguous(), held.pages, slots)
        return held.read(len(rows), variant)

    def bytes_of(self, stored: Stored) -> Tensor:
        """u8 [N, bytes]: codes and scales of every record, found without an op."""
        held, record = stored.held, stored.variant.record
        slots = held.slots(torch.arange(len(stored.values), device=held.table.device)).cpu()
        return torch.cat(
            reference_pages.read_rows(held.pages.data.cpu(), slots, record, PAGE_SIZE), 1
        )

    def rope_store(
        self,
        q: Tensor,
        kv: Tensor,
        positions: Tensor,
        cos_sin: Tensor,
        q_norm_eps: float | None = None,
        variant: Variant = MAIN_FP8,
    ) -> tuple[Tensor, Stored]:
        """q bf16 [R, H, 512] rotated, and window records of the rows kv bf16 [R, 512]."""
        held, q = Held.empty(ceil_div(len(kv), PAGE_SIZE), variant, kv.device), q.clone()
        slots = held.slots(torch.arange(len(kv), device=kv.device))
        rows = kv.contiguous(), held.pages, slots, positions.int(), cos_sin
        rope_store(q, *rows, q_norm_eps=q_norm_eps)
        return q, held.read(len(kv), variant)

    def compress(
        self,
        inputs: Activations,
        ratio: int,
        cos_sin: Tensor,
        main: Variant,
        index: Variant,
        chunks: Sequence[int] = CHUNKS,
    ) -> tuple[Stored, Stored]:
        """Main and index records of all complete entries, in chunks of so many rows, the last one's
        again and again, which cut groups: rows of an open group go through a tail."""
        kv, gate = inputs.compressed(ratio)
        count, device = inputs.tokens // ratio, inputs.device
        held = Held.empty(ceil_div(count, PAGE_SIZE), main, device)
        keys = Held.empty(ceil_div(count, PAGE_SIZE), index, device)
        _compress(
            kv,
            gate,
            ratio,
            chunks,
            keys,
            norm_weight=inputs.norm_weight,
            cos_sin=cos_sin,
            bias=inputs.bias(ratio),
            main=held.pages,
            key_weight=inputs.key_weight,
            key_norm_weight=inputs.key_norm_weight,
        )
        return held.read(count, main), keys.read(count, index)

    def tail(self, kv: Tensor, gate: Tensor, ratio: int, cos_sin: Tensor) -> Tensor:
        """f32 [2, ring, width] after the rows kv, gate f32 [n, width] of a sequence."""
        keys = Held.empty(ceil_div(len(kv), PAGE_SIZE), INDEX_FP4, kv.device)
        weight = torch.ones(HEAD_DIM, device=kv.device)
        key = torch.zeros(INDEX_DIM, HEAD_DIM, dtype=torch.bfloat16, device=kv.device)
        options = {"norm_weight": weight, "cos_sin": cos_sin, "key_weight": key}
        options["key_norm_weight"] = weight[:INDEX_DIM]
        return _compress(kv, gate, ratio, (1, 2, len(kv)), keys, **options)

    def compress_index(
        self,
        kv: Tensor,
        gate: Tensor,
        ratio: int,
        cos_sin: Tensor,
        bias: Tensor,
        norm_weight: Tensor,
    ) -> Stored:
        """Index records of V4's own compressor, kv and gate f32 [T, 256], rotated by Hadamard."""
        count = len(kv) // ratio
        keys = Held.empty(ceil_div(count, PAGE_SIZE), INDEX_FP4, kv.device)
        options = {"norm_weight": norm_weight, "cos_sin": cos_sin, "bias": bias, "rotate": True}
        _compress(kv, gate, ratio, CHUNKS, keys, **options)
        return keys.read(count, INDEX_FP4)

    def step(
        self, positions: Tensor, ratio: int, strict: bool = False
    ) -> tuple[Tensor, Tensor, Tensor]:
        """What a step finds for rows at `positions` i64 [R], each a request of its own: window
        positions i64 [R, 128] and the entry that the row closes i64 [R], -1 none; the number of
        entries that it sees i64 [R]."""
        device, rows, tokens = positions.device, len(positions), int(positions.max()) + 1
        # Of pages of another size, and another ratio, comes first.
        ratios, sizes = [4 if ratio == 128 else 128, ratio], [PAGE_SIZE // 4, PAGE_SIZE]
        tables = []
        for each, size in zip(ratios, sizes, strict=True):
            count = ceil_div(tokens, each * size)
            random = torch.Generator().manual_seed(count)
            tables.append(torch.randperm(count, generator=random).to(device))
        ring = torch.tensor([2, 0, 1], device=device)
        made = step_slots(
            Batch.build(positions.tolist(), [1] * rows, device=device),
            [table.int().repeat(rows, 1) for table in tables],
            ring.int().repeat(rows, 1),
            ratios=ratios,
            page_sizes=sizes,
            window_page_size=PAGE_SIZE,
            strict=strict,
        )
        # The latest position up to the row's own that the ring keeps in such a slot.
        held = _positions(made.lists.slots.long(), ring)
        recent = positions[:, None] - (positions[:, None] - held) % (RING * PAGE_SIZE)
        listed = torch.arange(held.shape[1], device=device) < made.lists.lengths[:, None]
        return (
            torch.where(listed & (held >= 0), recent, -1),
            _positions(made.entry_slots[1].long(), tables[1]),
            made.n_vis[1].long(),
        )

    def group(self, inputs: Activations, k: int, pool_blocks: int, cos_sin: Tensor) -> list[Tensor]:
        """f32 [Q, H, 512] of each layer of the group, through the library's own layers."""
        return run_group(inputs, k, pool_blocks, cos_sin)

    def query(
        self,
        index_q: Tensor,
        where: Where,
        cos_sin: Tensor,
        variant: Variant,
        rotate: bool = False,
    ) -> Stored:
        """rotate: by Hadamard too (V4)."""
        given = index_q, where.positions.int(), cos_sin
        made = quantize_query(*given, record=variant.record, rotate=rotate)
        values = reference.dequantize_query(
            reference.IndexQuery(made.codes.cpu(), made.scales.cpu())
        )
        return Stored(values.to(index_q.device), variant, made)

    def scores(self, query: Stored, keys: Stored, weights: Tensor, where: Where) -> Tensor:
        return self._scores(query, keys, weights, where)[:, : len(keys.values)]

    def scores_inside(
        self, query: Stored, keys: Stored, weights: Tensor, where: Where, pool: Tensor
    ) -> Tensor:
        """f32 [Q, 8 * blocks]: of the positions in `pool` i64 [Q, blocks], -1 padded, alone."""
        return self._scores(query, keys, weights, where, pool)

    def index_select(
        self,
        query: Stored,
        keys: Stored,
        weights: Tensor,
        where: Where,
        k: int,
        *,
        blocks: int = 0,
        pool: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """i64 [Q, k]: `select` of `scores`, or inside `pool`, in one op as layers call it; and the
        pool i64 [Q, blocks] of as many `blocks`."""
        width = blocks if pool is None else pool.shape[1]
        rows = _Rows(where, len(keys.values), index_heads=weights.shape[1], k=k, pool_blocks=width)
        selection, built = index_select(
            *self._index(query, keys, weights, rows, pool is not None),
            k,
            ratio=where.ratio,
            strict=where.strict,
            pool_blocks=blocks,
            pool=_pool(pool),
        )
        lists = _listed(selection, keys.held.table)
        return lists, None if built is None else _counted(built.blocks.long(), built.counts)

    def _scores(
        self,
        query: Stored,
        keys: Stored,
        weights: Tensor,
        where: Where,
        pool: Tensor | None = None,
    ) -> Tensor:
        blocks = 0 if pool is None else pool.shape[1]
        heads = weights.shape[1]
        rows = _Rows(where, len(keys.values), index_heads=heads, pool_blocks=blocks)
        index = self._index(query, keys, weights, rows, pool is not None)
        width = POOL_BLOCK * blocks if pool is not None else rows.pages * PAGE_SIZE
        out = torch.full((len(weights), width), NOT_SCORED, device=weights.device)
        options = {"ratio": where.ratio, "strict": where.strict, "pool": _pool(pool)}
        return index_scores(*index, **options, out=out)

    def visible(
        self, query: Stored, keys: Stored, weights: Tensor, where: Where
    ) -> tuple[Tensor, Tensor]:
        """bool [Q, N]: entries that are scored, and those of a selection of all that there are."""
        scored = self.scores(query, keys, weights, where) != NOT_SCORED
        lists, _ = self.index_select(query, keys, weights, where, scored.shape[1])
        listed = torch.zeros(len(lists), scored.shape[1] + 1, dtype=torch.bool, device=lists.device)
        listed.scatter_(1, torch.where(lists < 0, scored.shape[1], lists), True)
        return scored, listed[:, :-1]

    def _index(
        self, query: Stored, keys: Stored, weights: Tensor, rows: "_Rows", inside: bool
    ) -> tuple[IndexQuery, Pages, Tensor, Batch, Tensor, Tensor]:
        """The arguments that index_scores and index_select share."""
        return (
            query.held,
            keys.held.pages,
            weights.float(),
            rows.batch,
            rows.block_table(keys.held.table),
            rows.section("reindex" if inside else "index"),
        )

    def pool(self, scores: Tensor, where: Where, blocks: int, block: int) -> Tensor:
        if block != POOL_BLOCK:
            raise ValueError(f"flash_csa.accuracy: pools have blocks of {POOL_BLOCK}, got {block}")
        rows = _Rows(where, scores.shape[1], page_size=SMALL_PAGE, pool_blocks=blocks)
        built = self._select(scores, rows, 1, pool_blocks=blocks)[1]
        return _counted(built.blocks.long(), built.counts)

    def select(
        self,
        scores: Tensor,
        where: Where,
        k: int,
        pool: Tensor | None = None,
        block: int = 0,
    ) -> Tensor:
        width = 0 if pool is None else pool.shape[1]
        rows = _Rows(where, scores.shape[1], page_size=SMALL_PAGE, pool_blocks=width)
        if pool is None:
            return rows.listed(self._select(scores, rows, min(k, MAX_K))[0])
        columns = (pool[:, :, None] * block + torch.arange(block, device=pool.device)).flatten(1)
        inside = scores.gather(1, columns.clamp(min=0, max=scores.shape[1] - 1))
        return rows.listed(self._select(inside, rows, k, pool=_pool(pool))[0])

    def _select(self, scores: Tensor, rows: "_Rows", k: int, **pool):
        missing = rows.pages * rows.page_size - scores.shape[1]
        scores = torch.nn.functional.pad(scores, (0, max(0, missing)))
        return select(
            scores.contiguous(),
            rows.batch,
            k,
            rows.section("index" if pool.get("pool") is None else "reindex"),
            block_table=rows.block_table(rows.table),
            ratio=rows.where.ratio,
            strict=rows.where.strict,
            page_size=rows.page_size,
            **pool,
        )

    def normalize_pool(self, blocks: Tensor, where: Where, entries: int) -> Tensor:
        """i64 [Q, n]: a pool of foreign lists `blocks` i64 [Q, n], in any order."""
        options = {"ratio": where.ratio, "strict": where.strict, "max_entries": entries}
        made = normalize_pool(blocks.int(), where.positions.int(), **options)
        return _counted(made.blocks.long(), made.counts)

    def merge_selections(
        self, lists: Tensor, scores: Tensor, where: Where, entries: int, k: int
    ) -> Tensor:
        """`select` of what shards selected: lists i64 and scores f32 [W, Q, K]."""
        rows = _Rows(where, entries, page_size=SMALL_PAGE)
        made = merge_selections(
            lists.int(),
            scores,
            k,
            row_request=rows.batch.row_request,
            block_table=rows.block_table(rows.table),
            page_size=rows.page_size,
        )
        return rows.listed(made)

    def merge_pools(self, blocks: Tensor, scores: Tensor, where: Where, count: int) -> Tensor:
        """`pool` of shards' best blocks: i64 and their best scores f32 [W, Q, n]."""
        options = {"ratio": where.ratio, "strict": where.strict, "pool_blocks": count}
        made = merge_pools(blocks.int(), scores, where.positions.int(), **options)
        return _counted(made.blocks.long(), made.counts)

    def attend(
        self,
        q: Tensor,
        main: Stored,
        lists: Tensor,
        window: Stored,
        window_lists: Tensor,
        sink: Tensor,
    ) -> Tensor:
        return self._attend(q, main, lists, window, window_lists, sink=sink)

    def attend_part(
        self,
        q: Tensor,
        main: Stored,
        lists: Tensor,
        window: Stored,
        window_lists: Tensor,
        **options,
    ) -> tuple[Tensor, Tensor]:
        """Without a sink: the output, and f32 [Q, H] the log of the sum of exponentials; options of
        `attend`."""
        lse = torch.empty(q.shape[:2], device=q.device)
        return self._attend(q, main, lists, window, window_lists, lse=lse, **options), lse

    def merge(self, parts: Sequence[tuple[Tensor, Tensor]], sink: Tensor) -> tuple[Tensor, Tensor]:
        """Attention over the records of all `parts`, of attend_part, f32 [Q, H, 512]; the log of
        the sum of exponentials f32 [Q, H], without the sink."""
        outs, lses = (torch.stack(each) for each in zip(*parts, strict=True))
        out = torch.empty(outs.shape[1:], dtype=self.out, device=outs.device)
        lse = torch.empty_like(lses[0])
        merge(outs.to(self.out), lses, sink=sink, out=out, lse=lse)
        return out.float(), lse

    def attend_back(
        self,
        q: Tensor,
        main: Stored,
        lists: Tensor,
        window: Stored,
        window_lists: Tensor,
        sink: Tensor,
        derotate: tuple[Tensor, Tensor],
    ) -> Tensor:
        """The output turned back, as layers write it: derotate are positions and table."""
        back = (derotate[0].int(), derotate[1])
        return self._attend(q, main, lists, window, window_lists, sink=sink, derotate=back)

    def attend_visible(
        self,
        q: Tensor,
        main: Stored,
        where: Where,
        window: Stored,
        window_lists: Tensor,
        sink: Tensor,
    ) -> Tensor:
        """Over all entries that a row sees, without a list (HCA)."""
        rows = _Rows(where, len(main.values), heads=q.shape[1])
        table, n_vis = rows.block_table(main.held.table), where.n_vis.int()
        contiguous = table, rows.batch.row_request, n_vis
        section = rows.section("contiguous")
        return self._over(q, main, window, window_lists, section, contiguous=contiguous, sink=sink)

    def _attend(
        self,
        q: Tensor,
        main: Stored,
        lists: Tensor,
        window: Stored,
        window_lists: Tensor,
        **options,
    ) -> Tensor:
        where = Where(torch.zeros(len(q), device=q.device).long(), 1)
        rows = _Rows(where, 1, heads=q.shape[1], k=lists.shape[1])
        lists, lengths = _ended(lists)
        chosen = Selection(lists.int(), main.held.slots(lists), lengths)
        section = rows.section("attend")
        return self._over(q, main, window, window_lists, section, selection=chosen, **options)

    def _over(
        self,
        q: Tensor,
        main: Stored,
        window: Stored,
        window_lists: Tensor,
        section: Tensor,
        **options,
    ) -> Tensor:
        recent, lengths = _ended(window_lists)
        return attend(
            q.contiguous(),
            main=main.held.pages,
            window_pages=window.held.pages,
            window=Window(window.held.slots(recent), lengths),
            schedule=section,
            out=torch.empty(q.shape, dtype=self.out, device=q.device),
            **options,
        ).float()


def _compress(
    kv: Tensor, gate: Tensor | None, ratio: int, chunks: Sequence[int], keys: Held, **options
) -> Tensor | None:
    """`compress` of a sequence, chunk by chunk, to `keys` and the pages in `options`. Returns the
    tail f32 [2, ring, width], NaN where nothing was kept."""
    span, tail = 2 * ratio if ratio == 4 else ratio, None
    if gate is not None:
        tail = Tail(torch.full((1, 2, span, kv.shape[1]), torch.nan, device=kv.device))
    for start, end in _cuts(len(kv), chunks):
        tokens = torch.arange(start, end, device=kv.device)
        compress(
            kv[start:end],
            Batch.build([start], [len(tokens)], device=kv.device),
            keys.slots(torch.where((tokens + 1) % ratio == 0, tokens // ratio, -1)),
            ratio=ratio,
            eps=EPS,
            gate=None if gate is None else gate[start:end],
            tail=tail,
            index=keys.pages,
            **options,
        )
    return None if tail is None else tail.rows[0]


def _cuts(count: int, chunks: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Begin and end of each chunk of `count` rows."""
    start = 0
    for rows in chain(chunks, repeat(chunks[-1])):
        if start >= count:
            return
        yield start, min(start + rows, count)
        start += rows


def _positions(slots: Tensor, table: Tensor, size: int = PAGE_SIZE) -> Tensor:
    """i64: where `slots` lie by a table of pages i64 [pages], -1 where on none of them."""
    pages = table.argsort()
    held = pages[(slots // size).clamp(0, len(pages) - 1)] * size + slots % size
    return torch.where((slots >= 0) & (slots < len(pages) * size), held, -1)


def _listed(selection: Selection, table: Tensor, size: int = PAGE_SIZE) -> Tensor:
    """i64 [Q, k]: what is selected, as positions, slots and lengths say alike; DIFFER elsewhere."""
    positions = selection.positions.long()
    alike = _positions(selection.slots.long(), table.long(), size) == positions
    return _counted(torch.where(alike, positions, DIFFER), selection.lengths)


def _counted(lists: Tensor, lengths: Tensor) -> Tensor:
    """Lists that end where their lengths say; DIFFER where they do not."""
    listed = torch.arange(lists.shape[1], device=lists.device) < lengths[:, None]
    return torch.where(listed == (lists >= 0), lists, DIFFER)


def _ended(lists: Tensor) -> tuple[Tensor, Tensor]:
    """Lists and their lengths i32 [Q]: up to the last record. What is beyond must not be read."""
    columns = torch.arange(1, lists.shape[1] + 1, device=lists.device)
    lengths = torch.where(lists >= 0, columns, 0).amax(1)
    return torch.where(columns > lengths[:, None], 0, lists), lengths.int()


def _pool(blocks: Tensor | None) -> Pool | None:
    return None if blocks is None else Pool(blocks.int(), (blocks >= 0).sum(1).int())


class _Rows:
    """Each run of consecutive query rows as a request, so that rows may lie anywhere in the
    sequence. A request without rows comes first: rows and requests have different numbers."""

    def __init__(
        self,
        where: Where,
        entries: int,
        *,
        page_size: int = PAGE_SIZE,
        heads: int = 1,
        index_heads: int = 1,
        k: int = 1,
        pool_blocks: int = 0,
    ) -> None:
        self.where, self.page_size = where, page_size
        self.pages = ceil_div(entries, page_size)
        device = where.positions.device
        random = torch.Generator().manual_seed(self.pages)
        self.table = torch.randperm(self.pages, generator=random).to(device)  # for scores alone
        starts, counts = [0], [0]
        for position in where.positions.tolist():
            if counts[-1] and position == starts[-1] + counts[-1]:
                counts[-1] += 1
            else:
                starts, counts = [*starts, position], [*counts, 1]
        self.batch = Batch.build(starts, counts, device=device)
        self._schedule = schedule(
            self.batch,
            ratios=[where.ratio],
            max_entries=[self.pages * page_size],
            k=k,
            heads=heads,
            index_heads=index_heads,
            pool_blocks=pool_blocks,
            pool_ratio=where.ratio if pool_blocks else 0,
            contiguous_ratios=[where.ratio],
            strict=where.strict,
            num_sms=default_num_sms(device),
        )

    def section(self, kind: str) -> Tensor:
        return self._schedule[1 + ("index", "reindex", "attend", "contiguous").index(kind)]

    def listed(self, selection: Selection) -> Tensor:
        """i64 [Q, k]: see `_listed`."""
        return _listed(selection, self.table, self.page_size)

    def block_table(self, table: Tensor) -> Tensor:
        """i32 [1 + Q, pages]: every request holds the sequence, but the first has no pages."""
        tables = table.int().expand(self.batch.num_requests, -1).clone()
        tables[0] = -1
        return tables
