"""A layer group for captured hidden states: the states are real, the weights are drawn.

As in the demo, queries are made to resemble keys and index heads to see what attention heads see;
with independent weights attention is nearly uniform, and no selection better than another.
"""

import torch
from torch import Tensor

from ..plan import HEAD_DIM, INDEX_DIM
from ..reference.quant import round_bf16
from .activations import Activations, Queries, Shape, layer_modes, normed, sketch
from .synthetic import GAIN, SINK, Draw, Walk

LATENT_SHARE = 4  # hidden width : query latent width, 5120 : 1280 in the model
HEAD_SPREAD = 0.5  # how much heads differ in the channels they look at (std of the log)
OWN_SHARE = 0.5  # of a query's energy that resembles no key


def draw_group(
    hidden: list[Tensor], name: str, origin: str, shape: Shape, seed: int, device="cpu"
) -> Activations:
    """The group that sees `hidden`: bf16 [T, width] for all layers, or one of each layer.

    With states of each layer the query weights stay what they are, and the drift is the states'
    own; with one, weights drift as `shape.drift` says.
    """
    draw = Draw(seed, device)
    states = [normed(x.to(device)) for x in hidden]
    first = states[0].float()
    tokens, width = first.shape
    positions = draw.positions(tokens, shape.rows)
    kv_weight = draw.normal(HEAD_DIM, width) / width**0.5
    near = (kv_weight + draw.normal(HEAD_DIM, width) / width**0.5) / 2**0.5
    key_weight = sketch(draw.random)
    heads = _Heads(draw, kv_weight, shape, 0.0 if len(states) > 1 else shape.drift)
    layers = []
    for number in range(len(states) if len(states) > 1 else shape.layers):
        rows = states[number % len(states)][positions].float()
        layers.append(heads.layer(rows, key_weight))
    return Activations(
        name=name,
        origin=origin,
        positions=positions,
        kv=_linear(first, kv_weight),
        gate=_linear(first, draw.normal(HEAD_DIM, width) / width**0.5),
        window_kv=normed(_linear(first, near)),
        norm_weight=1 + draw.normal(HEAD_DIM) / 10,
        key_weight=round_bf16(key_weight),
        key_norm_weight=1 + draw.normal(INDEX_DIM) / 10,
        layers=tuple(layers),
        modes=layer_modes(len(layers)),
    )


class _Heads:
    """Query weights of the heads, which walk from layer to layer."""

    def __init__(self, draw: Draw, kv_weight: Tensor, shape: Shape, drift: float) -> None:
        self.draw, self.shape = draw, shape
        width = kv_weight.shape[1]
        self.rank = max(1, width // LATENT_SHARE)
        self.latent = draw.normal(self.rank, width) / width**0.5
        self.alike = kv_weight @ self.latent.T
        self.emphasis, self.noise = Walk(drift), Walk(drift)
        self.sink = SINK + draw.normal(shape.heads)
        self.index_bias = draw.normal(shape.index_heads, width) / width**0.5 / 2

    def layer(self, rows: Tensor, key_weight: Tensor) -> Queries:
        weight = self._next()
        heads, index_heads = self.shape.heads, self.shape.index_heads
        latent = normed(_linear(rows, self.latent)).float()
        seen = torch.arange(index_heads, device=rows.device) * heads // index_heads
        scale = (INDEX_DIM * index_heads) ** -0.5
        return Queries(
            q=_heads(latent, weight),
            index_q=_heads(latent, key_weight @ weight[seen]),
            # Most head weights come out near 1, some below 0.
            index_weights=round_bf16((1 + _linear(rows, self.index_bias)) * scale).float(),
            sink=self.sink,
        )

    def _next(self) -> Tensor:
        """f32 [H, 512, rank]: the keys' own projection seen through the latent, with emphasis on
        other channels in every head, and a share of noise. Emphasis and noise drift."""
        draw, heads = self.draw, self.shape.heads
        emphasis = self.emphasis.step(draw.normal(heads, 1, self.rank))
        alike = self.alike * (HEAD_SPREAD * emphasis).exp()
        alike *= HEAD_DIM**0.5 / alike.norm(dim=(1, 2), keepdim=True)
        noise = self.noise.step(draw.normal(heads, HEAD_DIM, self.rank)) / self.rank**0.5
        return GAIN * ((1 - OWN_SHARE**2) ** 0.5 * alike + OWN_SHARE * noise)


def _linear(x: Tensor, weight: Tensor) -> Tensor:
    """f32 x @ weight^T of BF16 values, accumulated in FP32."""
    return x.float() @ weight.bfloat16().float().T


def _heads(latent: Tensor, weight: Tensor) -> Tensor:
    """bf16 [Q, H, dim]: latent [Q, rank] through weight [H, dim, rank]."""
    return round_bf16((latent @ weight.flatten(0, 1).T).unflatten(1, weight.shape[:2]))
