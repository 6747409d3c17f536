"""Record variants: what an entry could be stored as, its bytes, and what is left of its values.

A variant is a row (element, scale type, group, dims kept in BF16). The published records are some
of the rows; the others exist here alone, as arithmetic on values, on any device, without packing.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from ..plan import HEAD_DIM, INDEX_DIM, ROPE_DIMS
from ..records import RECORDS

BF16 = 2
WORD = 4  # rows end at a word, as the published records do
LARGEST = {"E2M1": 6.0, "E4M3": 448.0}
BITS = {"E2M1": 4, "E4M3": 8}
SCALE_BYTES = {"E4M3": 1, "UE8M0": 1, "FP32": 4}
MANTISSA = {"E2M1": 1, "E4M3": 3}
LOWEST_EXPONENT = {"E2M1": 0, "E4M3": -6}  # of normal values
# The smallest group maximum that a scale is derived from, by element and scale type.
FLOORS = {
    ("E2M1", "E4M3"): 6 * 2.0**-9,
    ("E2M1", "UE8M0"): 6 * 2.0**-126,
    ("E4M3", "E4M3"): 448 * 2.0**-9,
}
FP8_FLOOR = 1e-4


@dataclass(frozen=True)
class Variant:
    """One format of a vector of `dims` values; element "BF16" keeps them as they are.

    scale: "E4M3" (nearest), "UE8M0" (next power of two) or "FP32". kept: last dims left in BF16,
    instead of codes or, `beside` codes of all dims, as in DSA (whose RoPE dims are extra ones).
    """

    element: str
    scale: str = ""
    group: int = 0
    kept: int = 0
    dims: int = HEAD_DIM
    beside: bool = False

    @property
    def coded(self) -> int:
        """Leading dims that have codes."""
        return self.dims - (0 if self.beside else self.kept)

    @property
    def name(self) -> str:
        if self.element == "BF16":
            return "BF16"
        kept = f" + {self.kept} BF16" if self.kept else ""
        return f"{self.element} / {self.scale} per {self.group}{kept}"

    @property
    def record(self) -> str | None:
        """Name of the record with this arithmetic, or None."""
        for record in RECORDS.values():
            kept = record.dims - record.coded_dims
            row = (record.element, record.scale_kind, record.group, kept, record.dims)
            if (
                row == (self.element, self.scale, self.group, self.kept, self.dims)
                and not self.beside
            ):
                return record.name
        return None

    @property
    def bytes(self) -> int:
        """Codes, BF16 dims and scales of one vector, up to a whole word."""
        if self.element == "BF16":
            return self.dims * BF16
        nbytes = self.coded * BITS[self.element] // 8 + self.kept * BF16
        nbytes += self.coded // self.group * SCALE_BYTES[self.scale]
        return -(-nbytes // WORD) * WORD

    def round_trip(self, x: Tensor) -> Tensor:
        """f32 [..., dims]: what is read back after `x` bf16 or f32 [..., dims] was stored."""
        if self.element == "BF16":
            return x.to(torch.bfloat16).float()
        coded = x[..., : self.coded].float().unflatten(-1, (-1, self.group))
        largest, scale = LARGEST[self.element], self.scale_of(coded.abs().amax(-1, keepdim=True))
        codes = round_element((coded / scale).clamp(-largest, largest), self.element)
        exact = self.dims - self.kept
        return torch.cat([(codes * scale).flatten(-2)[..., :exact], x[..., exact:].float()], -1)

    def scale_of(self, largest: Tensor) -> Tensor:
        """f32: the scale that is stored for a group of this `largest` magnitude."""
        floor = FLOORS.get((self.element, self.scale), FP8_FLOOR)
        # By a tensor: on CUDA, PyTorch divides by a number as it multiplies by its reciprocal.
        scale = largest.clamp(min=floor) / torch.full_like(largest, LARGEST[self.element])
        if self.scale == "E4M3":
            return round_element(scale.clamp(max=LARGEST["E4M3"]), "E4M3")
        if self.scale == "UE8M0":
            mantissa, exponent = torch.frexp(scale)
            return torch.ldexp(torch.ones_like(scale), exponent - (mantissa == 0.5).int())
        return scale


def round_element(x: Tensor, element: str) -> Tensor:
    """f32: the nearest value of E2M1 or E4M3, ties to even; |x| is at most the largest."""
    _, exponent = torch.frexp(x)  # x = m * 2^exponent, m in [0.5, 1)
    exponent = (exponent - 1).clamp(min=LOWEST_EXPONENT[element])
    step = torch.ldexp(torch.ones_like(x), exponent - MANTISSA[element])
    return (x / step).round() * step  # torch.round: half to even


def of_record(name: str) -> Variant:
    """The variant with the arithmetic of a record."""
    record = RECORDS[name]
    kept = record.dims - record.coded_dims
    return Variant(record.element, record.scale_kind, record.group, kept, record.dims)


BF16_MAIN = Variant("BF16")
MAIN_FP4 = of_record("MainFp4")
MAIN_FP8 = of_record("WindowFp8")
MIXED_FP8 = of_record("MixedFp8")
DSA_MAIN = Variant("E4M3", "FP32", 128, ROPE_DIMS, beside=True)
INDEX_FP4 = of_record("IndexFp4")
INDEX_FP8 = of_record("IndexFp8")
INDEX_BF16 = Variant("BF16", dims=INDEX_DIM)

# Every combination, then the published ones that are not among them.
MAIN_VARIANTS = (
    BF16_MAIN,
    *(
        Variant(element, scale, group, kept)
        for element in ("E4M3", "E2M1")
        for scale in ("UE8M0", "E4M3")
        for group in (32, 16)
        for kept in (0, ROPE_DIMS)
    ),
    MIXED_FP8,
    DSA_MAIN,
)
