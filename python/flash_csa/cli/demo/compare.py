"""What the two passes must agree on: records by position, selections and outputs by row."""

from dataclasses import dataclass

import torch
from torch import Tensor

from ...records import Pages
from ...reference.pages import read_rows
from ...reference.quant import Quantized
from .passes import Pass


@dataclass(frozen=True)
class Agreement:
    """Things compared between the passes, and how many of them differ."""

    what: str
    compared: int
    different: int


def compare(a: Pass, b: Pass) -> list[Agreement]:
    """Records by position, byte for byte; selections, pools and outputs by row."""
    plan, tokens = a.plan, a.inputs.tokens
    found = []
    for kind in ("main", "index"):
        pairs = [
            (entries(a, group.index, kind), entries(b, group.index, kind))
            for group in plan.groups
            if kind == "main" or group.indexed
        ]
        found.append(_agreement(f"{kind} records, bytes", pairs))
    last = range(max(0, tokens - plan.window), tokens)
    windows = [(window(a, layer, last), window(b, layer, last)) for layer in range(len(a.results))]
    found.append(_agreement("window records, bytes", windows))
    for name, what in (
        ("selections", "selections, positions"),
        ("pools", "candidate pools, blocks"),
        ("out", "attention outputs, bits"),
    ):
        rows = [
            (torch.cat(getattr(x, name)), torch.cat(getattr(y, name)))
            for x, y in zip(a.results, b.results, strict=True)
            if getattr(x, name)
        ]
        if rows:  # V4 has no pools
            found.append(_agreement(what, rows))
    return found


def _agreement(what: str, pairs: list) -> Agreement:
    """Counts rows; a pair holds Quantized records or tensors."""
    compared = different = 0
    for a, b in pairs:
        parts = list(zip(a, b, strict=True)) if isinstance(a, Quantized) else [(a, b)]
        rows = torch.zeros(len(parts[0][0]), dtype=torch.bool)
        for x, y in parts:
            rows |= (_bits(x) != _bits(y)).flatten(1).any(1)
        compared += len(rows)
        different += int(rows.sum())
    return Agreement(what, compared, different)


def _bits(x: Tensor) -> Tensor:
    return x.view(torch.int16) if x.dtype == torch.bfloat16 else x


def entries(run: Pass, group: int, kind: str) -> Quantized:
    """Main or index records of all complete entries, by position."""
    ratio = run.plan.groups[group].ratio
    pages = getattr(run.cache.groups[group], kind)
    table = run.pages.block_tables[ratio][0]
    position = torch.arange(run.inputs.tokens // ratio)
    return _read(pages, table[position // pages.page_size], position)


def window(run: Pass, layer: int, positions: range) -> Quantized:
    """Window records of positions that the ring still holds."""
    pages, table = run.cache.window[layer], run.pages.window_table[0]
    position = torch.arange(positions.start, positions.stop)
    return _read(pages, table[position // pages.page_size % len(table)], position)


def _read(pages: Pages, page: Tensor, position: Tensor) -> Quantized:
    slots = page * pages.page_size + position % pages.page_size
    return read_rows(pages.data, slots, pages.record, pages.page_size)
