"""A group of layers on one sequence: the whole pipeline in position space.

    mode     main rows and index keys   own index query            selection
    Full     writes                     over all visible entries   makes it (and perhaps a pool)
    Reindex  reads the group's          inside the group's pool    replaces it
    Reuse    reads the group's          none                       takes it as it is

Formula source: DeepSeek-V4.1 cross-layer sharing (CSA2). DeepSeek-V4 has the same pipeline with
every layer a group of its own; HCA layers attend to all visible entries. Every layer keeps its
own q, window KV and sink.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from . import attend as core
from .compress import Entries, rms_norm
from .index import dequantize_query, index_scores, quantize_query
from .quant import quantize_dequantize, round_bf16
from .rope import rotate
from .select import BLOCK, Pool, Selection, build_pool, select
from .step import visible_entries, window_lists


@dataclass(frozen=True)
class Layer:
    """What one layer brings of its own for tokens first .. first + T - 1, before RoPE.

    q bf16[T, H, 512]; window_kv bf16[T, 512]; sink f32[H]; index_q bf16[T, Hi, 128] and
    index_weights [T, Hi] where the layer has an index query. `first` > 0 is bounded replay: only
    the last tokens are run again, and their windows begin at `first`.
    """

    q: Tensor
    window_kv: Tensor
    sink: Tensor | None = None
    index_q: Tensor | None = None
    index_weights: Tensor | None = None
    first: int = 0

    @property
    def positions(self) -> Tensor:
        """i64[T] positions of the layer's tokens."""
        return torch.arange(self.first, self.first + len(self.q))


@dataclass(frozen=True)
class Model:
    """What all layers of a group agree on. Defaults: V4.1.

    cos_sin f32[max_pos, 64] is the one table of these layers (`rope.cos_sin_table`). V4: records
    "MixedFp8", q_norm_eps 1e-6 (per-head norm of q without weight), hadamard True.
    """

    cos_sin: Tensor
    window: int = 128
    main_record: str = "MainFp4"
    window_record: str = "WindowFp8"
    index_record: str = "IndexFp4"
    q_norm_eps: float | None = None
    hadamard: bool = False
    strict: bool = False


class Output(NamedTuple):
    """Of one layer: `out` bf16[T, H, 512], derotated, ready for the output projection; `lse`
    f64[T, H]; what the layers above may read."""

    out: Tensor
    lse: Tensor
    selection: Selection | None = None
    pool: Pool | None = None


def rotated_query(q: Tensor, positions: Tensor, model: Model) -> Tensor:
    """q bf16[T, H, 512] as attention reads it: (V4: per-head norm -> BF16) -> RoPE -> BF16."""
    if model.q_norm_eps is not None:
        q = round_bf16(rms_norm(q, None, model.q_norm_eps))
    return rotate(q, positions, model.cos_sin)


def attend_layer(layer: Layer, model: Model, main: Tensor, main_lists: Tensor) -> Output:
    """Window records of the layer, and `main` f32[N, 512] at `main_lists` i[T, K]."""
    positions = layer.positions
    window = rotate(layer.window_kv, positions, model.cos_sin)
    window = quantize_dequantize(window, model.window_record)
    lists, _ = window_lists(positions, model.window, layer.first)
    lists = torch.where(lists >= 0, lists - layer.first, -1)
    records, lists = core.join(window, lists, main, main_lists)
    q = rotated_query(layer.q, positions, model)
    out, lse = core.attend(q, records, lists, sink=layer.sink)
    return Output(core.derotated_output(out, positions, model.cos_sin), lse)


def window_layer(layer: Layer, model: Model) -> Output:
    """A layer without a compressor (ratio 0): the window alone."""
    nothing = torch.empty(len(layer.q), 0, dtype=torch.int64)
    return attend_layer(layer, model, layer.window_kv[:0].float(), nothing)


def hca_layer(layer: Layer, model: Model, entries: Entries, ratio: int) -> Output:
    """V4 HCA: the window and every visible entry."""
    main = quantize_dequantize(entries.main, model.main_record)
    n_vis = visible_entries(layer.positions, ratio, model.strict)
    return attend_layer(layer, model, main, core.contiguous_lists(n_vis, len(main)))


class Group:
    """Entries shared by a Full layer and the Reindex and Reuse layers above it."""

    def __init__(self, model: Model, entries: Entries, ratio: int, k: int) -> None:
        """`entries`: unquantised, of the whole sequence; `k`: entries a query may select."""
        self.model, self.ratio, self.k = model, ratio, k
        self.main = quantize_dequantize(entries.main, model.main_record)
        self.keys = quantize_dequantize(entries.keys, model.index_record)

    def scores(self, layer: Layer) -> tuple[Tensor, Tensor]:
        """Index scores f32[T, N] of every entry, seen or not, and n_vis i64[T]."""
        model, positions = self.model, layer.positions
        query = quantize_query(
            layer.index_q, positions, model.cos_sin, model.index_record, model.hadamard
        )
        scores = index_scores(dequantize_query(query), self.keys, layer.index_weights)
        return scores, visible_entries(positions, self.ratio, model.strict)

    def full(self, layer: Layer, pool_blocks: int = 0, block: int = BLOCK) -> Output:
        """Selects among all visible entries; with `pool_blocks` also makes the pool."""
        scores, n_vis = self.scores(layer)
        pool = build_pool(scores, n_vis, pool_blocks, block) if pool_blocks else None
        return self.reuse(layer, select(scores, n_vis, self.k))._replace(pool=pool)

    def reindex(self, layer: Layer, pool: Pool, block: int = BLOCK) -> Output:
        """Selects again, with the layer's own query, inside the pool of the same tokens."""
        scores, n_vis = self.scores(layer)
        return self.reuse(layer, select(scores, n_vis, self.k, pool, block))

    def reuse(self, layer: Layer, selection: Selection) -> Output:
        """Attends with a selection made by a layer below."""
        output = attend_layer(layer, self.model, self.main, selection.positions)
        return output._replace(selection=selection)
