"""The projections of every layer: seeded weights in the shapes of the model.

What a checkpoint would supply, and what is simpler here:
- the widths of hidden states and query latent shrink, in the model's proportion of 4 to 1;
- weights are drawn, but queries are made to resemble keys and the indexer to see what attention
  sees, as training would: with independent weights attention is nearly uniform over thousands of
  entries, and no selection is better than another;
- V4 normalises query heads, so that there keys are longer instead of queries;
- every layer is fed the same normed hidden states; output projections and MLPs are left out.

Projections run once, for all tokens, and the passes cut them: a GEMM of another height may round
otherwise, and the demo compares bytes.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ...group import Compressor, Query, Tokens
from ...plan import HEAD_DIM, INDEX_DIM, ROPE_DIMS, GroupPlan, Layer, LayerPlan
from ...reference.compress import rms_norm
from ...reference.quant import round_bf16

LATENT_SHARE = 4  # hidden width : query latent width, 5120 : 1280 in the model
# Of queries, or of keys where queries are normalised: spreads logits so that a head attends to tens
# of entries.
GAIN = 2.0
HEAD_SPREAD = 0.5  # how much heads differ in the channels they look at (std of the log)
SINK = 7.0  # takes a few per cent of the attention of a row
OWN_SHARE = 0.5  # of a query's energy that resembles no key


@dataclass(frozen=True)
class Source:
    """What the Full layer of a group brings: compressor inputs of T tokens, and weights."""

    tokens: Tokens
    compressor: Compressor


@dataclass(frozen=True)
class Projections:
    """Inputs of all layers. T `tokens`, of which the last Q, the `queries`, attend.

    sources: by group. window_kv: by layer, bf16 [T, 512]. queries: by layer, the Query of the last
    Q rows, whose window_kv is a part of the layer's.
    """

    tokens: int
    sources: list[Source]
    window_kv: list[Tensor]
    queries: list[Query]

    @property
    def first_query(self) -> int:
        """Position of the first row that attends."""
        return self.tokens - len(self.queries[0].q)

    def rows_of(self, group: int, start: int, rows: int) -> Tokens:
        """Compressor inputs of rows start, start + 1, ..."""
        tokens = self.sources[group].tokens
        cut = slice(start, start + rows)
        return Tokens(*(None if x is None else x[cut] for x in vars(tokens).values()))

    def query_of(self, layer: int, start: int, rows: int) -> Query:
        """The layer's Query of rows start, start + 1, ...; q is a copy, to be rotated in place."""
        query = self.queries[layer]
        cut = slice(start - self.first_query, start - self.first_query + rows)
        scoring = query.index_q is not None
        return Query(
            q=query.q[cut].clone(),
            window_kv=query.window_kv[cut],
            sink=query.sink,
            index_q=query.index_q[cut] if scoring else None,
            index_weights=query.index_weights[cut] if scoring else None,
        )


@dataclass
class _Shared:
    """Weights on which the queries of a group's layers build.

    kv: f32 [512, width]. q_a: f32 [rank, width], hidden states to query latent. sketch: bf16
    [128, 512], main vectors to index keys.
    """

    kv: Tensor
    q_a: Tensor
    sketch: Tensor | None = None


class Projector:
    """Draws weights layer after layer and projects `hidden` bf16 [T, width] with them.

    The last `queries` rows get queries.
    """

    def __init__(self, plan: LayerPlan, hidden: Tensor, queries: int, seed: int) -> None:
        self.plan = plan
        self.rows = queries
        normalised = plan.q_norm_eps is not None
        self.query_gain, self.key_gain = (1.0, GAIN) if normalised else (GAIN, 1.0)
        self.x = self._norm(hidden)
        # The direction along which all tokens measure most nearly 1.
        ones = torch.ones(len(hidden), 1)
        self.constant = torch.linalg.lstsq(self.x.float(), ones).solution[:, 0]
        self.width = hidden.shape[1]
        self.rank = max(1, self.width // LATENT_SHARE)
        self.random = torch.Generator().manual_seed(seed)

    def run(self, advance: Callable[[], None] = lambda: None) -> Projections:
        """All layers, `advance` after each."""
        sources, windows, queries = [], [], []
        shared = self._new_shared()
        for layer in self.plan.layers:
            if layer.mode == "full":
                shared = self._new_shared()
                sources.append(self._source(self.plan.groups[layer.group], shared))
            windows.append(self._window_kv(shared))
            queries.append(self._query(layer, shared, windows[-1]))
            advance()
        return Projections(len(self.x), sources, windows, queries)

    def _draw(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.random)

    def _weight(self, rows: int) -> Tensor:
        """f32 [rows, width]: unit variance out of unit variance in."""
        return self._draw(rows, self.width) / self.width**0.5

    def _new_shared(self) -> _Shared:
        return _Shared(self._weight(HEAD_DIM), self._weight(self.rank))

    def _source(self, group: GroupPlan, shared: _Shared) -> Source:
        if group.overlap or not group.indexed:
            return self._v4_source(group, shared)
        kv = _linear(self.x, shared.kv)
        gate = None if group.ratio == 1 else _linear(self.x, self._weight(HEAD_DIM))
        shared.sketch = self._sketch().bfloat16()
        return Source(
            Tokens(round_bf16(kv) if gate is None else kv, gate),
            Compressor(
                norm=1 + self._draw(HEAD_DIM) / 10,
                key=shared.sketch,
                key_norm=1 + self._draw(INDEX_DIM) / 10,
            ),
        )

    def _v4_source(self, group: GroupPlan, shared: _Shared) -> Source:
        """CSA or HCA: position biases, and for CSA an index compressor. Overlapping ones project a
        token in two roles, as of the previous group and of the current one."""
        kv = [self._near(shared.kv), shared.kv] if group.overlap else [shared.kv]
        tokens = {"kv": _linear(self.x, torch.cat(kv))}
        tokens["gate"] = _linear(self.x, self._weight(group.main_width))
        weights = {
            "norm": self.key_gain * (1 + self._draw(HEAD_DIM) / 10),
            "bias": self._draw(group.ratio, group.main_width) / 2,
        }
        if group.indexed:
            shared.sketch = self._sketch().bfloat16()
            keys = torch.cat([shared.sketch.float() @ role for role in kv])
            tokens["index_kv"] = _linear(self.x, keys)
            tokens["index_gate"] = _linear(self.x, self._weight(group.index_width))
            weights["index_norm"] = 1 + self._draw(INDEX_DIM) / 10
            weights["index_bias"] = self._draw(group.ratio, group.index_width) / 2
        return Source(Tokens(**tokens), Compressor(**weights))

    def _near(self, kv: Tensor) -> Tensor:
        """Another projection of keys, half of it `kv`."""
        return (kv + self._weight(HEAD_DIM)) / 2**0.5

    def _sketch(self) -> Tensor:
        """f32 [128, 512]: 448 dims to 64 at random, which keeps dot products on average; the
        rotated dims as they are."""
        sketch = torch.zeros(INDEX_DIM, HEAD_DIM)
        kept = INDEX_DIM - ROPE_DIMS
        sketch[:kept, :-ROPE_DIMS] = self._draw(kept, HEAD_DIM - ROPE_DIMS) / kept**0.5
        sketch[kept:, -ROPE_DIMS:] = torch.eye(ROPE_DIMS)
        return sketch

    def _window_kv(self, shared: _Shared) -> Tensor:
        return self.key_gain * self._norm(_linear(self.x, self._near(shared.kv)))

    def _query(self, layer: Layer, shared: _Shared, window_kv: Tensor) -> Query:
        plan, rows = self.plan, self.x[-self.rows :]
        latent = self._norm(_linear(rows, shared.q_a))
        q_b = self._query_weight(shared)
        query = {
            "q": _heads(latent, q_b),
            "window_kv": window_kv[-self.rows :],
            "sink": SINK + self._draw(plan.heads),
        }
        if layer.scores:
            # Index heads see what attention heads see, through the sketch that makes keys.
            seen = q_b[torch.arange(plan.index_heads) * plan.heads // plan.index_heads]
            scale = (INDEX_DIM * plan.index_heads) ** -0.5
            query["index_q"] = _heads(latent, shared.sketch @ seen)
            query["index_weights"] = round_bf16(_linear(rows, self._head_weight()) * scale)
        return Query(**query)

    def _norm(self, x: Tensor) -> Tensor:
        return round_bf16(rms_norm(x, None, self.plan.eps, torch.float32))

    def _query_weight(self, shared: _Shared) -> Tensor:
        """bf16 [H, 512, rank]: the keys' own projection, seen through the latent with emphasis on
        other channels in every head, and a share of noise."""
        emphasis = (HEAD_SPREAD * self._draw(self.plan.heads, 1, self.rank)).exp()
        alike = shared.kv @ shared.q_a.T * emphasis
        alike *= HEAD_DIM**0.5 / alike.norm(dim=(1, 2), keepdim=True)
        noise = self._draw(self.plan.heads, HEAD_DIM, self.rank) / self.rank**0.5
        shares = (1 - OWN_SHARE**2) ** 0.5, OWN_SHARE
        return (self.query_gain * (shares[0] * alike + shares[1] * noise)).bfloat16()

    def _head_weight(self) -> Tensor:
        """f32 [Hi, width]: most head weights come out near 1, some below 0."""
        return self.constant + self._weight(self.plan.index_heads) / 2


def _linear(x: Tensor, weight: Tensor) -> Tensor:
    """f32 x @ weight^T of BF16 values, accumulated in FP32."""
    return x.float() @ weight.bfloat16().float().T


def _heads(latent: Tensor, weight: Tensor) -> Tensor:
    """bf16 [Q, H, dim]: latent [Q, rank] through weight bf16 [H, dim, rank]."""
    return (latent @ weight.flatten(0, 1).T).unflatten(1, weight.shape[:2])
