"""Index keys in pages, queries and batches for the tests of index, select and pools."""

import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

import flash_csa as fc
from flash_csa.reference import ops as ref
from flash_csa.reference import pages as ref_pages
from flash_csa.reference.layout import record_of
from flash_csa.reference.quant import quantize
from page_views import guarded_pages, on_device

CPU = torch.device("cpu")
POISON_SCORE = -12345.0  # no score that a test makes


def random_pages(
    num_pages: int, page_size: int, record: str = "IndexFp4", *, padding: int = 0
) -> fc.Pages:
    """Pages of random codes and plausible scales, with guard bytes between them."""
    pages, _ = guarded_pages(num_pages, record, page_size, padding=padding)
    form = record_of(record)
    codes = torch.randint(0, 256, (num_pages, page_size * form.data_bytes), dtype=torch.uint8)
    if record == "IndexFp8":
        codes = torch.where(codes & 0x7F == 0x7F, 0, codes).to(torch.uint8)  # no NaN
        scales = torch.rand(num_pages, page_size).add(0.5).view(torch.uint8)
    else:
        scales = torch.randint(118, 130, (num_pages, 4 * page_size), dtype=torch.uint8)
    pages.data.copy_(torch.cat([codes, scales], 1))
    return pages


def random_query(rows: int, heads: int, record: str = "IndexFp4") -> fc.IndexQuery:
    if record == "IndexFp8":
        values = (torch.randn(rows, heads, 128) * 50).to(torch.float8_e4m3fn)
        return fc.IndexQuery(values.view(torch.uint8), torch.rand(rows, heads) + 0.5)
    codes = torch.randint(0, 256, (rows, heads, 64), dtype=torch.uint8)
    scales = torch.randint(118, 130, (rows, heads, 4), dtype=torch.uint8)
    return fc.IndexQuery(codes, scales.view(torch.int32).squeeze(-1))


def random_table(batch: fc.Batch, entries: int, page_size: int, spare: int = 3) -> torch.Tensor:
    """Block table i32[B, max_pages] of pages in random order, of a cache with `spare` more."""
    columns = -(-entries // page_size)
    pages = torch.randperm(batch.num_requests * columns + spare)[: batch.num_requests * columns]
    return pages.int().view(batch.num_requests, columns)


def moved(struct, device):
    """The struct with its tensors on a device."""
    tensors = {
        name: on_device(value, device)
        for name, value in vars(struct).items()
        if isinstance(value, torch.Tensor)
    }
    return replace(struct, **tensors)


@dataclass(frozen=True)
class IndexCase:
    """Everything that scoring takes; tensors on the CPU, ops run on `device`."""

    query: fc.IndexQuery
    index: fc.Pages
    weights: torch.Tensor
    batch: fc.Batch
    table: torch.Tensor
    ratio: int = 1
    strict: bool = False
    device: torch.device = CPU

    @property
    def entries(self) -> int:
        return self.table.shape[1] * self.index.page_size

    def n_vis(self) -> list[int]:
        """Visible entries of each row."""
        seen = (self.batch.positions + (0 if self.strict else 1)).clamp(min=0) // self.ratio
        return seen.clamp(max=self.entries).tolist()

    def _arguments(self, reindex: bool) -> tuple:
        d = self.device
        batch, table = moved(self.batch, d), self.table.to(d)
        schedule = section(batch, self.entries, self.ratio, self.strict, reindex)
        query, index = moved(self.query, d), moved(self.index, d)
        return query, index, self.weights.to(d), batch, table, schedule

    def scores(self, pool: fc.Pool | None = None, out: torch.Tensor | None = None) -> torch.Tensor:
        """The op's scores, over poison."""
        columns = self.entries if pool is None else 8 * pool.blocks.shape[1]
        if out is None:
            out = torch.full((self.batch.num_rows, columns), POISON_SCORE, device=self.device)
        pool = pool and moved(pool, self.device)
        options = {"ratio": self.ratio, "strict": self.strict, "pool": pool, "out": out}
        return fc.index_scores(*self._arguments(pool is not None), **options).cpu()

    def index_select(
        self, k: int, *, pool_blocks: int = 0, pool: fc.Pool | None = None
    ) -> tuple[fc.Selection, fc.Pool | None]:
        pool = pool and moved(pool, self.device)
        selection, built = fc.index_select(
            *self._arguments(pool is not None),
            k,
            ratio=self.ratio,
            strict=self.strict,
            pool=pool,
            pool_blocks=pool_blocks,
            out=outputs(self.batch.num_rows, k, pool_blocks, self.device),
        )
        return moved(selection, CPU), built and moved(built, CPU)

    def select(self, scores: torch.Tensor, k: int, **options):
        """The op on the case's rows and table."""
        return select(
            scores,
            self.batch,
            k,
            table=self.table,
            ratio=self.ratio,
            page_size=self.index.page_size,
            strict=self.strict,
            device=self.device,
            **options,
        )

    def expected_scores(self, pool=None, exact: bool = True) -> torch.Tensor:
        """The reference's scores, NaN where undefined."""
        batch, options = self.batch, {"ratio": self.ratio, "strict": self.strict}
        arguments = (self.query, self.index, self.weights.float(), batch, self.table)
        return ref.index_scores(*arguments, **options, pool=pool, exact=exact)

    def visible(self, pool=None) -> torch.Tensor:
        """bool: columns that hold a visible position on a page."""
        size = self.index.page_size
        columns = torch.arange(self.entries).expand(self.batch.num_rows, -1)
        if pool is not None:
            columns = (pool.blocks[:, :, None] * 8 + torch.arange(8)).flatten(1)
        request = self.batch.row_request.clamp(min=0).long()
        page = self.table[request].gather(1, columns.clamp(0, self.entries - 1).long() // size)
        inside = (columns >= 0) & (columns < torch.tensor(self.n_vis())[:, None])
        return inside & (page >= 0) & (self.batch.row_request >= 0)[:, None]


def index_case(
    start: Sequence[int] = (100,),
    rows: Sequence[int] = (1,),
    *,
    entries: int | None = None,
    page_size: int = 64,
    ratio: int = 1,
    heads: int = 32,
    record: str = "IndexFp4",
    query_record: str | None = None,
    strict: bool = False,
    padding: int = 0,
    device: torch.device = CPU,
    **batch_options,
) -> IndexCase:
    """A random case: request r has start[r] tokens before its rows[r] query rows."""
    batch = fc.Batch.build(start, rows, **batch_options)
    if entries is None:
        entries = max(1, (int(batch.positions.max()) + 1) // ratio)
    table = random_table(batch, entries, page_size)
    return IndexCase(
        random_query(batch.num_rows, heads, query_record or record),
        random_pages(table.numel() + 3, page_size, record, padding=padding),
        torch.randn(batch.num_rows, heads) / 8,
        batch,
        table,
        ratio,
        strict,
        device,
    )


def stored_case(
    keys: torch.Tensor,
    q: torch.Tensor,
    weights: torch.Tensor,
    positions: torch.Tensor,
    *,
    ratio: int = 1,
    page_size: int = 64,
    device: torch.device = CPU,
) -> IndexCase:
    """A case of given vectors: keys [N, 128] and query rows q [R, H, 128] are quantised as they
    are. Each row, at its position, is a request of its own; all read the same pages."""
    columns = -(-len(keys) // page_size)
    pages, _ = guarded_pages(columns, "IndexFp4", page_size)
    table = torch.randperm(columns).int()
    entry = torch.arange(len(keys))
    slots = table[entry // page_size].long() * page_size + entry % page_size
    ref_pages.store(keys.bfloat16(), pages.data, slots, "IndexFp4", page_size)
    codes, scales = quantize(q.bfloat16(), "IndexFp4")
    return IndexCase(
        fc.IndexQuery(codes, scales.contiguous().view(torch.int32).squeeze(-1)),
        pages,
        weights,
        fc.Batch.build(positions.tolist(), [1] * len(positions)),
        table.repeat(len(positions), 1),
        ratio,
        device=device,
    )


def section(
    batch: fc.Batch, entries: int, ratio: int, strict: bool = False, reindex: bool = False
) -> torch.Tensor:
    """The schedule's section for scoring and selecting all entries, or those of a pool."""
    return fc.schedule(
        batch,
        ratios=[ratio],
        max_entries=[entries],
        k=512,
        heads=64,
        index_heads=32,
        pool_blocks=2048,
        pool_ratio=ratio,
        strict=strict,
        num_sms=fc.default_num_sms(batch.positions.device),
    )[2 if reindex else 1]


def outputs(rows: int, k: int, pool_blocks: int, device=CPU) -> tuple[fc.Selection, fc.Pool | None]:
    """Poisoned outputs with scores."""
    selection = fc.Selection.empty(rows, k, device, scores=True)
    pool = fc.Pool.empty(rows, pool_blocks, device, scores=True) if pool_blocks else None
    for tensor in (*vars(selection).values(), *(vars(pool).values() if pool else ())):
        tensor.fill_(-777)
    return selection, pool


def select(
    scores: torch.Tensor,
    batch: fc.Batch,
    k: int,
    *,
    table: torch.Tensor,
    ratio: int = 1,
    page_size: int = 64,
    strict: bool = False,
    pool_blocks: int = 0,
    pool: fc.Pool | None = None,
    device: torch.device = CPU,
) -> tuple[fc.Selection, fc.Pool | None]:
    """The op over poisoned outputs, results on the CPU."""
    batch = moved(batch, device)
    entries = table.shape[1] * page_size
    selection, built = fc.select(
        scores.to(device),
        batch,
        k,
        section(batch, entries, ratio, strict, pool is not None),
        block_table=table.to(device),
        ratio=ratio,
        page_size=page_size,
        strict=strict,
        pool_blocks=pool_blocks,
        pool=pool and moved(pool, device),
        out=outputs(len(scores), k, pool_blocks, device),
    )
    return moved(selection, CPU), built and moved(built, CPU)


def assert_same_list(got, want) -> None:
    """Selections or pools: equal ids and counts, equal scores (NaN where there is none)."""
    for name, tensor in vars(got).items():
        torch.testing.assert_close(tensor, getattr(want, name), rtol=0, atol=0, equal_nan=True)


def in_new_process(program: str) -> str:
    """What a Python program prints that sees the same modules."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()
