"""Expected values by exact arithmetic, independent of the code under test.

Small-float grids are lists of values; every midpoint is exact in FP64, so nearest-even is decided
without rounding. FP32 results come from fractions, rounded once.
"""

import math
from fractions import Fraction

import numpy as np

E2M1 = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
E4M3 = np.array(
    [c / 8 * 2.0**-6 if c < 8 else (8 + c % 8) / 8 * 2.0 ** (c // 8 - 7) for c in range(0x7F)]
)


def every_bf16() -> np.ndarray:
    """All 65,536 BF16 bit patterns, uint16."""
    return np.arange(65536, dtype=np.uint16)


def to_f32(bits: np.ndarray) -> np.ndarray:
    """FP32 value of BF16 bit patterns."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def to_bf16(x: np.ndarray) -> np.ndarray:
    """BF16 bit patterns of FP32 values that BF16 holds exactly."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    assert not (bits & 0xFFFF).any(), "not a BF16 value"
    return (bits >> 16).astype(np.uint16)


def nearest_even(x: np.ndarray, grid: np.ndarray) -> np.ndarray:
    """Index of the grid value nearest to |x|, ties to the even index, saturating at the last."""
    with np.errstate(invalid="ignore"):  # signalling NaN
        magnitude = np.abs(x.astype(np.float64))
    midpoints = (grid[1:] + grid[:-1]) / 2
    low = np.searchsorted(midpoints, magnitude, side="left")  # a tie counts as not passed
    high = np.searchsorted(midpoints, magnitude, side="right")
    return np.where(low % 2 == 0, low, high)


def ceil_log2(x: np.ndarray) -> np.ndarray:
    """ceil(log2(x)) of positive FP32 values, exact."""
    mantissa, exponent = np.frexp(x.astype(np.float64))  # x = mantissa * 2^exponent, in [0.5, 1)
    return np.where(mantissa == 0.5, exponent - 1, exponent)


def fl32(x: Fraction) -> float:
    """`x` rounded to FP32, nearest even (finite results)."""
    double = float(x)
    if Fraction(double) != x and np.float64(double).view(np.int64) % 2 == 0:
        # Round to odd: FP64 keeps a trace of the rest, so the second rounding cannot be misled.
        double = math.nextafter(double, math.inf if x > double else -math.inf)
    return float(np.float32(double))


def fma32(a: float, b: float, c: float) -> float:
    """a * b + c rounded once to FP32."""
    return fl32(Fraction(float(a)) * Fraction(float(b)) + Fraction(float(c)))


def fma32_array(a: np.ndarray, b: np.ndarray | float, c: np.ndarray | float) -> np.ndarray:
    """`fma32` of arrays, without fractions.

    The product is exact in FP64. Of the sum, FP64 keeps the nearest value and `rest`, which it
    lacks; rounded to odd, the second rounding cannot be misled.
    """
    product, c = np.float64(a) * np.float64(b), np.float64(c)
    total = product + c
    back = total - product
    rest = (product - (total - back)) + (c - back)
    inexact_even = (rest != 0) & (total.view(np.int64) % 2 == 0)
    odd = np.nextafter(total, np.copysign(np.inf, rest))
    return np.where(inexact_even, odd, total).astype(np.float32)


# docs/numerics.md, "Exponential"
LOG2_E = float.fromhex("0x1.715476p+0")
LN2_HIGH, LN2_LOW = float.fromhex("0x1.62e430p-1"), float.fromhex("-0x1.05c610p-29")
EXP_POLYNOMIAL = [
    float.fromhex(coefficient)
    for coefficient in (
        "0x1.6a2428p-10",
        "0x1.1239e2p-7",
        "0x1.5558f2p-5",
        "0x1.555492p-3",
        "0x1.fffffcp-2",
        "0x1p+0",
        "0x1p+0",
    )
]


def exp32(x: np.ndarray) -> np.ndarray:
    """FP32 exp(x) with the project's roundings; x is not NaN."""
    x = np.clip(x, np.float32(-104), np.float32(89))
    n = fma32_array(x, LOG2_E, 1.5 * 2**23) - np.float32(1.5 * 2**23)  # nearest integer
    r = fma32_array(n, -LN2_LOW, fma32_array(n, -LN2_HIGH, x))
    p = np.zeros_like(r)
    for coefficient in EXP_POLYNOMIAL:
        p = fma32_array(p, r, coefficient)
    with np.errstate(over="ignore"):
        return np.ldexp(p.astype(np.float64), n.astype(np.int64)).astype(np.float32)
