"""Random, realistic inputs: records that our own store quantised, permuted pages, lists.

Caches are kept by what they hold, so that cases of one kind share them and the peer gets the same
vectors in its own format.
"""

import math

import torch
from torch import Tensor

import flash_csa as fc
from flash_csa import RECORDS, Pages
from flash_csa.plan import HEAD_DIM, INDEX_DIM, POOL_BLOCK

CHUNK = 1 << 16  # rows quantised at a time
WIDE = 8  # exponents of a wide group: -8 to 8
MAX_POSITIONS = 1 << 18  # of the rotation table


class Inputs:
    """Makes inputs on one device, from one seed."""

    def __init__(self, device: torch.device | str, seed: int = 0) -> None:
        self.device = torch.device(device)
        self.num_sms = fc.default_num_sms(device)
        self._seed = seed
        self._kept: dict[tuple, Pages] = {}
        self._table: Tensor | None = None
        self.generator = torch.Generator(self.device)
        self.restart()

    def restart(self) -> None:
        """Every case draws from the start, so that it does not depend on those before it."""
        self.generator.manual_seed(self._seed)

    def f32(self, *size: int) -> Tensor:
        return torch.randn(size, generator=self.generator, device=self.device)

    def bf16(self, *size: int) -> Tensor:
        return torch.randn(size, generator=self.generator, device=self.device, dtype=torch.bfloat16)

    def arange(self, count: int) -> Tensor:
        return torch.arange(count, dtype=torch.int32, device=self.device)

    def empty(self, *size: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.empty(size, dtype=dtype, device=self.device)

    def permutation(self, count: int) -> Tensor:
        return torch.randperm(
            count, generator=self.generator, device=self.device, dtype=torch.int32
        )

    def integers(self, high: int, *size: int) -> Tensor:
        return torch.randint(
            high, size, generator=self.generator, device=self.device, dtype=torch.int32
        )

    def ascending(self, rows: int, k: int, high: int) -> Tensor:
        """i32 [rows, k]: different values below `high`, ascending, spread evenly."""
        drawn = self.integers(high - k + 1, rows, k).sort(-1).values
        return drawn + self.arange(k)

    def pages(self, record: str, records: int, page_size: int = 64, *, wide: bool = False) -> Pages:
        """Pages full of normal vectors; the same vectors whatever the record.

        wide: groups of an index key differ by many powers of two.
        """
        key = (record, records, page_size, wide)
        if key not in self._kept:
            self._kept[key] = self._filled(*key)
        return self._kept[key]

    def _filled(self, record: str, records: int, page_size: int, wide: bool) -> Pages:
        pages = Pages.empty(math.ceil(records / page_size), record, page_size, self.device)
        dims, group = RECORDS[record].dims, RECORDS["IndexFp4"].group
        generator = torch.Generator(self.device).manual_seed(dims)
        for first in range(0, records, CHUNK):
            count = min(CHUNK, records - first)
            rows = torch.randn(
                count, dims, generator=generator, device=self.device, dtype=torch.bfloat16
            )
            if wide:
                size = (count, dims // group, 1)
                exponents = torch.randint(
                    -WIDE, WIDE + 1, size, generator=generator, device=self.device
                )
                rows = (rows.unflatten(1, (-1, group)) * exponents.float().exp2()).flatten(1)
                rows = rows.to(torch.bfloat16)
            fc.store(rows, pages, self.arange(count) + first)
        return pages

    def slots(self, positions: Tensor, table: Tensor, page_size: int = 64) -> Tensor:
        """Slots of positions through one row of a block table."""
        return table[(positions // page_size).long()] * page_size + positions % page_size

    def cos_sin(self) -> Tensor:
        """Rotations of positions below MAX_POSITIONS, in compressed layers."""
        if self._table is None:
            size = MAX_POSITIONS if self.device.type == "cuda" else 1024
            self._table = fc.cos_sin_table(size, 160000.0, True).to(self.device)
        return self._table

    def schedule(self, batch: fc.Batch, section: int, **shape) -> Tensor:
        """One section of the schedule of a step with one ratio."""
        defaults = {"ratios": [1], "heads": 64, "index_heads": 32, "k": 512}
        return fc.schedule(batch, **(defaults | shape), num_sms=self.num_sms)[section]

    def index_query(self, rows: int, heads: int, record: str) -> tuple[Tensor, fc.IndexQuery]:
        """bf16 [rows, heads, 128] and the same quantised, all at position 0."""
        q = self.bf16(rows, heads, INDEX_DIM)
        zeros = torch.zeros(rows, dtype=torch.int32, device=self.device)
        return q, fc.quantize_query(q, zeros, self.cos_sin(), record=record)

    def pool(self, rows: int, width: int, visible: int) -> fc.Pool:
        """Uniform blocks, ascending, the newest among them; all blocks where they are no more."""
        blocks = math.ceil(visible / POOL_BLOCK)
        width_used = min(width, blocks)
        chosen = torch.full((rows, width), -1, dtype=torch.int32, device=self.device)
        older = self.ascending(rows, width_used - 1, blocks - 1)
        chosen[:, : width_used - 1] = older
        chosen[:, width_used - 1] = blocks - 1
        return fc.Pool(chosen, torch.full_like(chosen[:, 0], width_used))

    def q(self, rows: int, heads: int) -> Tensor:
        return self.bf16(rows, heads, HEAD_DIM)
