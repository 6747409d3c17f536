"""What every experiment starts from: one layer group on one sequence, before RoPE and rounding.

Tokens bring compressor inputs and window vectors, and some rows bring queries, layer by layer.
`Shape` says how many; `layer_modes` which layer of the group does what.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from ..plan import HEAD_DIM, INDEX_DIM, ROPE_DIMS
from ..reference.compress import Compressor, Entries, csa2_entries, rms_norm
from ..reference.quant import round_bf16

EPS = 1e-6
REINDEX_EVERY = 4  # layers of a group, as in V4.1-Flash: 20 Full, then 24, 28, 32, 36 Reindex
FP32 = torch.float32
BUCKETS = 4  # of query positions
FIRST_QUERY = 4  # queries lie in the last 3/4 of the context


@dataclass(frozen=True)
class Shape:
    """Sizes of a drawn group. `rows`: query rows. `drift`: share of a layer's queries that is
    new, 0 to 1: layer l + 1 = sqrt(1 - drift^2) * layer l + drift * fresh."""

    layers: int = 8
    heads: int = 16
    index_heads: int = 32
    rows: int = 64
    drift: float = 0.3


@dataclass(frozen=True)
class Queries:
    """One layer, for the query rows.

    q bf16 [Q, H, 512]; index_q bf16 [Q, Hi, 128]; index_weights f32 [Q, Hi]; sink f32 [H].
    """

    q: Tensor
    index_q: Tensor
    index_weights: Tensor
    sink: Tensor


@dataclass(frozen=True)
class Evidence:
    """What was planted, row by row; Q rows, M needles at most.

    kinds, borders: names. needles, decoys: i64 [Q, M] tokens, -1 none. answers: i64 [Q, M] rows of
    `codes` f32 [n, dims], which the needles carry in the dims from `first_dim` on.
    """

    kinds: tuple[str, ...]
    borders: tuple[str, ...]
    needles: Tensor
    decoys: Tensor
    answers: Tensor
    codes: Tensor
    first_dim: int


@dataclass(frozen=True)
class Activations:
    """A group's inputs. T tokens, Q query rows at `positions` i64 [Q], ascending.

    kv f32 [T, 512] and gate f32 [T, 512] enter the compressor; window_kv bf16 [T, 512];
    norm_weight f32 [512]; key_weight bf16 [128, 512]; key_norm_weight f32 [128].
    origin: one line for people. modes: of the layers, see `layer_modes`.
    """

    name: str
    origin: str
    positions: Tensor
    kv: Tensor
    gate: Tensor
    window_kv: Tensor
    norm_weight: Tensor
    key_weight: Tensor
    key_norm_weight: Tensor
    layers: tuple[Queries, ...]
    modes: tuple[str, ...]
    evidence: Evidence | None = None

    @property
    def tokens(self) -> int:
        return len(self.kv)

    @property
    def device(self) -> torch.device:
        return self.kv.device

    def compressed(self, ratio: int) -> tuple[Tensor, Tensor | None]:
        """kv and gate as the compressor of the ratio takes them. Ratio 1 has no gate; ratio 4
        overlaps, and here the projection serves a token in both of its roles."""
        if ratio == 1:
            return round_bf16(self.kv), None
        if ratio == 4:
            return torch.cat([self.kv, self.kv], 1), torch.cat([self.gate, self.gate], 1)
        return self.kv, self.gate

    def bias(self, ratio: int) -> Tensor | None:
        """f32 [ratio, width]: what is added to the gate by position within the group; none here."""
        return None

    def entries(self, ratio: int, cos_sin: Tensor) -> Entries:
        """Main rows and index keys bf16 [T // ratio, ...] after RoPE, not yet quantised."""
        kv, gate = self.compressed(ratio)
        overlap = ratio == 4
        compressor = Compressor(
            ratio, self.norm_weight, EPS, self.bias(ratio), overlap=overlap, precision=FP32
        )
        keys = self.key_weight.to(torch.bfloat16), self.key_norm_weight
        return csa2_entries(compressor, kv, gate, cos_sin, *keys)

    def visible(self, ratio: int) -> Tensor:
        """i64 [Q]: entries that each row sees."""
        return (self.positions + 1) // ratio

    def buckets(self) -> list[str]:
        """Of each row, the quarter of the query positions it lies in."""
        first = self.tokens // FIRST_QUERY
        width = max(1, -(-(self.tokens - first) // BUCKETS))
        numbers = ((self.positions - first).clamp(min=0) // width).tolist()
        return [f"{first + n * width}-{first + (n + 1) * width - 1}" for n in numbers]


def layer_modes(layers: int, reindex: int | None = None) -> tuple[str, ...]:
    """Full, then Reuse with a Reindex in every fourth place; or `reindex` of them evenly spread."""
    if reindex is None:
        places = set(range(REINDEX_EVERY, layers, REINDEX_EVERY))
    else:
        places = {layers * (i + 1) // (reindex + 1) for i in range(reindex)}
    return ("full", *("reindex" if n in places else "reuse" for n in range(1, layers)))


def spread_positions(tokens: int, rows: int, random: torch.Generator) -> Tensor:
    """i64 [rows], ascending: one random position in each of `rows` equal parts of the last 3/4."""
    first = tokens // FIRST_QUERY
    rows = min(rows, tokens - first)
    edges = torch.linspace(first, tokens, rows + 1).long()
    inside = torch.rand(rows, generator=random) * (edges[1:] - edges[:-1])
    return edges[:-1] + inside.long()


def normed(x: Tensor) -> Tensor:
    """bf16: RMSNorm without weight."""
    return round_bf16(rms_norm(x, None, EPS, FP32))


def sketch(random: torch.Generator, weight: Tensor | None = None) -> Tensor:
    """f32 [128, 512]: a main vector to an index key. 448 dims to 64 at random, which keeps dot
    products on average; rotated dims as they are. Channels are first divided by `weight`."""
    device = random.device
    kept = INDEX_DIM - ROPE_DIMS
    made = torch.zeros(INDEX_DIM, HEAD_DIM, device=device)
    drawn = torch.randn(kept, HEAD_DIM - ROPE_DIMS, generator=random, device=device)
    made[:kept, :-ROPE_DIMS] = drawn / kept**0.5
    made[kept:, -ROPE_DIMS:] = torch.eye(ROPE_DIMS, device=device)
    return made if weight is None else made / weight
