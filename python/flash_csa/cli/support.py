"""Which variants run on a device: the ops are asked, each at its smallest size.

A table would have to be kept in step with the kernels; a call cannot be out of date.
"""

from collections.abc import Callable, Iterable
from itertools import groupby
from typing import Any

import torch

import flash_csa as fc

from .. import _C

RATIOS = (1, 2, 4, 128)
MAX_HEADS = 256  # asked for; there is no limit
ANY = "any number"
DEFAULT_PAGE_SIZE = 64


def supported(device: torch.device | str = "cpu") -> dict[str, Any]:
    """The values of each axis that run on `device`, the others at the V4.1 value.

    Top-k, index heads and page sizes (those at which every stage runs) are ranges ("1-256"), and so
    are heads where not all that are asked for run. Every page size is asked for; of the others a
    spread of values up to the limit.
    """
    ask = _Asker(torch.device(device))
    heads = _up_to(MAX_HEADS, lambda heads: ask.attend(heads=heads))
    sizes = _which(ask.page_size, range(1, _C.MAX_PAGE_SIZE + 1))
    return {
        "ratios": _which(ask.compress, RATIOS),
        "main_records": _which(ask.attend, fc.RECORDS),
        "window_records": _which(ask.rope_store, fc.RECORDS),
        "index_records": _which(ask.index, fc.RECORDS),
        "heads": [ANY] if heads == [f"1-{MAX_HEADS}"] else heads,
        "index_heads": _up_to(_C.MAX_INDEX_HEADS, lambda heads: ask.index(heads=heads)),
        "topk": _up_to(_C.MAX_TOP_K, lambda k: ask.index(k=k)),
        "page_sizes": _ranges(sizes),
    }


def _which(ask: Callable[[Any], None], values: Iterable) -> list:
    """The values for which `ask` raises nothing."""
    taken = []
    for value in values:
        try:
            ask(value)
        except ValueError:
            continue
        taken.append(value)
    return taken


def _up_to(limit: int, ask: Callable[[Any], None]) -> list[str]:
    """The range 1 to `limit` where powers of two, and what lies beside them and between, all run;
    else those that do."""
    powers = [1 << bit for bit in range(limit.bit_length())]
    asked = {value for p in powers for value in (p - 1, p, p + 1, p + p // 2)} | {limit}
    values = [value for value in sorted(asked) if 1 <= value <= limit]
    taken = _which(ask, values)
    return [f"1-{limit}"] if taken == values else _ranges(taken)


def _ranges(values: list[int]) -> list[str]:
    """[1, 2, 3, 8] -> ["1-3", "8"]"""
    runs = [
        [value for _, value in run]
        for _, run in groupby(enumerate(values), lambda pair: pair[1] - pair[0])
    ]
    return [str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs]


class _Asker:
    """One row at position 0 of one request; each method calls one stage and writes to scratch."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.batch = fc.Batch.build([0], [1], device=device)
        self.zeros = self.batch.start  # i32 [1]: slot 0, position 0
        self.cos_sin = torch.zeros(1, _C.ROPE_DIMS, device=device)
        self.bf16 = {"dtype": torch.bfloat16, "device": device}
        self.schedule = fc.schedule(
            fc.Batch.build([0], [1]),
            ratios=[1],
            max_entries=[1],
            k=1,
            heads=1,
            index_heads=1,
            num_sms=fc.default_num_sms(device),
        ).to(device)

    def pages(self, record: str, page_size: int) -> fc.Pages:
        return fc.Pages.empty(1, record, page_size, self.device)

    def compress(self, ratio: int, page_size: int = DEFAULT_PAGE_SIZE) -> None:
        dim, overlapping = _C.HEAD_DIM, ratio == 4
        width = 2 * dim if overlapping else dim
        kv = torch.zeros(1, width, device=self.device)
        gate = None if ratio == 1 else kv
        fc.compress(
            kv.to(torch.bfloat16) if ratio == 1 else kv,
            self.batch,
            self.zeros,
            ratio=ratio,
            norm_weight=torch.ones(dim, device=self.device),
            eps=1e-20,
            cos_sin=self.cos_sin,
            gate=gate,
            main=self.pages("MixedFp8" if ratio > 2 else "MainFp4", page_size),
            index=self.pages("IndexFp4", page_size),
            key_weight=torch.zeros(_C.INDEX_DIM, dim, **self.bf16),
            key_norm_weight=torch.ones(_C.INDEX_DIM, device=self.device),
        )

    def rope_store(self, record: str, page_size: int = DEFAULT_PAGE_SIZE) -> None:
        q = torch.zeros(1, 1, _C.HEAD_DIM, **self.bf16)
        window = self.pages(record, page_size)
        fc.rope_store(q, q[0], window, self.zeros, self.zeros, self.cos_sin)

    def index(
        self,
        record: str = "IndexFp4",
        page_size: int = DEFAULT_PAGE_SIZE,
        heads: int = 32,
        k: int = 512,
    ) -> None:
        q = torch.zeros(1, heads, _C.INDEX_DIM, **self.bf16)
        query = fc.quantize_query(q, self.zeros, self.cos_sin, record=record)
        weights = torch.zeros(1, heads, device=self.device)
        fc.index_select(
            query,
            self.pages(record, page_size),
            weights,
            self.batch,
            self.zeros[None],
            self.schedule[1],
            k,
            ratio=1,
        )

    def attend(
        self, record: str = "MainFp4", page_size: int = DEFAULT_PAGE_SIZE, heads: int = 64
    ) -> None:
        row = self.zeros[None]
        fc.attend(
            torch.zeros(1, heads, _C.HEAD_DIM, **self.bf16),
            main=self.pages(record, page_size),
            selection=fc.Selection(row, row, self.zeros + 1),
            schedule=self.schedule[3],
        )

    def page_size(self, size: int) -> None:
        self.compress(1, size)
        self.rope_store("WindowFp8", size)
        self.index(page_size=size, heads=1)
        self.attend(page_size=size, heads=1)
