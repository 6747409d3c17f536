"""The compressor: tokens -> entries.

    kv, gate -> pool (softmax over the tokens of a group, per channel) -> BF16 -> RMSNorm -> BF16
    latent -> rotate to the group's first token -> BF16 main row -> page
    latent -> key projection -> BF16 -> RMSNorm -> BF16 -> rotate -> BF16 index key -> page

Formula source: DeepSeek-V4.1 CSA2 compressor (ratios 1 and 2); DeepSeek-V4 CSA compressor (ratio
4, overlapping, with position bias), HCA compressor (ratio 128, with bias) and the CSA indexer's
own compressor (ratio 4, 128 wide, Hadamard-rotated).

Values are rounded to BF16 at every stage border. `border=torch.float32` leaves these roundings
out, for evaluations of the formula alone.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from .rope import rotate


def _round(x: Tensor, border: torch.dtype) -> Tensor:
    return x.to(torch.float32).to(border)


def rms_norm(
    x: Tensor, weight: Tensor | None, eps: float, precision: torch.dtype = torch.float64
) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dim, in `precision`, not yet rounded."""
    x = x.to(precision)
    normed = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    return normed if weight is None else normed * weight.to(precision)


def hadamard(x: Tensor) -> Tensor:
    """Walsh-Hadamard transform of the last dim / sqrt(dim), rounded once to the type of `x`.

    In FP32, butterflies at distance 1, 2, 4, ...: y[i] pairs with y[i + distance].
    """
    dim = x.shape[-1]
    y = x.float()
    distance = 1
    while distance < dim:
        low, high = y.unflatten(-1, (-1, 2, distance)).unbind(-2)
        y = torch.stack([low + high, low - high], dim=-2).flatten(-3)
        distance *= 2
    return (y * dim**-0.5).to(x.dtype)


@dataclass(frozen=True)
class Compressor:
    """One compressor: `ratio` tokens of `dim` channels become one entry.

    norm_weight f32[dim]; bias f32[ratio, width] is added to the gate by position within the group;
    `overlap`: width is 2 dim, and an entry pools its own group (second half of the columns) and
    the one before (first half).
    """

    ratio: int
    norm_weight: Tensor
    eps: float
    bias: Tensor | None = None
    overlap: bool = False
    border: torch.dtype = torch.bfloat16
    precision: torch.dtype = torch.float64

    @property
    def dim(self) -> int:
        """Channels of an entry."""
        return len(self.norm_weight)

    def pool(self, kv: Tensor, gate: Tensor | None = None) -> Tensor:
        """Pooled values [n // ratio, dim] of the tokens 0..n - 1 of a sequence.

        kv, gate f32[n, width] (ratio 1: kv bf16[n, dim], no gate: every token is an entry).
        The tokens of an open group are left out.
        """
        if self.ratio == 1:
            return kv.to(self.precision)
        entries = len(kv) // self.ratio
        kv, gate = (
            x[: entries * self.ratio].to(self.precision).unflatten(0, (entries, self.ratio))
            for x in (kv, gate)
        )
        if self.bias is not None:
            gate = gate + self.bias.to(self.precision)
        if self.overlap:
            # Entry 0 has no previous group: its rows weigh exactly 0.
            kv = torch.cat([_previous(kv, self.dim, 0.0), kv[..., self.dim :]], dim=1)
            gate = torch.cat([_previous(gate, self.dim, -torch.inf), gate[..., self.dim :]], dim=1)
        return (gate.softmax(dim=1) * kv).sum(dim=1)

    def pool_step(
        self, kv: Tensor, gate: Tensor | None, start: int, tail: Tensor | None, stored: int = 0
    ) -> tuple[int, Tensor]:
        """Pools the rows of positions start, start + 1, ... of a sequence that is under way.

        Rows of earlier positions that a closing entry needs come from `tail` (`write_tail`).
        Entries below `stored` exist already and are not made again; the overlapping ratio still
        needs the rows of group `stored` - 1 for the next. Returns the first entry and pooled
        values [count, dim], the same as those of one call over the whole sequence.
        """
        if self.ratio == 1:
            skip = max(stored - start, 0)
            return start + skip, self.pool(kv[skip:])
        entry = max(start // self.ratio, stored)
        if (start + len(kv)) // self.ratio <= entry:
            return entry, self.pool(kv[:0], gate[:0])  # nothing closes
        context = 1 if self.overlap and entry > 0 else 0  # pooled along, for the rows it lends
        begin = (entry - context) * self.ratio
        if begin < start:
            if tail is None:
                raise ValueError(f"flash_csa.compress: entry {entry} needs rows from {begin} on")
            earlier = tail[:, torch.arange(begin, start) % tail.shape[1]]
            kv, gate = torch.cat([earlier[0], kv]), torch.cat([earlier[1], gate])
        first = max(begin - start, 0)
        return entry, self.pool(kv[first:], gate[first:])[context:]

    def latent(self, pooled: Tensor) -> Tensor:
        """Latent bf16[n, dim]: the norm of the rounded pooled value."""
        pooled = _round(pooled, self.border)
        return _round(rms_norm(pooled, self.norm_weight, self.eps, self.precision), self.border)

    def main_rows(self, latent: Tensor, cos_sin: Tensor, first: int = 0) -> Tensor:
        """Main rows bf16[n, dim] of entries first, first + 1, ...; still to be quantised.

        An entry's position is that of the first token of its group.
        """
        return rotate(latent, self.entry_positions(len(latent), first), cos_sin)

    def entry_positions(self, count: int, first: int = 0) -> Tensor:
        """RoPE positions i64[count] of entries first, first + 1, ..."""
        return torch.arange(first, first + count) * self.ratio


def _previous(groups: Tensor, dim: int, missing: float) -> Tensor:
    """First half of the columns of the group before each group; `missing` before group 0."""
    before = groups[:-1, :, :dim]
    return torch.cat([torch.full_like(groups[:1, :, :dim], missing), before])[: len(groups)]


def write_tail(tail: Tensor, kv: Tensor, gate: Tensor, start: int, first: int = 0) -> None:
    """Keeps rows kv, gate f32[n, width] of positions start, ... in `tail` f32[2, ring, width].

    The row of position p goes to p % ring; only the last `ring` of them can stay, the others of
    the ring are not touched, nor are rows written for positions before `first`.
    """
    ring = tail.shape[1]
    begin = max(start, start + len(kv) - ring, first)
    for position in range(begin, start + len(kv)):
        tail[0, position % ring] = kv[position - start]
        tail[1, position % ring] = gate[position - start]


def project_keys(latent: Tensor, key_weight: Tensor) -> Tensor:
    """bf16[n, 128] = latent bf16[n, 512] @ key_weight bf16[128, 512]^T, rounded once."""
    return _round(latent.double() @ key_weight.double().T, torch.bfloat16)


def index_keys(
    projected: Tensor,
    norm_weight: Tensor,
    eps: float,
    positions: Tensor,
    cos_sin: Tensor,
    precision: torch.dtype = torch.float64,
) -> Tensor:
    """V4.1 index keys bf16[n, 128], still to be quantised, from `project_keys`.

    Norm with weight f32[128] -> BF16 -> rotation to `positions` i64[n] of the entries -> BF16.
    """
    normed = _round(rms_norm(projected, norm_weight, eps, precision), torch.bfloat16)
    return rotate(normed, positions, cos_sin)


class Entries(NamedTuple):
    """What a compressor makes of one sequence, unquantised."""

    latent: Tensor  # bf16[N, dim]
    main: Tensor  # bf16[N, dim] after RoPE
    keys: Tensor | None  # bf16[N, 128] after RoPE (V4: and Hadamard)


def csa2_entries(
    compressor: Compressor,
    kv: Tensor,
    gate: Tensor | None,
    cos_sin: Tensor,
    key_weight: Tensor | None = None,
    key_norm_weight: Tensor | None = None,
) -> Entries:
    """All entries of a V4.1 sequence: main rows, and index keys projected from the latent."""
    latent = compressor.latent(compressor.pool(kv, gate))
    main = compressor.main_rows(latent, cos_sin)
    if key_weight is None:
        return Entries(latent, main, None)
    positions = compressor.entry_positions(len(latent))
    projected = project_keys(latent, key_weight)
    keys = index_keys(
        projected, key_norm_weight, compressor.eps, positions, cos_sin, compressor.precision
    )
    return Entries(latent, main, keys)


def v4_index_keys(compressor: Compressor, kv: Tensor, gate: Tensor, cos_sin: Tensor) -> Tensor:
    """V4 index keys bf16[N, 128] from the indexer's own compressor: RoPE, then Hadamard."""
    latent = compressor.latent(compressor.pool(kv, gate))
    return hadamard(compressor.main_rows(latent, cos_sin))
