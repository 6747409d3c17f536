"""Bits of core/numerics.h against PyTorch, exact arithmetic, golden tensors and counted cases."""

import re
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import golden
from core_module import core
from exact import (
    E2M1,
    E4M3,
    EXP_POLYNOMIAL,
    LN2_HIGH,
    LN2_LOW,
    LOG2_E,
    ceil_log2,
    every_bf16,
    exp32,
    fl32,
    fma32,
    fma32_array,
    nearest_even,
    to_bf16,
    to_f32,
)

F32_NAN = 0x7FC00000
BF16_NAN = 0x7FC0


def bits(x: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(x, np.float32).view(np.uint32)


def torch_bf16(x: np.ndarray) -> np.ndarray:
    """BF16 bits of FP32 values, rounded by PyTorch; every NaN is 0x7FC0."""
    rounded = torch.from_numpy(np.ascontiguousarray(x)).to(torch.bfloat16).view(torch.int16)
    return np.where(np.isnan(x), BF16_NAN, rounded.numpy().view(np.uint16)).astype(np.uint16)


def some_f32(count: int, seed: int = 0) -> np.ndarray:
    """Uniformly random FP32 bit patterns: every exponent, both signs, NaN and Inf."""
    return np.random.default_rng(seed).integers(0, 2**32, count, np.uint32).view(np.float32)


def cos_sin(angles: np.ndarray) -> np.ndarray:
    table = torch.from_numpy(np.ascontiguousarray(angles))
    return torch.cat([table.cos(), table.sin()], dim=-1).numpy()


# ---- Codes


@pytest.mark.case("E4M3 exhaustively")
def test_e4m3_decodes_every_code() -> None:
    codes = np.arange(256, dtype=np.uint8)
    expected = torch.from_numpy(codes).view(torch.float8_e4m3fn).float().numpy()
    decoded = core().decode_e4m3(codes)
    finite = ~np.isnan(expected)
    assert np.array_equal(bits(decoded)[finite], bits(expected)[finite])
    assert (bits(decoded)[~finite] == F32_NAN).all() and (~finite).sum() == 2
    assert np.array_equal(decoded[1:8], np.arange(1, 8) * 2.0**-9)


@pytest.mark.case("E4M3 exhaustively")
def test_e4m3_encodes_bf16_and_midpoints() -> None:
    """RNE and saturation on every BF16 value and one FP32 ulp around every midpoint."""
    middles = ((E4M3[1:] + E4M3[:-1]) / 2).astype(np.float32)
    around = [np.nextafter(middles, np.float32(side)) for side in (0, np.inf)]
    positive = np.concatenate([middles, *around, np.float32([448, 464, 480, 1e30, np.inf])])
    x = np.concatenate([to_f32(every_bf16()), positive, -positive, some_f32(1 << 20)])
    expected = nearest_even(x, E4M3) | np.signbit(x) * 0x80
    encoded = core().encode_e4m3(x)
    assert np.array_equal(encoded, np.where(np.isnan(x), 0x7F, expected))
    by_torch = torch.from_numpy(x).clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
    assert np.array_equal(encoded[~np.isnan(x)], by_torch.numpy()[~np.isnan(x)])


def test_e2m1_codes() -> None:
    codes = np.arange(16, dtype=np.uint8)
    decoded = core().decode_e2m1(codes)
    assert np.array_equal(bits(decoded), bits(np.concatenate([E2M1, -E2M1])))
    x = np.concatenate([to_f32(every_bf16()), some_f32(1 << 20)])
    x = x[~np.isnan(x)]
    expected = nearest_even(x, E2M1) | np.signbit(x) * 8
    assert np.array_equal(core().encode_e2m1(x), expected)


@pytest.mark.parametrize("sign", [1, -1])
def test_e2m1_tie_table(sign: int) -> None:
    ties = {0.25: 0, 0.75: 1, 1.25: 1, 1.75: 2, 2.5: 2, 3.5: 4, 5: 4}
    for tie, value in ties.items():
        code = core().encode_e2m1(np.float32(sign * tie))
        assert core().decode_e2m1(np.uint8(code)) == sign * value
        assert np.signbit(core().decode_e2m1(np.uint8(code))) == (sign < 0)


def test_ue8m0() -> None:
    codes = np.arange(256, dtype=np.uint8)
    decoded = core().decode_ue8m0(codes)
    assert np.array_equal(decoded[:255].astype(np.float64), 2.0 ** np.arange(-127, 128))
    assert bits(decoded)[255] == F32_NAN

    x = np.abs(np.concatenate([to_f32(every_bf16()), some_f32(1 << 20)]))
    encoded = core().encode_ue8m0_ceil(x)
    assert (encoded[~np.isfinite(x)] == 0xFF).all()
    normal = np.isfinite(x) & (x >= 2.0**-126)
    expected = np.minimum(ceil_log2(x[normal]) + 127, 254)
    assert np.array_equal(encoded[normal], expected)
    assert (encoded[x == 0] == 0).all() and (encoded[(x > 0) & (x < 2.0**-126)] == 1).all()


def test_bf16_rounding() -> None:
    high = every_bf16().astype(np.uint32) << 16
    lows = np.array([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], np.uint32)
    x = (high[:, None] | lows).view(np.float32)
    assert np.array_equal(core().f32_to_bf16(x), torch_bf16(x))
    exact = to_f32(every_bf16())
    assert np.array_equal(bits(core().bf16_to_f32(every_bf16())), bits(exact))
    rounded = core().round_bf16(exact)
    assert np.array_equal(bits(rounded), np.where(np.isnan(exact), F32_NAN, bits(exact)))


def test_every_main_product_is_exact_in_bf16() -> None:
    """E2M1 x E4M3 has at most 6 significant bits."""
    products = (np.concatenate([E2M1, -E2M1])[:, None] * E4M3[None]).astype(np.float32)
    assert not (bits(products) & 0xFFFF).any()


# ---- Groups: expected codes and scales, FP32 step by FP32 step in numpy


def signed_codes(ratio: np.ndarray, grid: np.ndarray, sign_bit: int) -> np.ndarray:
    return (nearest_even(ratio, grid) | np.signbit(ratio) * sign_bit).astype(np.uint8)


def pack(codes: np.ndarray) -> np.ndarray:
    return codes[:, 0::2] | codes[:, 1::2] << 4


def poisoned(x: np.ndarray) -> np.ndarray:
    return ~np.isfinite(x).all(1, keepdims=True)


def expect_main(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    amax = np.abs(x).max(1, keepdims=True)
    scale = nearest_even(np.maximum(amax, np.float32(6 * 2.0**-9)) / np.float32(6), E4M3)
    codes = signed_codes(x / E4M3[scale].astype(np.float32), E2M1, 8)
    return pack(np.where(poisoned(x), 0, codes)), np.where(poisoned(x), 0x7F, scale)


def power_of_two_codes(
    x: np.ndarray, floor: float, top: float, grid: np.ndarray, sign_bit: int
) -> tuple[np.ndarray, np.ndarray]:
    amax = np.abs(x).max(1, keepdims=True)
    exponent = ceil_log2(np.maximum(amax, np.float32(floor)) / np.float32(top))
    codes = signed_codes(x / np.exp2(exponent.astype(np.float32)), grid, sign_bit)
    return np.where(poisoned(x), 0, codes), np.where(poisoned(x), 0xFF, exponent + 127)


def expect_index(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    codes, scale = power_of_two_codes(x, 6 * 2.0**-126, 6, E2M1, 8)
    return pack(codes), scale


def expect_fp8(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    return power_of_two_codes(x, 1e-4, 448, E4M3, 0x80)


def expect_index_fp8(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    scale = np.maximum(np.abs(x).max(1, keepdims=True), np.float32(1e-4)) / np.float32(448)
    codes = signed_codes(x / scale, E4M3, 0x80)
    return np.where(poisoned(x), 0, codes), np.where(poisoned(x), np.float32(np.nan), scale)


Expect = Callable[[np.ndarray], tuple[np.ndarray, np.ndarray]]
ENCODERS = {
    "group_main": (16, expect_main),
    "group_index": (32, expect_index),
    "group_fp8_32": (32, expect_fp8),
    "group_fp8_64": (64, expect_fp8),
    "row_index_fp8": (128, expect_index_fp8),
}


def check_groups(name: str, x: np.ndarray) -> None:
    """BF16 bits [n, width] through an encoder: codes and scales bit for bit as expected."""
    codes, scales = getattr(core(), f"encode_{name}")(x)
    with np.errstate(all="ignore"):
        expected_codes, expected_scales = ENCODERS[name][1](to_f32(x))
    assert np.array_equal(codes, expected_codes)
    assert np.array_equal(scales, expected_scales, equal_nan=scales.dtype == np.float32)


@pytest.mark.parametrize("name", ENCODERS)
def test_encoders_on_every_bf16(name: str) -> None:
    """Every BF16 value as the largest of its group, beside parts of itself and its neighbours."""
    width = ENCODERS[name][0]
    largest = to_f32(every_bf16())
    with np.errstate(all="ignore"):
        parts = largest[:, None] * np.linspace(-1, 1, width, dtype=np.float32)
    x = torch_bf16(parts)
    x[:, 0] = every_bf16()
    check_groups(name, x)


@pytest.mark.parametrize("name", ENCODERS)
def test_encoders_on_mixed_magnitudes(name: str) -> None:
    """Random bit patterns: subnormals beside huge values, and now and then NaN or Inf."""
    rng = np.random.default_rng(1)
    x = rng.integers(0, 65536, (20000, ENCODERS[name][0])).astype(np.uint16)
    x[:15000] &= 0xBFFF  # exponents below 1, so that these groups are finite
    check_groups(name, x)


@given(st.lists(st.integers(0, 0xFFFF), min_size=64, max_size=64))
@settings(max_examples=200, deadline=None)
def test_encoders_on_any_group(values: list[int]) -> None:
    x = np.array(values, np.uint16)
    for name in ("group_main", "group_index", "group_fp8_32", "group_fp8_64"):
        check_groups(name, x.reshape(-1, ENCODERS[name][0]))


def test_a_row_equals_its_groups() -> None:
    x = np.random.default_rng(2).integers(0, 65536, (200, 512)).astype(np.uint16)
    row_codes, row_scales = core().encode_row_main(x)
    codes, scales = core().encode_group_main(x.reshape(-1, 16))
    assert np.array_equal(row_codes.reshape(-1, 8), codes)
    assert np.array_equal(row_scales.reshape(-1, 1), scales)


@pytest.mark.parametrize("bad", [0x7F80, 0xFF80, 0x7FC0, 0xFFFF, 0x7F81])
def test_nonfinite_group_is_seen_and_alone(bad: int) -> None:
    rng = np.random.default_rng(3)
    x = to_bf16(to_f32(torch_bf16(rng.standard_normal((1, 512)).astype(np.float32))))
    clean_codes, clean_scales = core().encode_row_main(x)
    for channel in (0, 15, 16, 200, 511):
        spoiled = x.copy()
        spoiled[0, channel] = bad
        codes, scales = core().encode_row_main(spoiled)
        group = channel // 16
        assert scales[0, group] == 0x7F and not codes[0, 8 * group : 8 * group + 8].any()
        others = np.arange(32) != group
        assert np.array_equal(scales[:, others], clean_scales[:, others])
        in_others = np.repeat(others, 8)
        assert np.array_equal(codes[:, in_others], clean_codes[:, in_others])


# ---- Decoding


def signed(grid: np.ndarray) -> np.ndarray:
    return np.concatenate([grid, -grid])


def check_decode(name: str, codes: np.ndarray, scales: np.ndarray, expected: np.ndarray) -> None:
    expected = expected.astype(np.float32)
    wanted = np.where(np.isnan(expected), F32_NAN, bits(expected))
    assert np.array_equal(bits(getattr(core(), f"decode_{name}")(codes, scales)), wanted)
    in_bf16 = getattr(core(), f"decode_{name}_bf16")(codes, scales)
    assert np.array_equal(in_bf16, torch_bf16(expected))


@pytest.mark.filterwarnings("ignore:overflow")
def test_every_code_with_every_scale() -> None:
    """Every pair: NaN scales, zero bytes and bytes that no encoder writes included."""
    scales = np.arange(256, dtype=np.uint8)[:, None]
    e4m3 = signed(np.append(E4M3, np.nan))
    ue8m0 = np.append(2.0 ** np.arange(-127, 128), np.nan)
    nibbles = np.tile(np.arange(16, dtype=np.uint8), (256, 1))
    check_decode("group_main", pack(nibbles), scales, signed(E2M1) * e4m3[:, None])
    twice = np.tile(nibbles, 2)
    check_decode("group_index", pack(twice), scales, np.tile(signed(E2M1), 2) * ue8m0[:, None])
    for width in (32, 64):
        codes = np.tile(np.arange(256, dtype=np.uint8).reshape(-1, width), (256, 1))
        each = np.repeat(scales, 256 // width, axis=0)
        check_decode(f"group_fp8_{width}", codes, each, e4m3[codes] * ue8m0[each])


def test_decode_index_fp8() -> None:
    codes = np.arange(256, dtype=np.uint8).reshape(2, 128)
    scales = np.float32([[0.3], [1e-4 / 448]])
    expected = signed(np.append(E4M3, np.nan)).astype(np.float32)[codes] * scales
    decoded = core().decode_row_index_fp8(codes, scales)
    assert np.array_equal(decoded, expected, equal_nan=True)


@pytest.mark.parametrize("file", ["quant", "csa2_small", "csa2_short"])
def test_golden_dequantised(file: str) -> None:
    """Quantise and dequantise give the bits of an independent implementation."""
    arrays = golden.load(file)
    kinds = {"main": "group_main", "index": "group_index", "window": "group_fp8_32"}
    checked = 0
    for key, dequantised in arrays.items():
        if not key.endswith("_dequant"):
            continue
        source = arrays.get(key.replace("_dequant", "_in" if file == "quant" else "_rotated"))
        if source is None:  # a Reuse layer keeps only the result
            continue
        name = kinds[key.split(".")[-1].split("_")[0]]
        codes, scales = getattr(core(), f"encode_{name}")(source.reshape(-1, ENCODERS[name][0]))
        decoded = getattr(core(), f"decode_{name}_bf16")(codes, scales)
        assert np.array_equal(decoded.reshape(source.shape), dequantised), key
        checked += 1
    assert checked == (3 if file == "quant" else 10)


# ---- Cases from the field


@pytest.mark.case("E2M1 ties")
def test_e2m1_ties_at_every_scale() -> None:
    """882 exact ties; 42 of them would flip if x were multiplied by the reciprocal of the scale."""
    pattern = [6, 0.25, -0.25, 0.75, -0.75, 1.25, -1.25, 1.75]
    pattern += [-1.75, 2.5, -2.5, 3.5, -3.5, 5, -5, 0]
    scales = E4M3[1:]
    x = (np.array(pattern) * scales[:, None]).astype(np.float32)
    codes, scale_bytes = core().encode_group_main(to_bf16(x))
    assert np.array_equal(scale_bytes[:, 0], np.arange(0x01, 0x7F))
    expected = bytes.fromhex("07 28 2A 4A 4C 6C 6E 0E")
    assert all(row.tobytes() == expected for row in codes)

    reciprocals = np.float32(1) / scales.astype(np.float32)
    multiplied = nearest_even(x * reciprocals[:, None], E2M1)
    flips = (multiplied != nearest_even(np.array(pattern), E2M1))[:, 1:14:2]  # positive ties
    assert flips.size == 882 and flips.sum() == 42
    assert np.flatnonzero(flips.any(1))[0] + 1 == 0x0F


@pytest.mark.case("E4M3 scale below amax/6")
def test_scale_below_a_sixth_of_amax() -> None:
    def lone(amax: np.ndarray) -> np.ndarray:
        x = np.zeros((amax.size, 16), np.uint16)
        x[:, 0] = to_bf16(amax)
        return x

    codes, scales = core().encode_group_main(lone(np.float32([6.375, 0.0174560546875])))
    assert scales.tolist() == [[0x38], [0x01]] and codes[:, 0].tolist() == [7, 7]
    decoded = core().decode_group_main(codes, scales[:, 0:1])
    assert decoded[:, 0].tolist() == [6.0, 0.01171875]

    amax = to_f32(every_bf16()[:0x8000])
    amax = amax[amax <= 3225]
    assert amax.size == 17738
    codes, scales = core().encode_group_main(lone(amax))
    sixth = np.maximum(amax, np.float32(6 * 2.0**-9)) / np.float32(6)
    assert np.array_equal(scales[:, 0], nearest_even(sixth, E4M3))
    clamped = amax / E4M3[scales[:, 0]] > 6
    assert clamped.sum() == 1168 and (codes[clamped, 0] == 7).all()


@pytest.mark.case("Zero and tiny blocks")
def test_zero_and_tiny_blocks() -> None:
    x = np.zeros((5, 16), np.float32)
    x[1] = -0.0
    x[2:, 0] = [2.0**-133, 4.5 * 2.0**-9, 5.5 * 2.0**-9]
    codes, scales = core().encode_group_main(to_bf16(x))
    assert (scales == 0x01).all()
    decoded = core().decode_group_main(codes, scales)
    assert decoded.max(1).tolist() == [0, 0, 0, 0.0078125, 0.01171875]
    assert codes[0].tolist() == [0] * 8 and codes[1].tolist() == [0x88] * 8
    assert (codes[3, 0], codes[4, 0]) == (6, 7)
    never_written = core().decode_group_main(np.zeros((1, 8), np.uint8), np.zeros((1, 1), np.uint8))
    assert not bits(never_written).any()
    floors = {"group_index": 127 - 126, "group_fp8_32": 127 - 22, "group_fp8_64": 127 - 22}
    for name, byte in floors.items():
        zeros = np.zeros((1, ENCODERS[name][0]), np.uint16)
        codes, scales = getattr(core(), f"encode_{name}")(zeros)
        assert scales[0, 0] == byte and not codes.any()


@pytest.mark.case("Nibble order")
def test_nibble_order() -> None:
    positive = [0.5, 1, 1.5, 2, 3, 4, 6, 0]
    x = np.float32([positive + [-value for value in positive[:-1]] + [-0.0]])
    codes, scales = core().encode_group_main(to_bf16(x))
    assert scales[0, 0] == 0x38
    assert codes.tobytes() == bytes.fromhex("21 43 65 07 A9 CB ED 8F")


# ---- Elementary functions


def exp_arguments() -> np.ndarray:
    """Finite: all magnitudes, the whole range, borders of the reduction, edges of the results."""
    rng = np.random.default_rng(4)
    magnitudes = np.exp2(rng.uniform(-30, np.log2(104), 1 << 18))
    borders = (np.arange(-151, 130) + 0.5) * np.log(2)  # where the nearest integer changes
    edges = [0, -0.0, 2.0**-149, 88.72283, 88.72284, 89, 3e38, -87.33654, -103.97208, -104, -3e38]
    close = np.concatenate([borders, edges]).astype(np.float32)
    around = [np.nextafter(close, np.float32(side)) for side in (-np.inf, np.inf)]
    parts = [magnitudes, -magnitudes, rng.uniform(-104, 89, 1 << 18), close, *around]
    return np.concatenate(parts).astype(np.float32)


def test_exact_fma_of_arrays() -> None:
    """The helper itself, against fractions: any magnitudes, and sums that all but cancel."""
    rng = np.random.default_rng(7)
    a, b, c = (some_f32(3000, seed) for seed in (1, 2, 3))
    with np.errstate(all="ignore"):
        nearly = rng.choice([1, 1 + 2.0**-20, 0.5], a.size)
        c[::2] = (-a.astype(np.float64) * b * nearly)[::2]
        fits = np.isfinite(c) & (np.abs(a.astype(np.float64) * b + c) < 3e38)
    assert fits.sum() > 1000
    terms = [x[fits].astype(np.float64) for x in (a, b, c)]
    assert np.array_equal(fma32_array(*terms), np.float32([*map(fma32, *terms)]))


@pytest.mark.case("CPU equals GPU")
def test_exp_bits() -> None:
    """Bit for bit the documented chain of FMAs; a coefficient one step away would be seen."""
    x = exp_arguments()
    assert np.array_equal(bits(core().exp_fma(x)), bits(exp32(x)))


def test_exp_constants_are_the_documented_ones() -> None:
    text = (Path(__file__).resolve().parent.parent / "docs" / "numerics.md").read_text()
    section = text.partition("### Exponential")[2].partition("\n#")[0]
    documented = [float.fromhex(word) for word in re.findall(r"-?0x[0-9a-f.]+p[+-]?\d+", section)]
    assert documented == [LOG2_E, LN2_HIGH, LN2_LOW, *EXP_POLYNOMIAL[:5]]
    assert EXP_POLYNOMIAL[5:] == [1, 1]
    assert abs(LN2_HIGH + LN2_LOW - np.log(2)) < 2.0**-52


def test_exp_error_bound() -> None:
    """Below 0.9 ulp; 1 where the result is subnormal and rounded once more."""
    x = exp_arguments()
    x = x[(x < 88.7228) & (x > -104)]
    exact = np.exp(x.astype(np.float64))
    ulp = np.exp2(np.maximum(np.frexp(exact)[1], -125) - 24.0)
    error = np.abs(core().exp_fma(x) - exact) / ulp
    assert error.max() <= 1 and error[exact >= 2.0**-126].max() < 0.9


def test_exp_special_values() -> None:
    x = np.float32([0, -0.0, np.inf, -np.inf, 88.73, 1e38, -104, -1e38])
    assert core().exp_fma(x).tolist() == [1, 1, np.inf, 0, np.inf, np.inf, 0, 0]
    assert np.isnan(core().exp_fma(np.float32([np.nan, -np.nan]))).all()


def test_rsqrt() -> None:
    x = np.abs(some_f32(1 << 20))
    x = x[~np.isnan(x)]
    with np.errstate(divide="ignore"):
        expected = np.float32(1) / np.sqrt(x)
    assert np.array_equal(bits(core().rsqrt_ieee(x)), bits(expected))


def exact_sum_squares(row: np.ndarray) -> float:
    lanes = [0.0] * 32
    for i, x in enumerate(row):
        lanes[i % 32] = fma32(x, x, lanes[i % 32])
    while len(lanes) > 1:
        half = len(lanes) // 2
        lanes = [
            fl32(Fraction(a) + Fraction(b)) for a, b in zip(lanes[:half], lanes[half:], strict=True)
        ]
    return lanes[0]


@pytest.mark.case("CPU equals GPU")
@pytest.mark.parametrize("width", [128, 512])
def test_sum_of_squares_and_norm(width: int) -> None:
    rng = np.random.default_rng(5)
    x = (rng.standard_normal((6, width)) * [[1], [1e-3], [50], [1e-20], [1], [0]]).astype(
        np.float32
    )
    x[4, 7] = 300.0  # outlier channel
    w = rng.standard_normal((1, width)).astype(np.float32)
    sums = np.float32([exact_sum_squares(row) for row in x])
    assert np.array_equal(getattr(core(), f"sum_squares_{width}")(x), sums)
    for eps in (1e-6, 1e-20):
        factor = np.float32(1) / np.sqrt(sums / np.float32(width) + np.float32(eps))
        normed = getattr(core(), f"rms_norm_{width}")(x, w, eps)
        assert np.array_equal(normed, torch_bf16(x * factor[:, None] * w))


@pytest.mark.parametrize("file", ["csa2_small", "csa2_short"])
def test_golden_norms(file: str) -> None:
    """Latents and index keys: at most 2 BF16 ulp on at most 1e-4 of the elements."""
    arrays = golden.load(file)
    latent = core().rms_norm_512(
        to_f32(arrays["L3.comp_kv"]), arrays["L3.comp_norm_weight"][None], 1e-20
    )
    pairs = [(latent, arrays["L3.latent"])]
    for layer, ratio in (("L1", 2), ("L3", 1)):
        projected = to_f32(arrays[f"{layer}.index_k_projected"])
        normed = core().rms_norm_128(projected, arrays[f"{layer}.index_k_norm_weight"][None], 1e-20)
        angles = arrays[f"{layer}.angles"][::ratio][: len(normed)]
        rotated = core().rope_128(normed, cos_sin(angles))
        pairs.append((rotated, arrays[f"{layer}.index_k_rotated"]))
    for ours, theirs in pairs:
        steps = np.abs(ours.astype(np.int32) - theirs.astype(np.int32))
        assert steps.max() <= 2 and np.count_nonzero(steps) <= 1 + 1e-4 * steps.size


# ---- RoPE and Hadamard


@pytest.mark.parametrize("kind", ["compressed", "window"])
def test_golden_rope(kind: str) -> None:
    arrays = golden.load("rope")
    table = cos_sin(arrays[f"angles_{kind}"])
    x = arrays[f"x_{kind}"]
    assert np.array_equal(core().rope_512(x, table), arrays[f"rotated_{kind}"])
    assert np.array_equal(core().inverse_rope_512(x, table), arrays[f"derotated_{kind}"])


@pytest.mark.parametrize("file", ["csa2_small", "csa2_short"])
def test_golden_rotations(file: str) -> None:
    """Entries rotate at the first token of their group; outputs rotate back at the query's own."""
    arrays = golden.load(file)
    for layer, ratio in (("L1", 2), ("L3", 1)):
        latent = arrays[f"{layer}.latent"]
        table = cos_sin(arrays[f"{layer}.angles"][::ratio][: len(latent)])
        assert np.array_equal(core().rope_512(latent, table), arrays[f"{layer}.main_rotated"])
    for layer in range(6):
        out = arrays[f"L{layer}.attend_out_fp32"]
        rows, heads, dims = out.shape
        table = np.repeat(cos_sin(arrays[f"L{layer}.angles"][arrays["rows"]]), heads, axis=0)
        derotated = core().inverse_rope_512(torch_bf16(out).reshape(-1, dims), table)
        expected = arrays[f"L{layer}.attend_out_derotated"]
        assert np.array_equal(derotated.reshape(rows, heads, dims), expected)


def test_fused_rope_would_differ() -> None:
    """The golden outputs decide: with a fused multiply-add a few of them change."""
    arrays = golden.load("csa2_small")
    changed = 0
    for layer in range(6):
        x = to_f32(torch_bf16(arrays[f"L{layer}.attend_out_fp32"]))[..., -64:]
        cos, sin = np.split(cos_sin(arrays[f"L{layer}.angles"][arrays["rows"]])[:, None], 2, axis=2)
        a, b = x[..., 0::2], x[..., 1::2]
        fused = a * cos + b.astype(np.float64) * sin  # the second product exact, then one rounding
        derotated = arrays[f"L{layer}.attend_out_derotated"][..., -64::2]
        changed += np.count_nonzero(torch_bf16(fused.astype(np.float32)) != derotated)
    assert changed > 0


def test_hadamard_bits() -> None:
    x = np.random.default_rng(6).standard_normal((50, 128)).astype(np.float32)
    expected = x.copy()
    for h in (1, 2, 4, 8, 16, 32, 64):
        pairs = expected.reshape(50, -1, 2, h)
        a, b = pairs[:, :, 0].copy(), pairs[:, :, 1].copy()
        pairs[:, :, 0], pairs[:, :, 1] = a + b, a - b
    expected *= np.float32(0.08838834764831845)
    ours = core().hadamard_128(x)
    assert np.array_equal(bits(ours), bits(expected))
    parity = np.array([[(i & j).bit_count() % 2 for j in range(128)] for i in range(128)])
    truth = x.astype(np.float64) @ (1 - 2 * parity) / np.sqrt(128)
    assert np.abs(ours - truth).max() < 1e-6
