"""The indexer: how relevant is each entry to a query?

    score[t, j] = sum over heads h of weight[t, h] * max(0, q[t, h] . k[j])

Formula source: DeepSeek-V4.1 and V4 lightning indexer. No softmax, no sigmoid, no mean; weights
carry every factor already and may be negative. q and k are the dequantised FP4 vectors.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from .compress import hadamard
from .layout import record_of
from .quant import (
    decode_e2m1,
    decode_ue8m0,
    dequantize,
    quantize,
    unpack_nibbles,
)
from .rope import rotate

_GROUP = 32  # channels of an FP4 group
_CHAINS = 4  # partial head sums of the exact order


class IndexQuery(NamedTuple):
    """Quantised query heads; the row of an index record, its scales in one word per head.

    FP4: codes u8[T, H, 64], scales i32[T, H], byte g of a word (little-endian) for group g.
    FP8: codes u8[T, H, 128], scales f32[T, H].
    """

    codes: Tensor
    scales: Tensor

    @property
    def record(self) -> str:
        """Name of the record whose rows these are."""
        return "IndexFp4" if self.scales.dtype == torch.int32 else "IndexFp8"


def quantize_query(
    q: Tensor, positions: Tensor, cos_sin: Tensor, record="IndexFp4", rotate_hadamard: bool = False
) -> IndexQuery:
    """q bf16[T, H, 128] -> RoPE at `positions` i32[T] -> BF16 (V4: Hadamard -> BF16) -> codes."""
    q = rotate(q, positions, cos_sin)
    if rotate_hadamard:
        q = hadamard(q)
    record = record_of(record)
    data, scales = quantize(q, record)
    word = torch.float32 if record.scale_kind == "FP32" else torch.int32
    return IndexQuery(data, scales.contiguous().view(word).squeeze(-1))


def dequantize_query(query: IndexQuery) -> Tensor:
    """f32[T, H, 128] of an `IndexQuery`."""
    scales = query.scales.contiguous().unsqueeze(-1).view(torch.uint8)
    return dequantize(query.codes, scales, query.record)


def index_scores(
    q: Tensor, k: Tensor, weights: Tensor, precision: torch.dtype = torch.float64
) -> Tensor:
    """Scores f32[T, N] of every entry for every query, evaluated in `precision`.

    q f32[T, H, 128], k f32[N, 128]: dequantised; weights f32 or bf16[T, H].
    """
    keys = k.to(precision).T
    rows = [
        weight @ (heads @ keys).clamp(min=0)
        for heads, weight in zip(q.to(precision), weights.to(precision), strict=True)
    ]
    return torch.stack(rows).float() if rows else torch.empty(0, len(k))


def index_scores_bf16(q: Tensor, k: Tensor, weights: Tensor) -> Tensor:
    """As `index_scores`, with the roundings of an eager BF16 model: dot, product and head sum.

    Ranks 0.3 to 0.7 % of the selected entries of random data differently.
    """
    rows = []
    for heads, weight in zip(q, weights.to(torch.bfloat16), strict=True):
        dots = (heads.double() @ k.double().T).float().to(torch.bfloat16)
        products = dots.clamp(min=0) * weight[:, None]
        rows.append(products.float().sum(dim=0).to(torch.bfloat16).float())
    return torch.stack(rows) if rows else torch.empty(0, len(k))


def _fma(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """a * b + c of f32 tensors, rounded once."""
    product = a.double() * b.double()  # exact
    total = product + c.double()
    # Rounding to FP64 and then to FP32 could round twice. Make the FP64 sum odd where it is not
    # exact: then it cannot lie on a boundary of FP32.
    part = total - product
    error = (product - (total - part)) + (c.double() - part)
    bits = total.view(torch.int64)
    toward_zero = (error > 0) != (total > 0)
    step = torch.where(toward_zero, -1, 1)
    inexact_even = (error != 0) & (bits % 2 == 0) & total.isfinite()
    return torch.where(inexact_even, (bits + step).view(torch.float64), total).float()


def index_scores_exact(
    query: IndexQuery, key_data: Tensor, key_scales: Tensor, weights: Tensor
) -> Tensor:
    """Scores f32[T, N] of FP4 queries and keys in the one order that every back end keeps.

    Keys as stored: u8[N, 64] and u8[N, 4]. Bit for bit: the dot product of a 32-channel group is
    exact (a count of quarters) before its power-of-two scale; the groups are joined by FMAs in
    ascending order; heads by four FMA chains, chain c taking those with (h % 8) // 2 == c in
    ascending order; score = (p0 + p1) + (p2 + p3).
    """
    q_codes = decode_e2m1(unpack_nibbles(query.codes)).unflatten(-1, (-1, _GROUP))
    k_codes = decode_e2m1(unpack_nibbles(key_data)).unflatten(-1, (-1, _GROUP))
    q_scales = decode_ue8m0(query.scales.contiguous().unsqueeze(-1).view(torch.uint8))
    k_scales = decode_ue8m0(key_scales)
    rows = []
    for t, weight in enumerate(weights.float()):
        dots = torch.zeros(len(weight), len(key_data))
        for group in range(k_codes.shape[1]):
            sums = q_codes[t, :, group] @ k_codes[:, group].T
            dots = _fma(sums, q_scales[t, :, group, None] * k_scales[:, group], dots)
        dots = dots.clamp(min=0)
        chains = [torch.zeros(len(key_data)) for _ in range(_CHAINS)]
        for head in range(len(weight)):
            chain = head % (2 * _CHAINS) // 2
            chains[chain] = _fma(weight[head], dots[head], chains[chain])
        rows.append((chains[0] + chains[1]) + (chains[2] + chains[3]))
    return torch.stack(rows) if rows else torch.empty(0, len(key_data))
