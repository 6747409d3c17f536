"""Means with intervals. A sample is one query row: heads of a row are not independent, and are
averaged first."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

LEVEL = 0.95


@dataclass(frozen=True)
class Estimate:
    """A mean of `n` samples and its 95 % interval."""

    value: float
    low: float
    high: float
    n: int


def t_quantile(p: float, freedom: int) -> float:
    """Quantile of Student's t: Cornish-Fisher series in 1 / freedom (Abramowitz and Stegun
    26.7.5); exact closed forms at 1 and 2 degrees of freedom, where the series is poor."""
    if freedom == 1:
        return math.tan(math.pi * (p - 0.5))
    if freedom == 2:
        return (2 * p - 1) * math.sqrt(2 / (4 * p * (1 - p)))
    z = NormalDist().inv_cdf(p)
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return z + sum(term / freedom**power for power, term in enumerate(terms, 1))


def mean(samples: Sequence[float], low: float = -math.inf, high: float = math.inf) -> Estimate:
    """Mean with its t interval, clipped to what the quantity can be."""
    n = len(samples)
    if n == 0:
        raise ValueError("flash_csa.accuracy: a mean of no samples")
    middle = math.fsum(samples) / n
    if n == 1:
        return Estimate(middle, low, high, 1)
    variance = math.fsum((x - middle) ** 2 for x in samples) / (n - 1)
    half = t_quantile((1 + LEVEL) / 2, n - 1) * math.sqrt(variance / n)
    return Estimate(middle, max(low, middle - half), min(high, middle + half), n)


def share(successes: float, n: int) -> Estimate:
    """Share of successes with Wilson's interval, which stays open where all or none succeed. A
    sample that succeeds in some of its layers counts in part."""
    if n == 0:
        raise ValueError("flash_csa.accuracy: a share of no samples")
    z = NormalDist().inv_cdf((1 + LEVEL) / 2)
    p, squared = successes / n, z * z
    middle = (p + squared / (2 * n)) / (1 + squared / n)
    half = z / (1 + squared / n) * math.sqrt(p * (1 - p) / n + squared / (4 * n * n))
    return Estimate(p, max(0.0, middle - half), min(1.0, middle + half), n)
