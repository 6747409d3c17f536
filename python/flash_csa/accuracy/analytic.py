"""The error of a group quantiser on independent N(0, 1) values, without drawing any.

Of n values the largest magnitude M has the density n f(M) F(M)^(n-1), with f(m) = 2 phi(m) and
F(m) = 2 Phi(m) - 1; given M, the others are independent and lie in [-M, M]. M gives the scale s
exactly as it is stored. The squared error of the n - 1 others is an integral over the cells of the
grid, each of which has a closed form,

    int_a^b (x - c)^2 phi(x) dx = (1 + c^2) (Phi(b) - Phi(a)) - (b - 2c) phi(b) + (a - 2c) phi(a),

and M itself is rounded like any value. One quadrature over M is left:

    E = int n f(M) F(M)^(n-1) [ (M - q(M))^2 + (n - 1) e(M) ] / n dM,    e(M) = (cells) / F(M).

The relative error of many values is sqrt(E), since their mean square is 1.
"""

import math

import torch
from torch import Tensor

from .formats import LARGEST, Variant, round_element

POINTS, LARGEST_M = 2000, 9.0  # of the quadrature over M


def expected_error(variant: Variant) -> float:
    """sqrt(E) of a variant without BF16 dims, for N(0, 1) values."""
    n = variant.group
    m = (torch.arange(POINTS, dtype=torch.float64) + 0.5) * (LARGEST_M / POINTS)
    inside = 2 * _cdf(m) - 1
    density = 2 * n * _pdf(m) * inside ** (n - 1)
    scale = variant.scale_of(m.float()).double()
    own = (m - _quantised(m, scale, variant.element)) ** 2
    others = _cells(m, scale, variant.element) / inside.clamp(min=1e-12)
    total = (density * (own + (n - 1) * others) / n).sum() * (LARGEST_M / POINTS)
    return math.sqrt(float(total))


def _quantised(x: Tensor, scale: Tensor, element: str) -> Tensor:
    largest = LARGEST[element]
    return round_element((x / scale).clamp(max=largest).float(), element).double() * scale


def _grid(element: str) -> Tensor:
    """f64: the magnitudes of the element, ascending."""
    steps = torch.arange(0, 1 << 13, dtype=torch.float32) * (LARGEST[element] / (1 << 13))
    fine = torch.logspace(-12, math.log2(LARGEST[element]), 1 << 14, base=2.0)
    points = torch.cat([steps, fine, torch.tensor([LARGEST[element]])])
    return round_element(points.clamp(max=LARGEST[element]), element).unique().double()


def _cells(m: Tensor, scale: Tensor, element: str) -> Tensor:
    """f64 [points]: int_{-M}^{M} (x - q(x))^2 phi(x) dx."""
    grid = _grid(element)[:, None]
    middles = torch.nn.functional.pad((grid[1:, 0] + grid[:-1, 0]) / 2, (1, 0))[:, None]
    ends = torch.nn.functional.pad(middles[1:, 0], (0, 1), value=math.inf)[:, None]
    a, b, c = (middles * scale).minimum(m), (ends * scale).minimum(m), grid * scale
    cells = (1 + c**2) * (_cdf(b) - _cdf(a)) + (a - 2 * c) * _pdf(a) - (b - 2 * c) * _pdf(b)
    return 2 * cells.sum(0)


def _pdf(x: Tensor) -> Tensor:
    return torch.exp(-(x**2) / 2) / math.sqrt(2 * math.pi)


def _cdf(x: Tensor) -> Tensor:
    return torch.special.ndtr(x)
