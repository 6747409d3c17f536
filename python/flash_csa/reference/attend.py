"""Core attention: every query over its window records and its selected entries.

    logits = q . k * 512^-1/2,  p = softmax over both lists with a per-head sink,  out = sum p k

Formula source: DeepSeek-V4.1 and V4 core attention, HCA included. K and V are one dequantised
vector. The sink logit enters the denominator only; the lse leaves it out. A recent token may be
in both lists, and counts twice. A query with nothing to attend: output 0, lse +inf.
"""

import torch
from torch import Tensor

from .quant import round_bf16
from .rope import derotate

SOFTMAX_SCALE = 512**-0.5
_STEP = 64  # list slots per step of the online softmax


def join(
    window: Tensor, window_lists: Tensor, main: Tensor, main_lists: Tensor
) -> tuple[Tensor, Tensor]:
    """One set of records and one list per query, the window first.

    window f32[n, 512], window_lists i32[T, w]: rows of `window`, -1 none; the same for main.
    Returns records f32[n + N, 512] and lists i64[T, w + K].
    """
    shifted = torch.where(main_lists >= 0, main_lists + len(window), -1)
    return torch.cat([window, main]), torch.cat([window_lists, shifted], dim=1).long()


def attend(
    q: Tensor,
    records: Tensor,
    lists: Tensor,
    *,
    sink: Tensor | None = None,
    softmax_scale: float = SOFTMAX_SCALE,
    precision: torch.dtype = torch.float64,
) -> tuple[Tensor, Tensor]:
    """Output [T, H, dim] and natural-log lse [T, H], both in `precision`.

    q bf16 or f32[T, H, dim]; records f32[n, dim], dequantised; lists i64[T, L]: the rows of
    `records` that a query reads, -1 anywhere to be skipped; sink f32[H].
    """
    rows = [
        _attend_row(heads.to(precision), records[row[row >= 0]].to(precision), sink, softmax_scale)
        for heads, row in zip(q, lists, strict=True)
    ]
    return _stack(rows, q, precision)


def _stack(
    rows: list[tuple[Tensor, Tensor]], q: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    if not rows:
        return q.new_empty(q.shape, dtype=dtype), q.new_empty(q.shape[:2], dtype=dtype)
    outs, lses = zip(*rows, strict=True)
    return torch.stack(outs), torch.stack(lses)


def _attend_row(q: Tensor, kv: Tensor, sink: Tensor | None, scale: float) -> tuple[Tensor, Tensor]:
    """One query: q [H, dim], kv [n, dim]."""
    if len(kv) == 0:
        return torch.zeros_like(q), q.new_full(q.shape[:1], torch.inf)
    logits = q @ kv.T * scale
    lse = logits.logsumexp(-1)
    probabilities = (logits - lse[:, None]).exp()
    return probabilities @ kv * sink_factor(lse, sink)[:, None], lse


def sink_factor(lse: Tensor, sink: Tensor | None) -> Tensor:
    """What the sink leaves of an output that was normalised without it: lse [..., H], sink f32[H].

    exp(lse) / (exp(lse) + exp(sink)); sink -inf: 1, sink +inf: 0.
    """
    if sink is None:
        return torch.ones_like(lse)
    return torch.sigmoid(lse - sink.to(lse.dtype))


def attend_in_steps(
    q: Tensor,
    records: Tensor,
    lists: Tensor,
    *,
    sink: Tensor | None = None,
    softmax_scale: float = SOFTMAX_SCALE,
    p_dtype: torch.dtype = torch.bfloat16,
) -> tuple[Tensor, Tensor]:
    """As `attend` in FP32, 64 list slots at a time with a running maximum, as a kernel works.

    P = exp(logit - running maximum), not normalised, rounded to `p_dtype` for the product with V;
    the denominator sums the unrounded values. Returns f32[T, H, dim] and f32[T, H].
    """
    rows = []
    for heads, row in zip(q.float(), lists, strict=True):
        top = torch.full(heads.shape[:1], -torch.inf)
        total, out = torch.zeros_like(top), torch.zeros_like(heads)
        for slots in row.split(_STEP):
            kv = records[slots[slots >= 0]].float()
            if len(kv) == 0:
                continue
            logits = heads @ kv.T * softmax_scale
            new_top = torch.maximum(top, logits.amax(-1))
            shrink = (top - new_top).exp()
            p = (logits - new_top[:, None]).exp()
            total = total * shrink + p.sum(-1)
            out = out * shrink[:, None] + p.to(p_dtype).float() @ kv
            top = new_top
        if not (row >= 0).any():
            rows.append((out, torch.full_like(top, torch.inf)))
            continue
        lse = top + total.log()
        rows.append((out * (sink_factor(lse, sink) / total)[:, None], lse))
    return _stack(rows, q, torch.float32)


def contiguous_lists(n_vis: Tensor, width: int) -> Tensor:
    """Lists i64[T, width] of all visible entries 0..n_vis - 1, -1 padded: HCA selects nothing."""
    entries = torch.arange(width)
    return torch.where(entries < n_vis[:, None], entries, -1)


def derotated_output(out: Tensor, positions: Tensor, cos_sin: Tensor) -> Tensor:
    """bf16[T, H, 512]: output rounded to BF16, its last 64 dims turned back by `positions` i32[T].

    The rounding comes first: it is where the model stores the attention output.
    """
    return derotate(round_bf16(out), positions, cos_sin)


def merge(outs: Tensor, lses: Tensor, sink: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Output f64[T, H, dim] and lse f64[T, H] of lists that W parts attended to separately.

    outs [W, T, H, dim] and lses [W, T, H] (natural log) were made without a sink; +inf or -inf
    marks a part with nothing to attend.
    """
    lses = lses.double()
    lses = torch.where(lses.isinf(), -torch.inf, lses)
    lse = lses.logsumexp(0)
    empty = lse.isinf()
    weights = torch.where(lses.isinf(), 0.0, (lses - lse).exp())
    parts = torch.where(lses.isinf().unsqueeze(-1), 0.0, outs.double())
    lse = torch.where(empty, torch.inf, lse)
    out = (weights.unsqueeze(-1) * parts).sum(0)
    return torch.where(empty.unsqueeze(-1), 0.0, out * sink_factor(lse, sink).unsqueeze(-1)), lse


def error_bounds(
    q: Tensor,
    records: Tensor,
    lists: Tensor,
    *,
    sink: Tensor | None = None,
    softmax_scale: float = SOFTMAX_SCALE,
    bf16: bool = True,
) -> tuple[Tensor, Tensor]:
    """How far a kernel may be from `attend` in FP64: f64[T, H, dim] for out, f64[T, H] for lse.

    With A = sum p |v| and d = 2^-19 * |scale| * max over records of sum |q| |k| (FP32 logits):
    BF16 P and output 1e-6 + 2^-8 A + 2^-8 |out| + 2 d A; FP32 P and output 2e-6 + 2^-20 A + 2 d A;
    lse 1e-5 + 2^-20 |lse| + d.
    """
    out, lse = attend(q, records, lists, sink=sink, softmax_scale=softmax_scale)
    spread, d = torch.zeros_like(out), torch.zeros_like(lse)
    for t, (heads, row) in enumerate(zip(q.double(), lists, strict=True)):
        kv = records[row[row >= 0]].double()
        if len(kv) == 0:
            continue
        p = (heads @ kv.T * softmax_scale - lse[t, :, None]).exp()
        spread[t] = p @ kv.abs() * sink_factor(lse[t], sink)[:, None]
        d[t] = 2.0**-19 * abs(softmax_scale) * (heads.abs() @ kv.abs().T).amax(-1)
    rounding = 2.0**-8 * (spread + out.abs()) + 1e-6 if bf16 else 2.0**-20 * spread + 2e-6
    return rounding + 2 * d.unsqueeze(-1) * spread, 1e-5 + 2.0**-20 * lse.abs() + d
