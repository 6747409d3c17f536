"""Each stage in plain PyTorch, in several ways: the fastest is what `bench.cpu` compares with.

All read and write the library's own pages, in the same types; indices are built beforehand. A
function whose name ends in `_of` makes a formulation out of its parts.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from flash_csa.plan import HEAD_DIM
from flash_csa.reference.layout import Record
from flash_csa.reference.quant import E2M1, E4M3

Function = Callable[..., Tensor]
SCALE = HEAD_DIM**-0.5
PART_KEYS = 16384  # at a time: twice as fast as with temporaries of 65,536 keys

# ---- Dequantisation: codes u8 [n, bytes], scales u8 [n, groups] -> bf16 [n, dims]

_BYTES = torch.arange(256)
_NIBBLES = torch.cat([E2M1, -E2M1])
_PAIR_VALUES = torch.stack([_NIBBLES[_BYTES & 15], _NIBBLES[_BYTES >> 4]], -1)
_UE8M0 = (_BYTES - 127).float().exp2()


def _words(pairs: Tensor) -> Tensor:
    """i32 [n]: pairs of BF16 values [n, 2] in one word each."""
    return pairs.bfloat16().contiguous().view(torch.int32).flatten()


_PAIRS = _words(_PAIR_VALUES)  # [code byte]
_SCALED_PAIRS = {  # [scale byte, code byte]
    "E4M3": _words(_BYTES.byte().view(torch.float8_e4m3fn).float()[:, None, None] * _PAIR_VALUES),
    "UE8M0": _words(_UE8M0[:, None, None] * _PAIR_VALUES),
}


def _scales(stored: Tensor, kind: str) -> Tensor:
    """bf16 [n, groups, 1]; byte 0 of UE8M0 gives 0."""
    if kind == "E4M3":
        return stored.view(torch.float8_e4m3fn).bfloat16().unsqueeze(-1)
    return (stored.to(torch.int16) << 7).view(torch.bfloat16).unsqueeze(-1)


def _scaled(values: Tensor, stored: Tensor, kind: str) -> Tensor:
    groups = values.view(len(values), stored.shape[1], -1)
    return (groups * _scales(stored, kind)).view(len(values), -1)


def pair_table(codes: Tensor, stored: Tensor, kind: str) -> Tensor:
    """Two values of a code byte from a table of 256, times the scale."""
    words = _PAIRS.index_select(0, codes.int().flatten())
    return _scaled(words.view(torch.bfloat16).view(len(codes), -1), stored, kind)


def scaled_table(codes: Tensor, stored: Tensor, kind: str) -> Tensor:
    """Two scaled values from a table of 65,536, by scale byte and code byte."""
    groups = codes.int().view(len(codes), stored.shape[1], -1)
    index = groups + (stored.int() << 8).unsqueeze(-1)
    words = _SCALED_PAIRS[kind].index_select(0, index.flatten())
    return words.view(torch.bfloat16).view(len(codes), -1)


def bit_operations(codes: Tensor, stored: Tensor, kind: str) -> Tensor:
    """Codes shifted to where BF16 keeps its exponent, times 2^126, times the scale."""
    nibbles = torch.stack([codes & 15, codes >> 4], -1).flatten(-2).to(torch.int16)
    small = ((nibbles & 7) << 6 | (nibbles & 8) << 12).view(torch.bfloat16)
    return _scaled(small * 2.0**126, stored, kind)


def float8_codes(codes: Tensor, stored: Tensor, kind: str) -> Tensor:
    """Codes shifted to where E4M3 keeps its exponent, PyTorch's own cast, times 2^6 and scale."""
    nibbles = torch.stack([codes & 15, codes >> 4], -1).flatten(-2)
    small = ((nibbles & 7) << 2 | (nibbles & 8) << 4).view(torch.float8_e4m3fn)
    return _scaled(small.bfloat16() * 2.0**6, stored, kind)


def fp8(codes: Tensor, stored: Tensor, kind: str) -> Tensor:
    """E4M3 codes by PyTorch's own cast."""
    return _scaled(codes.view(torch.float8_e4m3fn).bfloat16(), stored, kind)


# ---- Attend: q bf16 [R, H, 512], kv bf16 [R, n, 512], sink f32 [H] -> bf16 [R, H, 512]


def softmax_bf16(q: Tensor, kv: Tensor, sink: Tensor) -> Tensor:
    """BF16 products, FP32 softmax over the logits and the sink."""
    logits = (q @ kv.mT).float() * SCALE
    logits = torch.cat([logits, sink[None, :, None].expand(len(q), -1, 1)], -1)
    return logits.softmax(-1)[..., :-1].bfloat16() @ kv


def exp_bf16(q: Tensor, kv: Tensor, sink: Tensor) -> Tensor:
    """BF16 products, the softmax written out, without a copy of the logits."""
    logits = (q @ kv.mT).float() * SCALE
    largest = torch.maximum(logits.amax(-1, keepdim=True), sink[:, None])
    p = (logits - largest).exp()
    total = p.sum(-1, keepdim=True) + (sink[:, None] - largest).exp()
    return (p / total).bfloat16() @ kv


def softmax_fp32(q: Tensor, kv: Tensor, sink: Tensor) -> Tensor:
    """FP32 products."""
    kv = kv.float()
    logits = (q.float() @ kv.mT) * SCALE
    logits = torch.cat([logits, sink[None, :, None].expand(len(q), -1, 1)], -1)
    return (logits.softmax(-1)[..., :-1] @ kv).bfloat16()


def sdpa(q: Tensor, kv: Tensor, sink: Tensor) -> Tensor:
    """PyTorch's fused attention; heads are its queries, the sink a zero key with a bias."""
    kv = F.pad(kv, (0, 0, 0, 1))[:, None]
    bias = q.new_zeros(1, 1, q.shape[1], kv.shape[2])
    bias[..., -1] = sink
    return F.scaled_dot_product_attention(q[:, None], kv, kv, attn_mask=bias, scale=SCALE)[:, 0]


def attend_of(dequantise: Function, attention: Function) -> Function:
    """Gather, dequantise, attend.

    main, window: u8 [records, bytes], token-major pages seen as records; main_slots,
    window_slots: i32 [R * n].
    """

    def attend(q, main, main_slots, window, window_slots, sink):
        rows = len(q)
        main, window = main.index_select(0, main_slots), window.index_select(0, window_slots)
        half, full = HEAD_DIM // 2, HEAD_DIM
        parts = [
            fp8(window[:, :full], window[:, full:], "UE8M0").view(rows, -1, full),
            dequantise(main[:, :half], main[:, half:], "E4M3").view(rows, -1, full),
        ]
        return attention(q, torch.cat(parts, 1), sink)

    return attend


ATTENTIONS = {
    "softmax, bf16": softmax_bf16,
    "exp, bf16": exp_bf16,
    "softmax, fp32": softmax_fp32,
    "sdpa": sdpa,
}


# ---- Index scores: q [R, H, 128], keys [n, 128], weights f32 [R, H] -> f32 [R, n]


def _scores(q: Tensor, keys: Tensor, weights: Tensor) -> Tensor:
    """One product for all rows and keys, in the type of both."""
    rows, heads, dim = q.shape
    dots = (q.view(-1, dim) @ keys.T).view(rows, heads, -1)
    return torch.bmm(weights[:, None].to(dots.dtype), dots.relu_())[:, 0].float()


def scores_bf16(q: Tensor, keys: Tensor, weights: Tensor) -> Tensor:
    return _scores(q, keys, weights)


def scores_fp32(q: Tensor, keys: Tensor, weights: Tensor) -> Tensor:
    return _scores(q.float(), keys.float(), weights)


def scores_in_parts(q: Tensor, keys: Tensor, weights: Tensor) -> Tensor:
    return torch.cat([_scores(q, part, weights) for part in keys.split(PART_KEYS)], 1)


SCORERS = {"bf16": scores_bf16, "fp32": scores_fp32, "in parts, bf16": scores_in_parts}


def index_scores_of(dequantise: Function, scorer: Function, part_keys: int = 0) -> Function:
    """Gather whole pages by the block table, dequantise, score; all, or `part_keys` at a time.

    pages: u8 [pages, page_bytes], page-split; table i32 [n / page_size]; query bf16.
    """

    def score(q, pages, record: Record, page_size: int, weights):
        border = page_size * record.data_bytes
        pages = pages[:, : page_size * record.bytes]
        codes, scales = (
            x.reshape(len(pages) * page_size, -1) for x in pages.tensor_split([border], 1)
        )
        return scorer(q, dequantise(codes, scales, record.scale_kind), weights)

    def index_scores(q, pages, table, record: Record, page_size: int, weights):
        tables = table.split(part_keys // page_size or len(table))
        parts = [score(q, pages.index_select(0, t), record, page_size, weights) for t in tables]
        return torch.cat(parts, 1)

    return index_scores


# ---- Select: scores f32 [R, n] -> positions and slots i32 [R, k] by ascending position


def topk_then_sort(scores: Tensor, k: int) -> Tensor:
    return scores.topk(k, sorted=False).indices.sort().values


def sorted_topk_then_sort(scores: Tensor, k: int) -> Tensor:
    return scores.topk(k).indices.sort().values


def topk_of_parts(scores: Tensor, k: int, parts: int = 8) -> Tensor:
    """Of every eighth of a row first: more work, but for all threads even with one row."""
    width = scores.shape[1] // parts
    best = scores.view(len(scores), parts, width).topk(k, sorted=False)
    first = torch.arange(parts)[:, None] * width
    position = (best.indices + first).flatten(1)
    return position.gather(1, best.values.flatten(1).topk(k, sorted=False).indices).sort().values


def kth_value_then_nonzero(scores: Tensor, k: int) -> Tensor:
    """The k-th value first, then the positions that reach it; needs scores without ties."""
    kth = scores.kthvalue(scores.shape[1] - k + 1, 1, keepdim=True).values
    return (scores >= kth).nonzero()[:, 1].view(len(scores), k)


def whole_sort(scores: Tensor, k: int) -> Tensor:
    return scores.argsort(1, descending=True)[:, :k].sort().values


SELECTORS = {
    "topk, sort": topk_then_sort,
    "sorted topk, sort": sorted_topk_then_sort,
    "topk of parts, sort": topk_of_parts,
    "kthvalue, nonzero": kth_value_then_nonzero,
    "argsort": whole_sort,
}


def select_of(selector: Function) -> Function:
    def select(scores, k: int, table, page_size: int):
        positions = selector(scores, k)
        slots = table[positions // page_size] * page_size + positions % page_size
        return torch.stack([positions.int(), slots.int()])

    return select


# ---- Store: rows bf16 [n, dims] -> bytes in pages


def e2m1_by_rounding(x: Tensor) -> Tensor:
    """Codes of |x| by round-half-even on each of the three step sizes."""
    x = x.clamp(max=6.0)
    fine, middle = torch.round(2 * x), torch.round(x) + 2
    return torch.where(x < 2, fine, torch.where(x < 4, middle, torch.round(x / 2) + 4)).byte()


def _by_adding(x: Tensor, mantissa_bits: int, least_exponent: int) -> Tensor:
    """Codes of |x|: a sum whose last place is the step of the small float rounds to it."""
    exponent = (x.view(torch.int32) >> 23).clamp(min=least_exponent)
    magic = (exponent + (23 - mantissa_bits)) << 23
    units = (x + magic.view(torch.float32)).view(torch.int32) - magic
    return (units + ((exponent - least_exponent) << mantissa_bits)).byte()


def e2m1_by_adding(x: Tensor) -> Tensor:
    return _by_adding(x.clamp(max=6.0), 1, 127)


def e4m3_by_adding(x: Tensor) -> Tensor:
    return _by_adding(x.clamp(max=448.0), 3, 121)


def e4m3_by_cast(x: Tensor) -> Tensor:
    return x.clamp(max=448.0).to(torch.float8_e4m3fn).view(torch.uint8)


def _boundaries(grid: Tensor) -> Tensor:
    """Largest value of each code but the last; a midpoint belongs to its even neighbour."""
    middle = (grid[1:] + grid[:-1]) / 2
    odd = torch.arange(len(middle)) % 2 == 1
    return torch.where(odd, middle.nextafter(torch.zeros(())), middle)


_E2M1_BOUNDARIES, _E4M3_BOUNDARIES = _boundaries(E2M1), _boundaries(E4M3)


def e2m1_by_buckets(x: Tensor) -> Tensor:
    return torch.bucketize(x, _E2M1_BOUNDARIES, out_int32=True).byte()


def e4m3_by_buckets(x: Tensor) -> Tensor:
    return torch.bucketize(x, _E4M3_BOUNDARIES, out_int32=True).byte()


ENCODERS = {
    "rounding": {"E2M1": e2m1_by_rounding, "E4M3": e4m3_by_cast},
    "adding": {"E2M1": e2m1_by_adding, "E4M3": e4m3_by_adding},
    "buckets": {"E2M1": e2m1_by_buckets, "E4M3": e4m3_by_buckets},
}


def _stored_scales(groups: Tensor, record: Record) -> tuple[Tensor, Tensor]:
    """Of groups [n, groups, width]: bytes u8 [n, scale bytes], values f32 [n, groups, 1]."""
    largest = E2M1[-1] if record.element == "E2M1" else E4M3[-1]
    scale = groups.abs().amax(-1).clamp(min=record.amax_floor) / largest
    if record.scale_kind == "FP32":
        return scale.view(torch.uint8), scale.unsqueeze(-1)
    if record.scale_kind == "E4M3":
        stored = scale.clamp(max=448.0).to(torch.float8_e4m3fn)
        return stored.view(torch.uint8), stored.float().unsqueeze(-1)
    exponent = (scale.view(torch.int32) + 0x7FFFFF) >> 23
    stored = F.pad(exponent.byte(), (0, record.scale_bytes - exponent.shape[1]))
    return stored, (exponent << 23).view(torch.float32).unsqueeze(-1)


def encode(rows: Tensor, record: Record, magnitude_codes: Function) -> tuple[Tensor, Tensor]:
    """Data u8 [n, data bytes] and scales u8 [n, scale bytes] of finite rows."""
    groups = rows[:, : record.coded_dims].float().unflatten(1, (-1, record.group))
    scales, values = _stored_scales(groups, record)
    x = (groups / values).flatten(1)
    fp4 = record.element == "E2M1"
    codes = magnitude_codes(x.abs()) | x.signbit().byte() << (3 if fp4 else 7)
    data = codes[:, 0::2] | codes[:, 1::2] << 4 if fp4 else codes
    if record.bf16_dims:
        data = torch.cat([data, rows[:, record.coded_dims :].contiguous().view(torch.uint8)], 1)
    return data, scales


def put(data: Tensor, scales: Tensor, pages: Tensor, slots: Tensor, record: Record, page_size: int):
    """Writes encoded rows to slots i64 [n] of pages u8 [pages, page_bytes]."""
    page, offset = slots // page_size, slots % page_size
    if record.page_order == "token-major":
        records = pages[:, : page_size * record.bytes].unflatten(1, (page_size, record.bytes))
        records[page, offset] = torch.cat([data, scales], 1)
        return
    border = page_size * record.data_bytes
    end = border + page_size * record.scale_bytes
    pages[:, :border].unflatten(1, (page_size, -1))[page, offset] = data
    pages[:, border:end].unflatten(1, (page_size, -1))[page, offset] = scales


def store_of(encoder: dict[str, Function]) -> Function:
    def store(rows, pages, slots, record: Record, page_size: int):
        put(*encode(rows, record, encoder[record.element]), pages, slots, record, page_size)
        return pages

    return store


# ---- Compress: tokens -> latents -> records


def pool_by_softmax(kv: Tensor, gate: Tensor) -> Tensor:
    """[n, rows, d] -> [n, d]."""
    return (gate.softmax(1) * kv).sum(1)


def pool_by_exp(kv: Tensor, gate: Tensor) -> Tensor:
    weights = (gate - gate.amax(1, keepdim=True)).exp()
    return (weights * kv).sum(1) / weights.sum(1)


def _groups(x: Tensor, ratio: int, dim: int, missing: float) -> Tensor:
    """f32 [n, rows, dim]: rows of each entry; overlapping ones take the group before along."""
    groups = x.unflatten(0, (-1, ratio))
    if groups.shape[2] == dim:
        return groups
    before = F.pad(groups[:-1, :, :dim], (0, 0, 0, 0, 1, 0), value=missing)
    return torch.cat([before, groups[:, :, dim:]], 1)


def _rotate(x: Tensor, cos_sin: Tensor) -> Tensor:
    """bf16 [n, d] with its last 64 dims rotated by rows of the table f32 [n, 64]."""
    cos, sin = cos_sin.chunk(2, 1)
    a, b = x[:, -64:].float().unflatten(1, (-1, 2)).unbind(-1)
    turned = torch.stack([a * cos - b * sin, a * sin + b * cos], -1).flatten(1)
    return torch.cat([x[:, :-64], turned.bfloat16()], 1)


def compress_of(pool: Function, encoder: dict[str, Function]) -> Function:
    """gate None: every token is an entry. key_weight None: no index keys."""

    def compress(kv, gate, bias, norm, turns, key_weight, key_norm, eps, ratio, stores):
        pooled = kv.float()
        if gate is not None:
            if bias is not None:
                gate = (gate.unflatten(0, (-1, ratio)) + bias).flatten(0, 1)
            dim = len(norm)
            pooled = pool(_groups(kv, ratio, dim, 0.0), _groups(gate, ratio, dim, -torch.inf))
            pooled = pooled.bfloat16().float()
        latent = F.rms_norm(pooled, norm.shape, norm, eps).bfloat16()
        rows = [_rotate(latent, turns)]
        if key_weight is not None:
            keys = (latent @ key_weight.T).float()
            rows.append(_rotate(F.rms_norm(keys, key_norm.shape, key_norm, eps).bfloat16(), turns))
        for x, (pages, slots, record, page_size) in zip(rows, stores, strict=True):
            put(*encode(x, record, encoder[record.element]), pages, slots, record, page_size)
        return stores[0][0]

    return compress


POOLS = {"softmax": pool_by_softmax, "exp": pool_by_exp}
