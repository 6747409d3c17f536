"""Compressors of every kind with caches, and steps over packed requests, for the compress tests."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache

import pytest
import torch

import flash_csa as fc
from flash_csa.reference import pages as ref_pages
from flash_csa.reference.rope import cos_sin_table
from page_views import guarded_pages

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Kind:
    """A compressor of the models: ratio, width of an entry, records, options."""

    ratio: int
    dim: int = 512
    main: str | None = "MainFp4"
    index: str | None = "IndexFp4"
    projected: bool = True  # the index key is a projection of the latent (V4.1)
    biased: bool = False
    rotate: bool = False
    eps: float = 1e-20

    @property
    def overlap(self) -> bool:
        return self.ratio == 4

    @property
    def width(self) -> int:
        return self.dim * (2 if self.overlap else 1)

    @property
    def span(self) -> int:
        """Rows that an entry pools."""
        return self.ratio * (2 if self.overlap else 1)


V4 = {"biased": True, "eps": 1e-6, "projected": False}
KINDS = {
    "r1": Kind(1),
    "r2": Kind(2),
    "r2.hopper": Kind(2, main="WindowFp8", index="IndexFp8", rotate=True),
    "r4": Kind(4, main="MixedFp8", index=None, **V4),
    "r4.index": Kind(4, dim=128, main=None, rotate=True, **V4),
    "r128": Kind(128, main="MixedFp8", index=None, **V4),
}
every_kind = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS.keys())
every_tailed_kind = pytest.mark.parametrize(
    "kind", [k for k in KINDS.values() if k.ratio > 1], ids=[n for n in KINDS if n != "r1"]
)
MAX_POS = 8192


@cache
def table(device: torch.device) -> torch.Tensor:
    """cos_sin of compressed layers for MAX_POS positions."""
    return cos_sin_table(MAX_POS, 160000, True).to(device)


@cache
def projections(kind: Kind, rows: int, seed: int = 1) -> tuple[torch.Tensor, torch.Tensor | None]:
    """kv and gate of `rows` tokens; shared, so to be cloned before they are changed."""
    random = torch.Generator().manual_seed(seed)
    kv = torch.randn(rows, kind.width, generator=random)
    if kind.ratio == 1:
        return kv.bfloat16(), None
    return kv, 3 * torch.randn(rows, kind.width, generator=random)


@cache
def weights(kind: Kind) -> dict[str, torch.Tensor]:
    """The compressor's parameters, as keywords of `compress`."""
    random = torch.Generator().manual_seed(2)
    made = {"norm_weight": 1 + 0.2 * torch.randn(kind.dim, generator=random)}
    if kind.biased:
        made["bias"] = torch.randn(kind.ratio, kind.width, generator=random)
    if kind.projected:
        made["key_weight"] = (torch.randn(128, 512, generator=random) / 20).bfloat16()
        made["key_norm_weight"] = 1 + 0.2 * torch.randn(128, generator=random)
    return made


@dataclass
class Cache:
    """Pages, tails and latents of a compressor, poisoned until written.

    Entry j of request r lies at slots[r, j], a permutation of the capacity. Tails are NaN.
    """

    kind: Kind
    requests: int
    entries: int  # of each request
    device: torch.device = CPU
    page_size: int = 16
    padding: int = 0
    max_draft: int = 0
    fill: int = 0xFF
    slots: torch.Tensor = field(init=False)
    tail: fc.Tail | None = field(init=False, default=None)
    main: fc.Pages | None = field(init=False, default=None)
    index: fc.Pages | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        kind, capacity = self.kind, self.requests * self.entries
        random = torch.Generator().manual_seed(3)
        self.slots = torch.randperm(capacity, generator=random).to(torch.int32)
        self.slots = self.slots.view(self.requests, self.entries)
        num_pages = -(-capacity // self.page_size)
        options = {"padding": self.padding, "fill": self.fill, "device": self.device}
        if kind.main:
            self.main, self.main_buffer = guarded_pages(
                num_pages, kind.main, self.page_size, **options
            )
        if kind.index:
            self.index, self.index_buffer = guarded_pages(
                num_pages, kind.index, self.page_size, **options
            )
        if kind.ratio > 1:
            size = (self.requests, 2, kind.span + self.max_draft, kind.width)
            self.tail = fc.Tail(torch.full(size, torch.nan, device=self.device))

    def state(self) -> list[torch.Tensor]:
        """Every byte that compress may write, guard bands and padding included."""
        parts = [self.main_buffer] if self.main else []
        parts += [self.index_buffer] if self.index else []
        parts += [self.tail.rows.view(torch.int32)] if self.tail else []
        return [part.cpu().clone() for part in parts]

    def records(self, request: int, entries: int) -> list[torch.Tensor]:
        """Bytes of the first entries of a request: data and scales of main, then of index."""
        slots = self.slots[request, :entries]
        parts = []
        for pages in (self.main, self.index):
            if pages is not None:
                parts += ref_pages.read_rows(pages.data.cpu(), slots, pages.record, pages.page_size)
        return parts

    def live_tail(self, request: int, length: int) -> torch.Tensor:
        """Tail rows of the last span - 1 positions before `length`: all that a step may read."""
        positions = torch.arange(max(length - self.kind.span + 1, 0), length)
        rows = self.tail.rows[request].cpu()
        return rows[:, positions % rows.shape[1]].view(torch.int32)


def same(a: Sequence[torch.Tensor], b: Sequence[torch.Tensor]) -> bool:
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@dataclass(frozen=True)
class Chunk:
    """Rows start .. start + rows - 1 of a request in one step, then `padding` padded rows."""

    request: int
    start: int
    rows: int
    padding: int = 0


def pack(kind: Kind, chunks: Sequence[Chunk], inputs: Sequence, tail_padding: int = 0) -> tuple:
    """kv, gate and batch of a step. inputs[r]: kv and gate of all tokens of request r. Padded rows
    are NaN."""
    parts = []
    for chunk in chunks:
        rows = slice(chunk.start, chunk.start + chunk.rows)
        parts.append([x if x is None else x[rows] for x in inputs[chunk.request]])
        if chunk.padding:
            parts.append(_nan_rows(kind, chunk.padding))
    parts.append(_nan_rows(kind, tail_padding))
    kv = torch.cat([kv for kv, _ in parts])
    gate = None if kind.ratio == 1 else torch.cat([gate for _, gate in parts])
    owned = [chunk.rows + chunk.padding for chunk in chunks]
    batch = fc.Batch.build(
        [chunk.start for chunk in chunks],
        [chunk.rows for chunk in chunks],
        owned=owned,
        num_rows=sum(owned) + tail_padding,
        tail_slot=[chunk.request for chunk in chunks],
    )
    return kv, gate, batch


def _nan_rows(kind: Kind, rows: int) -> list[torch.Tensor | None]:
    nan = torch.full((rows, kind.width), torch.nan)
    return [nan.bfloat16(), None] if kind.ratio == 1 else [nan, nan]


def entry_slots(cache: Cache, batch: fc.Batch, chunks: Sequence[Chunk]) -> torch.Tensor:
    """i32[R]: slot of the entry that each row closes, -1 where it closes none."""
    positions = batch.positions.long()
    closes = (positions >= 0) & ((positions + 1) % cache.kind.ratio == 0)
    requests = torch.tensor([chunk.request for chunk in chunks] or [0])[batch.row_request.long()]
    entries = positions // cache.kind.ratio
    return torch.where(closes, cache.slots[requests, entries * closes], -1).to(torch.int32)


def call(
    cache: Cache,
    kv: torch.Tensor,
    gate: torch.Tensor | None,
    batch: fc.Batch,
    slots: torch.Tensor,
    **overrides,
) -> None:
    """compress into `cache`, with everything moved to its device; overrides replace keywords."""
    kind = cache.kind
    keywords = {"ratio": kind.ratio, "eps": kind.eps, "rotate": kind.rotate, "gate": gate}
    keywords |= {"tail": cache.tail, "main": cache.main, "index": cache.index}
    keywords |= weights(kind) | {"cos_sin": table(cache.device)} | overrides
    keywords = {
        name: value.to(cache.device) if isinstance(value, torch.Tensor) else value
        for name, value in keywords.items()
    }
    tensors = [t.to(cache.device) for t in batch.flat()[:-1]]
    batch = fc.Batch(*tensors, max_rows=batch.max_rows)
    fc.compress(kv.to(cache.device), batch, slots.to(cache.device), **keywords)


def step(
    cache: Cache, chunks: Iterable[Chunk], inputs: Sequence, tail_padding: int = 0, **overrides
) -> None:
    """One call of compress over `chunks`."""
    chunks = list(chunks)
    kv, gate, batch = pack(cache.kind, chunks, inputs, tail_padding)
    call(cache, kv, gate, batch, entry_slots(cache, batch, chunks), **overrides)


def run(cache: Cache, request: int, inputs: Sequence, cuts: Sequence[int], start: int = 0) -> None:
    """Feeds one request in steps that end at `cuts` (ascending positions)."""
    for stop in cuts:
        step(cache, [Chunk(request, start, stop - start)], inputs)
        start = stop


def one_call(
    kind: Kind, tokens: int, device: torch.device = CPU, **overrides
) -> tuple[Cache, torch.Tensor]:
    """All tokens of one request in one call: the cache and the latents bf16[entries, dim]."""
    cache = Cache(kind, 1, max(tokens // kind.ratio, 1), device)
    latents = torch.full((tokens, kind.dim), torch.nan, dtype=torch.bfloat16, device=device)
    step(cache, [Chunk(0, 0, tokens)], [projections(kind, tokens)], latent_out=latents, **overrides)
    closing = torch.arange(1, tokens + 1) % kind.ratio == 0
    latents = latents.cpu()
    assert latents[~closing].isnan().all()  # only closing rows are written
    return cache, latents[closing]
