"""Rotary position embedding of the last 64 dims: table, rotation, inverse rotation.

Formula source: DeepSeek-V4.1 attention (interleaved pairs; theta 160000 with YaRN in layers with
a compressor, theta 10000 without YaRN in window-only layers; no magnitude scaling).

The order of roundings is part of the model: with frequencies from FP64, every fifth rotated BF16
value at position 10^6 would differ.
"""

import math

import torch
from torch import Tensor

ROPE_DIMS = 64
_PAIRS = ROPE_DIMS // 2
_YARN_FACTOR = 16
_YARN_FIRST, _YARN_SPAN = 15, 10  # pairs 0..15 keep their frequency, from 25 on it is 1/16
_MAX_POSITIONS = 2**24  # larger positions are not exact in FP32
_CHUNK = 1 << 16  # positions per step of the table: its FP64 temporaries stay under 64 MiB


def frequencies(theta: float, yarn: bool) -> Tensor:
    """f32[32] radians per token: 1 / theta^(2i/64), the power and the division in FP32 each.

    YaRN divides the frequency of slow pairs by 16, with a linear ramp between.
    """
    pair = torch.arange(_PAIRS)
    power = (float(theta) ** (2 * pair.double() / ROPE_DIMS)).float()
    freq = 1.0 / power
    if not yarn:
        return freq
    ramp = ((pair.float() - _YARN_FIRST) / _YARN_SPAN).clamp(0, 1)
    return freq / _YARN_FACTOR * ramp + freq * (1 - ramp)


def angles(positions: Tensor, theta: float, yarn: bool) -> Tensor:
    """f32[..., 32] radians: one FP32 product per `positions` i32[...] and frequency."""
    return positions.float().unsqueeze(-1) * frequencies(theta, yarn)


def cos_sin_table(max_pos: int, theta: float, yarn: bool) -> Tensor:
    """f32[max_pos, 64] = 32 cosines | 32 sines of the angles of positions 0..max_pos - 1.

    Each is the FP32 value nearest to the cosine or sine of the FP32 angle (evaluated in FP64 with
    full range reduction: angles reach 10^6), the same on every machine. Made once on the CPU;
    256 bytes per position.

    Args:
        theta: base of the frequencies. yarn: they are those of YaRN (factor 16 from 65,536
            positions), as in layers with a compressor; see `LayerPlan.theta`, `compressed_theta`.

    Raises:
        ValueError: max_pos is not in [1, 2^24]; theta is not finite and positive.
    """
    for name, value, holds, expected in (
        ("max_pos", max_pos, 1 <= max_pos <= _MAX_POSITIONS, f"1 to {_MAX_POSITIONS}"),
        ("theta", theta, 0 < theta < math.inf, "finite and above 0"),
    ):
        if not holds:
            raise ValueError(f"flash_csa.cos_sin_table: {name} must be {expected}, got {value}")
    table = torch.empty(max_pos, ROPE_DIMS)
    for first in range(0, max_pos, _CHUNK):
        positions = torch.arange(first, min(first + _CHUNK, max_pos))
        angle = angles(positions, theta, yarn).double()
        table[first : first + _CHUNK, :_PAIRS] = angle.cos()
        table[first : first + _CHUNK, _PAIRS:] = angle.sin()
    return table


def _turn(x: Tensor, positions: Tensor, cos_sin: Tensor, sign: int) -> Tensor:
    # A padded row has position -1; the angle of position 0 leaves it as it is.
    row = cos_sin[positions.clamp(min=0).long()]
    heads = x.dim() - row.dim()
    row = row.reshape(*row.shape[:-1], *[1] * heads, ROPE_DIMS)
    cos, sin = row[..., :_PAIRS], sign * row[..., _PAIRS:]
    pairs = x[..., -ROPE_DIMS:].float().unflatten(-1, (_PAIRS, 2))
    a, b = pairs.unbind(-1)
    turned = torch.stack([a * cos - b * sin, a * sin + b * cos], dim=-1).flatten(-2)
    return torch.cat([x[..., :-ROPE_DIMS], turned.to(x.dtype)], dim=-1)


def rotate(x: Tensor, positions: Tensor, cos_sin: Tensor) -> Tensor:
    """Turns the last 64 dims of `x` [T, ..., dims] to `positions` i32[T]; other dims unchanged.

    (a, b) -> (a cos - b sin, a sin + b cos) on dims (2i, 2i + 1), in FP32 without fused
    multiply-add, rounded once to the type of `x` (bf16, or f32 for evaluations without rounding).
    """
    return _turn(x, positions, cos_sin, 1)


def derotate(x: Tensor, positions: Tensor, cos_sin: Tensor) -> Tensor:
    """Inverse of `rotate`: (a, b) -> (a cos + b sin, b cos - a sin); applied to attention output.

    K and V are one vector, so the output carries the rotation of its entries; turning it back by
    the query's position leaves relative positions only.
    """
    return _turn(x, positions, cos_sin, -1)
