"""core/scoring.h: the order of selection and the bits of a score, by exact arithmetic."""

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import golden
from core_module import core
from exact import E2M1, fl32, fma32, to_f32

floats = st.floats(width=32, allow_nan=True, allow_infinity=True)


def test_order_key_is_monotone() -> None:
    """Sorting any bit patterns by key sorts their values; equal keys only for equal values."""
    rng = np.random.default_rng(0)
    x = rng.integers(0, 2**32, 1 << 20, np.uint32).view(np.float32)
    special = [0, -0.0, np.inf, -np.inf, 2.0**-149, -(2.0**-149), 1, -1]
    x = np.concatenate([x[~np.isnan(x)], np.float32(special)])
    key = core().order_key(x)
    order = np.argsort(key, kind="stable")
    steps, key_steps = np.diff(x[order].astype(np.float64)), np.diff(key[order].astype(np.int64))
    with np.errstate(invalid="ignore"):
        assert ((steps >= 0) | np.isnan(steps)).all()  # Inf - Inf
        assert ((key_steps > 0) == (x[order][1:] != x[order][:-1])).all()


def test_order_key_special_values() -> None:
    nans = np.array([0x7FC00000, 0xFFC00000, 0x7F800001, 0xFFFFFFFF], np.uint32).view(np.float32)
    assert (core().order_key(nans) == 0).all()
    assert core().order_key(np.float32(-np.inf)) > 0
    assert core().order_key(np.float32(-0.0)) == core().order_key(np.float32(0.0))


@given(st.lists(st.tuples(floats, st.integers(0, 2**20)), min_size=1, max_size=50))
@settings(max_examples=200, deadline=None)
def test_total_order(candidates: list[tuple[float, int]]) -> None:
    """Larger score first, then lower position, NaN after everything."""
    scores = np.float32([score for score, _ in candidates])
    positions = np.int32([position for _, position in candidates])
    keys = core().order_key_at(scores, positions)
    ours = sorted(range(len(keys)), key=lambda i: -int(keys[i]))
    worst_last = [(np.isnan(s), 0 if np.isnan(s) else -float(s), p) for s, p in candidates]
    assert [worst_last[i] for i in ours] == sorted(worst_last)


def test_half_units_and_lanes() -> None:
    units = core().e2m1_half_units(np.arange(16, dtype=np.uint8))
    assert np.array_equal(units / 2, np.concatenate([E2M1, -E2M1]))
    assert core().head_lane(np.arange(16)).tolist() == [0, 0, 1, 1, 2, 2, 3, 3] * 2


def test_scale_product_rounds_like_any_product() -> None:
    codes = np.arange(256, dtype=np.uint8)
    scales = np.append(2.0 ** np.arange(-127, 128), np.nan)
    with np.errstate(over="ignore"):
        expected = (scales[:, None] * scales).astype(np.float32)
    assert np.array_equal(core().scale_product(codes[:, None], codes), expected, equal_nan=True)


# ---- Scores


def values(codes: np.ndarray) -> np.ndarray:
    """E2M1 values [n, 128] of packed codes [n, 64]."""
    nibbles = np.stack([codes & 15, codes >> 4], axis=-1).reshape(len(codes), 128)
    return np.concatenate([E2M1, -E2M1])[nibbles]


def exact_score(
    q: np.ndarray, q_exp: np.ndarray, weights: np.ndarray, k: np.ndarray, k_exp: np.ndarray
) -> float:
    """One score from E2M1 values and exponents, every FP32 rounding spelled out."""
    partials = [0.0] * 4
    for h, weight in enumerate(weights):
        dot = 0.0
        for g in range(4):
            lanes = slice(32 * g, 32 * g + 32)
            group = float(q[h, lanes] @ k[lanes])  # exact: quarters below 2^13
            dot = fma32(group, 2.0 ** int(q_exp[h, g] + k_exp[g]), dot)
        lane = h % 8 // 2
        partials[lane] = fma32(weight, max(dot, 0.0), partials[lane])
    low, high = (fl32(Fraction(partials[i]) + Fraction(partials[i + 1])) for i in (0, 2))
    return fl32(Fraction(low) + Fraction(high))


@pytest.mark.case("CPU equals GPU")
@pytest.mark.parametrize("heads", [8, 32, 64])
def test_score_bits(heads: int) -> None:
    rng = np.random.default_rng(heads)
    q_codes, k_codes = (rng.integers(0, 256, (n, 64)).astype(np.uint8) for n in (heads, 20))
    q_exp, k_exp = (rng.integers(-12, 13, (n, 4)) for n in (heads, 20))
    weights = rng.standard_normal(heads).astype(np.float32)
    scores = core().index_scores(
        q_codes, (q_exp + 127).astype(np.uint8), weights, k_codes, (k_exp + 127).astype(np.uint8)
    )
    q, k = values(q_codes), values(k_codes)
    expected = [exact_score(q, q_exp, weights, k[j], k_exp[j]) for j in range(20)]
    assert scores.tolist() == expected


def one_query(signs: list[float], weights: list[float]) -> tuple[np.ndarray, ...]:
    """Heads whose dot with the all-ones key is 128 times their sign."""
    codes = np.array([[0x22 if sign > 0 else 0xAA] * 64 for sign in signs], np.uint8)
    ones = np.full((len(signs), 4), 127, np.uint8)
    return codes, ones, np.float32(weights), np.full((1, 64), 0x22, np.uint8), ones[:1]


@pytest.mark.case("Score formula")
def test_score_formula() -> None:
    """ReLU before the weight, weights of either sign, a sum and not a mean."""
    signs, weights = [-1, 1] + [-1] * 30, [1, -2] + [0.0] * 30
    assert core().index_scores(*one_query(signs, weights)).tolist() == [-2 * 128]
    silent = core().index_scores(*one_query([-1] * 32, [1, -1] * 16))
    assert silent.tolist() == [0.0] and not np.signbit(silent[0])


def test_nan_scale_shows_in_the_score() -> None:
    codes, ones, weights, key, key_scales = one_query([1, -1], [1, 1])
    assert np.isnan(
        core().index_scores(codes, ones, weights, key, np.uint8([[127, 255, 127, 127]]))
    )
    bad_query = np.where(np.arange(8).reshape(2, 4) == 6, 255, ones).astype(np.uint8)
    bits = core().index_scores(codes, bad_query, weights, key, key_scales).view(np.uint32)
    assert bits.tolist() == [0x7FC00000]


@pytest.mark.parametrize("file", ["csa2_small", "csa2_short"])
@pytest.mark.parametrize("layer", ["L1", "L3", "L4"])
def test_golden_scores(file: str, layer: str) -> None:
    """Within 1e-6 of the row maximum of an FP64 evaluation. L4 reads the keys of L3."""
    arrays = golden.load(file)
    source = "L3" if layer == "L4" else layer

    def encode(bits: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        codes, scales = core().encode_group_index(np.ascontiguousarray(bits).reshape(-1, 32))
        return codes.reshape(-1, 64), scales.reshape(-1, 4)

    keys = encode(arrays[f"{source}.index_k_rotated"])
    for row, expected in enumerate(arrays[f"{layer}.index_scores"]):
        weights = to_f32(arrays[f"{layer}.index_weights"][row])
        scores = core().index_scores(
            *encode(arrays[f"{layer}.index_q_rotated"][row]), weights, *keys
        )
        assert np.abs(scores - expected).max() <= 1e-6 * np.abs(expected).max()
