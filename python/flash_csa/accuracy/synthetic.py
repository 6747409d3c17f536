"""Built-in sets: Gaussian, and heavy-tailed with outlier channels.

Queries resemble keys of the sequence to a degree, index heads see what attention heads see, and
both drift from layer to layer, as in trained models; with independent queries no selection is
better than another.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from ..plan import HEAD_DIM, INDEX_DIM
from ..reference.quant import round_bf16
from .activations import (
    Activations,
    Queries,
    Shape,
    layer_modes,
    normed,
    sketch,
    spread_positions,
)

GAIN = 2.0  # standard deviation of logits: a head attends to tens of entries
SINK = 7.0  # takes a few per cent of a row's attention
TAIL_FREEDOM = 3  # Student's t of heavy-tailed values: finite variance, infinite kurtosis
OUTLIERS, OUTLIER_GAIN = 4, 15.0  # channels and how far they stand out, as in real activations
TOPIC_TOKENS, TOPICS = 64, 32


@dataclass
class Walk:
    """A random walk over layers of independent values, whose variance stays: see `Shape.drift`."""

    drift: float
    value: Tensor | None = None

    def step(self, fresh: Tensor) -> Tensor:
        """The first layer's value, or the next one's."""
        if self.value is None:
            self.value = fresh
        elif self.drift > 0:
            self.value = (1 - self.drift**2) ** 0.5 * self.value + self.drift * fresh
        return self.value


class Draw:
    """Seeded values on one device. Another device draws other values."""

    def __init__(self, seed: int, device: torch.device | str = "cpu") -> None:
        self.random = torch.Generator(device).manual_seed(seed)
        self.places = torch.Generator().manual_seed(seed)  # positions: the same everywhere
        self.device = torch.device(device)

    def normal(self, *size: int) -> Tensor:
        return torch.randn(*size, generator=self.random, device=self.device)

    def uniform(self, *size: int) -> Tensor:
        return torch.rand(*size, generator=self.random, device=self.device)

    def student(self, *size: int) -> Tensor:
        """Unit-variance Student's t."""
        squares = self.normal(TAIL_FREEDOM, *size).square().sum(0) / TAIL_FREEDOM
        return self.normal(*size) / squares.sqrt() * ((TAIL_FREEDOM - 2) / TAIL_FREEDOM) ** 0.5

    def positions(self, tokens: int, rows: int) -> Tensor:
        return spread_positions(tokens, rows, self.places).to(self.device)


class Layers:
    """Layers of a synthetic group, one after the other; what a layer draws drifts with `drift`."""

    def __init__(self, draw: Draw, key_weight: Tensor, weight: Tensor, shape: Shape) -> None:
        """key_weight: the sketch that makes keys, at channels that keys have scaled by `weight`."""
        self.draw, self.shape = draw, shape
        self.seen_by_index = key_weight * weight.square()
        self.sink = SINK + draw.normal(shape.heads)
        self.weights = Walk(shape.drift)

    def next(self, q: Tensor, index: Tensor | None = None) -> Queries:
        """The layer of query heads f32 [Q, H, 512]; index heads see `index`, by default `q`."""
        heads, index_heads = self.shape.heads, self.shape.index_heads
        # Uniform around 1/2, so that most weights are positive.
        weights = 0.5 + self.weights.step(self.draw.uniform(len(q), index_heads) - 0.5)
        seen = torch.arange(index_heads, device=q.device) * heads // index_heads
        index_q = (q if index is None else index)[:, seen] @ self.seen_by_index.T
        scale = (INDEX_DIM * index_heads) ** -0.5
        index_weights = round_bf16(weights * scale).float()
        return Queries(round_bf16(q), round_bf16(index_q), index_weights, self.sink)


def gaussian(tokens: int, shape: Shape, seed: int, device="cpu") -> Activations:
    """Independent N(0, 1) values: nothing resembles anything."""
    draw = Draw(seed, device)
    kv = draw.normal(tokens, HEAD_DIM)
    weight = torch.ones(HEAD_DIM, device=draw.device)
    return _finish(draw, "gaussian", "independent normal values", kv, weight, shape, 0.0)


def heavy(tokens: int, shape: Shape, seed: int, device="cpu") -> Activations:
    """Student's t values around recurring topics; a few channels are 15 times as large."""
    draw = Draw(seed, device)
    topics = draw.normal(TOPICS, HEAD_DIM)
    topic = (draw.uniform(-(-tokens // TOPIC_TOKENS)) * TOPICS).long()
    kv = topics[topic].repeat_interleave(TOPIC_TOKENS, 0)[:tokens] + draw.student(tokens, HEAD_DIM)
    weight = (draw.normal(HEAD_DIM) / 2).exp()
    weight[torch.randperm(HEAD_DIM, generator=draw.places)[:OUTLIERS]] *= OUTLIER_GAIN
    origin = f"Student's t({TAIL_FREEDOM}) around topics, {OUTLIERS} outlier channels"
    return _finish(draw, "heavy-tailed", origin, kv, weight, shape, 0.5)


def _finish(
    draw: Draw,
    name: str,
    origin: str,
    kv: Tensor,
    weight: Tensor,
    shape: Shape,
    alike: float,
) -> Activations:
    """Queries for `kv`: `alike` of their energy is that of a random earlier token."""
    tokens = len(kv)
    positions = draw.positions(tokens, shape.rows)
    rows = len(positions)
    key_weight = sketch(draw.random, weight)
    target = (draw.uniform(rows) * positions).long()

    seen = alike**0.5 * normed(kv[target]).float()[:, None]
    walk, made = Walk(shape.drift), Layers(draw, key_weight, weight, shape)
    layers = []
    for _ in range(shape.layers):
        own = walk.step(draw.normal(rows, shape.heads, HEAD_DIM))
        layers.append(made.next((seen + (1 - alike) ** 0.5 * own) / weight * GAIN))
    return Activations(
        name=name,
        origin=origin,
        positions=positions,
        kv=kv,
        gate=draw.normal(tokens, HEAD_DIM),
        window_kv=round_bf16(normed(kv).float() * weight),
        norm_weight=weight,
        key_weight=round_bf16(key_weight),
        key_norm_weight=torch.ones(INDEX_DIM, device=draw.device),
        layers=tuple(layers),
        modes=layer_modes(shape.layers),
    )
