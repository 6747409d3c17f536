"""Records taken apart: what a back end writes of rows, and what it reads of what it wrote.

Scales, codes under the back end's own scales, and values read from its own bytes are compared one
by one, so that a fault in one does not show in the others. Records share number formats: where all
that is written, or read, in one of them is wrong, and nothing else, the format is at fault; else
the record.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ..reference import quant
from ..reference.layout import record_of
from .backends import Formula
from .case import FORMULA, Case
from .checks import Check
from .formats import (
    BF16_MAIN,
    INDEX_BF16,
    INDEX_FP4,
    INDEX_FP8,
    MAIN_FP4,
    MAIN_FP8,
    MIXED_FP8,
    Variant,
)

HELD = "rows as the formulas made them, and edge values"
SCALES, CODES, READING = "scales", "codes under own scales", "values of own bytes"
ROWS = 256  # of the case, beside the edge rows
ONE = {"E2M1": 0x22, "E4M3": 0x38}  # a byte of codes of 1.0
AXIS = {
    BF16_MAIN: "main KV",
    MAIN_FP4: "main KV",
    MAIN_FP8: "window KV",
    MIXED_FP8: "main KV of V4",
    INDEX_BF16: "index keys",
    INDEX_FP4: "index keys",
    INDEX_FP8: "index keys",
}

Part = tuple[Variant, str]


@dataclass(frozen=True)
class Format:
    """A number format. writes, reads: where a fault in its encoder, its decoder must show. users:
    records that it may show in, by the parts that it may show in there."""

    axis: str
    writes: tuple[Part, ...]
    reads: tuple[Part, ...]
    users: dict[Variant, tuple[str, ...]]

    def wrong(self, parts: dict[Part, float]) -> float:
        """Least share of what must show a fault here; 0 if something else is wrong, too."""
        shown = {part for part, share in parts.items() if share > 0}
        if any(what not in self.users.get(variant, ()) for variant, what in shown):
            return 0.0
        return max(min(parts.get(p, 0.0) for p in side) for side in (self.writes, self.reads))


FORMATS = (
    Format(
        "E4M3 of main and window KV",
        ((MAIN_FP4, SCALES), (MAIN_FP8, CODES), (MIXED_FP8, CODES)),
        ((MAIN_FP4, READING), (MAIN_FP8, READING), (MIXED_FP8, READING)),
        {
            # A wrongly read scale is divided by, too.
            MAIN_FP4: (SCALES, CODES, READING),
            MAIN_FP8: (CODES, READING),
            MIXED_FP8: (CODES, READING),
            INDEX_FP8: (CODES, READING),
        },
    ),
    Format(
        "E2M1 of main KV and index",
        ((MAIN_FP4, CODES), (INDEX_FP4, CODES)),
        ((MAIN_FP4, READING), (INDEX_FP4, READING)),
        {MAIN_FP4: (CODES, READING), INDEX_FP4: (CODES, READING)},
    ),
    Format(
        "UE8M0 of window KV and index",
        ((MAIN_FP8, SCALES), (INDEX_FP4, SCALES)),
        ((MAIN_FP8, READING), (INDEX_FP4, READING)),
        dict.fromkeys((MAIN_FP8, MIXED_FP8, INDEX_FP4), (SCALES, READING)),
    ),
)


def compare(case: Case) -> Iterator[Check]:
    """Records of `case.backend`: shared formats, then record by record, then whole values."""
    backend, device = case.backend, case.inputs.device
    kept = [v for v in AXIS if backend.supports(v)]
    rows = {v: torch.cat([edge_rows(v.dims, device), _rows(case, v)[:ROWS]]) for v in kept}
    parts: dict[Part, float] = {}
    if hasattr(backend, "bytes_of"):
        coded = [v for v in kept if v.record]
        parts = {(v, p): s for v in coded for p, s in _parts(backend, rows[v], v).items()}
        for each in FORMATS:
            name = "all that uses the format, and nothing else: least share that differs"
            count = sum(map(len, rows.values()))
            yield Check(each.axis, name, each.wrong(parts), 0.0, 0.0, count, HELD)
    for (variant, part), share in parts.items():
        name = f"{variant.name}, {part} that differ"
        yield Check(AXIS[variant], name, share, 0.0, 0.0, len(rows[variant]), HELD)
    for variant in kept:
        share = _values(case, rows[variant], variant)
        name = f"{variant.name}, values that differ"
        yield Check(AXIS[variant], name, share, 0.0, 0.0, len(_rows(case, variant)), HELD)


def _rows(case: Case, variant: Variant) -> Tensor:
    entries = case.entries()
    return entries.main if variant.dims == entries.main.shape[1] else entries.keys


def _values(case: Case, rows: Tensor, variant: Variant) -> float:
    """Share of the values that differ, of all rows of the case and of `rows`."""
    stored = case.main if AXIS[variant] != "index keys" else case.keys
    pairs = (
        (stored(variant).values, stored(variant, backend=FORMULA).values),
        (case.backend.store(rows, variant).values, variant.round_trip(rows)),
    )
    return max(differ(made, expected) for made, expected in pairs)


def _parts(backend: Formula, rows: Tensor, variant: Variant) -> dict[str, float]:
    stored, record = backend.store(rows, variant), record_of(variant.record)
    made = backend.bytes_of(stored).cpu()
    data, scales = made.split([record.data_bytes, record.scale_bytes], 1)
    rows = rows.cpu()
    exact = quant.quantize(rows, record)
    return {
        SCALES: differ(scales, exact.scales),
        CODES: differ(data, _codes(rows, scales, record)),
        READING: differ(stored.values.cpu(), quant.dequantize(data, scales, record)),
    }


def _codes(rows: Tensor, scales: Tensor, record) -> Tensor:
    """u8: rows bf16 encoded under the given scales."""
    ones = torch.full((len(rows), record.data_bytes), ONE[record.element], dtype=torch.uint8)
    scale = quant.dequantize(ones, scales, record)[:, : record.coded_dims]
    scaled = (rows[:, : record.coded_dims].float() / scale).nan_to_num(0.0)
    if record.element == "E2M1":
        return quant.pack_nibbles(quant.encode_e2m1(scaled))
    kept = rows[:, record.coded_dims :].contiguous().view(torch.uint8)
    return torch.cat([quant.encode_e4m3(scaled), kept], 1)


def edge_rows(dims: int, device: torch.device) -> Tensor:
    """bf16 [n, dims]: zeros of both signs, lone values, rows from 2^-30 to 2^12, and every value
    and tie of E2M1 and E4M3, as codes and as scales."""
    random = torch.Generator().manual_seed(0)
    sizes = torch.arange(-30, 12)[:, None]
    drawn = torch.randn(len(sizes), dims, generator=random) * sizes.float().exp2()
    pattern = torch.tensor([0.25, -0.75, 1.25, -1.75, 2.5, -3.5, 5.0, 6.0])
    ties = pattern.repeat(dims // 8)[None]
    lone = torch.zeros(4, dims)
    lone[0, 5], lone[1, -1], lone[2, :], lone[3, 0] = 1.0, -3000.0, -0.0, 2.0**-133
    grid = torch.cat([quant.E4M3, (quant.E4M3[1:] + quant.E4M3[:-1]) / 2])
    grid = grid.sort().values
    # 448 in every eighth dim makes a scale of 1.
    codes = torch.cat([grid, -grid])
    codes = torch.nn.functional.pad(codes, (0, -len(codes) % 7)).unflatten(0, (-1, 7))
    codes = torch.cat([torch.full((len(codes), 1), 448.0), codes], 1).flatten()
    scales = (grid[:, None] * pattern.repeat(2)).flatten()  # groups of 16, largest 6 * grid
    filled = [
        torch.nn.functional.pad(x, (0, -len(x) % dims)).unflatten(0, (-1, dims))
        for x in (codes, scales)
    ]
    rows = torch.cat([drawn, ties, ties * 2.0**-9, ties * 448, lone, *filled])
    return rows.bfloat16().to(device)


def differ(made: Tensor, expected: Tensor) -> float:
    """Share of elements that differ, NaN and the sign of zero included."""
    signs = torch.signbit(made) != torch.signbit(expected)
    return ((made != expected) | signs).double().mean().item()
