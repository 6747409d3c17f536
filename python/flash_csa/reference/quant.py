"""Number formats and group quantisers: BF16 rows <-> codes and scales.

Formula source: DeepSeek-V4 and V4.1 quantisation-aware attention (window FP8, index FP4, main
FP4), V3.2 index FP8. Quantisation is part of the model: its forward pass rounds window KV,
compressed KV, index keys and index queries to these grids, so every step below is exact.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from .layout import record_of

# The magnitudes of codes 0, 1, 2, ... ; the sign is the bit above them.
E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
E4M3 = torch.tensor(
    [(c % 8) * 2.0**-9 if c < 8 else (1 + (c % 8) / 8) * 2.0 ** (c // 8 - 7) for c in range(127)]
)
# What a stored byte means. The last E4M3 magnitude (0x7F) and the last UE8M0 byte are NaN.
_NAN = torch.tensor([torch.nan])
_E2M1_VALUES = torch.cat([E2M1, -E2M1])
_E4M3_VALUES = torch.cat([E4M3, _NAN, -E4M3, _NAN])
_UE8M0_VALUES = torch.tensor([2.0 ** (byte - 127) for byte in range(255)] + [torch.nan])
_NAN_BYTE = {"E4M3": 0x7F, "UE8M0": 0xFF}


class Quantized(NamedTuple):
    """Records taken apart: `data` u8[..., data_bytes], `scales` u8[..., scale_bytes]."""

    data: Tensor
    scales: Tensor


def round_bf16(x: Tensor) -> Tensor:
    """`x` f32 or f64 rounded to BF16, nearest even. FP64 goes through FP32, as a kernel would."""
    return x.to(torch.float32).to(torch.bfloat16)


def _nearest_code(magnitude: Tensor, grid: Tensor) -> Tensor:
    """Code of the grid value nearest to each magnitude, ties to the even code, saturating."""
    middles = (grid[1:] + grid[:-1]) / 2  # exact in FP32; middle c lies between codes c and c + 1
    below = torch.searchsorted(middles, magnitude)
    up_to = torch.searchsorted(middles, magnitude, right=True)
    # The two differ only on a tie, where they are the lower and the upper neighbour.
    return torch.where(below % 2 == 0, below, up_to)


def _encode(x: Tensor, grid: Tensor, sign_bit: int) -> Tensor:
    code = _nearest_code(x.abs().contiguous(), grid)
    return (code + sign_bit * torch.signbit(x)).to(torch.uint8)  # -0.0 keeps its sign


def encode_e2m1(x: Tensor) -> Tensor:
    """E2M1 codes u8 (0..15, one per byte) of finite f32 `x`: nearest even, saturating at 6."""
    return _encode(x, E2M1, 8)


def encode_e4m3(x: Tensor) -> Tensor:
    """E4M3FN codes u8 of finite f32 `x`: nearest even, saturating at 448."""
    return _encode(x, E4M3, 128)


def encode_ue8m0(x: Tensor) -> Tensor:
    """UE8M0 byte (exponent + 127) of the smallest power of two >= `x` (f32, positive, normal)."""
    mantissa, exponent = torch.frexp(x)  # x = mantissa * 2^exponent, mantissa in [0.5, 1)
    return (exponent - (mantissa == 0.5).int() + 127).to(torch.uint8)


def decode_e2m1(codes: Tensor) -> Tensor:
    """f32 values of E2M1 codes u8 (0..15)."""
    return _E2M1_VALUES[codes.long()]


def decode_e4m3(codes: Tensor) -> Tensor:
    """f32 values of E4M3FN codes u8; 0x7F and 0xFF are NaN."""
    return _E4M3_VALUES[codes.long()]


def decode_ue8m0(codes: Tensor) -> Tensor:
    """f32 values 2^(byte - 127) of UE8M0 bytes; 0xFF is NaN."""
    return _UE8M0_VALUES[codes.long()]


def pack_nibbles(codes: Tensor) -> Tensor:
    """u8[..., n] codes 0..15 -> u8[..., n / 2]: the even dim in the low nibble."""
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def unpack_nibbles(data: Tensor) -> Tensor:
    """Inverse of `pack_nibbles`."""
    return torch.stack([data & 15, data >> 4], dim=-1).flatten(-2)


def _encode_scales(groups: Tensor, record) -> Tensor:
    """Stored scales u8[..., scale bytes] of groups f32[..., num_groups, group].

    The scale maps the group's largest magnitude to the largest code; UE8M0 rounds it up to a
    power of two, E4M3 to nearest (so that values may exceed the largest code by 1/16), FP32 keeps
    it. A group with a NaN or an Inf gets a NaN scale.
    """
    finite = groups.isfinite().all(-1)
    largest_code = (E2M1 if record.element == "E2M1" else E4M3)[-1]
    amax = torch.where(finite, groups.abs().amax(-1), 0.0).clamp(min=record.amax_floor)
    scale = amax / largest_code
    if record.scale_kind == "FP32":
        return torch.where(finite, scale, torch.nan).unsqueeze(-1).view(torch.uint8).flatten(-2)
    stored = encode_e4m3(scale) if record.scale_kind == "E4M3" else encode_ue8m0(scale)
    return torch.where(finite, stored, _NAN_BYTE[record.scale_kind]).to(torch.uint8)


def _decode_scales(scales: Tensor, record) -> Tensor:
    """f32[..., num_groups] from stored scales u8[..., scale_bytes]."""
    if record.scale_kind == "FP32":
        return scales.contiguous().view(torch.float32)
    decode = decode_e4m3 if record.scale_kind == "E4M3" else decode_ue8m0
    return decode(scales[..., : record.num_groups])


def quantize(x: Tensor, record) -> Quantized:
    """Quantises rows `x` bf16[..., dims] (or f32) to the bytes of `record` (name or row).

    Per group: scale from the largest magnitude, code = nearest(clamp(x / scale)), in FP32 with a
    true division by the *stored* scale. A group with NaN or Inf: NaN scale and codes 0.
    """
    record = record_of(record)
    groups = x[..., : record.coded_dims].float().unflatten(-1, (record.num_groups, record.group))
    scales = _encode_scales(groups, record)
    scaled = groups / _decode_scales(scales, record).unsqueeze(-1)
    scaled = torch.where(scaled.isfinite(), scaled, 0.0).flatten(-2)
    is_fp4 = record.element == "E2M1"
    data = pack_nibbles(encode_e2m1(scaled)) if is_fp4 else encode_e4m3(scaled)
    if record.bf16_dims:
        kept = x[..., record.coded_dims :].to(torch.bfloat16).contiguous()
        data = torch.cat([data, kept.view(torch.uint8)], dim=-1)
    padding = record.scale_bytes - scales.shape[-1]
    return Quantized(data, torch.nn.functional.pad(scales, (0, padding)))


def dequantize(data: Tensor, scales: Tensor, record) -> Tensor:
    """f32[..., dims] = code * scale from u8[..., data_bytes] and u8[..., scale_bytes].

    Exact in BF16 for every record but IndexFp8, whose product is rounded to FP32.
    """
    record = record_of(record)
    if record.element == "E2M1":
        codes = decode_e2m1(unpack_nibbles(data))
    else:
        codes = decode_e4m3(data[..., : record.coded_dims])
    groups = codes.unflatten(-1, (record.num_groups, record.group))
    values = (groups * _decode_scales(scales, record).unsqueeze(-1)).flatten(-2)
    if record.bf16_dims:
        kept = data[..., record.coded_dims :].contiguous().view(torch.bfloat16)
        values = torch.cat([values, kept.float()], dim=-1)
    return values


def quantize_dequantize(x: Tensor, record) -> Tensor:
    """What the model computes with: f32[..., dims] after a round trip through `record`."""
    return dequantize(*quantize(x, record), record)
