"""LayerPlan: what every layer of a model computes, writes and reads.

A group is one Full layer, which writes main and index records, and the later layers that read
them. A layer's mode is model configuration and never changes at run time:

    window   ratio 0: attends to its window only
    full     writes the group's records; scores every visible entry and writes the selection
             (a candidate source also writes the pool)
    reindex  reads the group's records; scores inside the pool (every visible entry where the
             group has no candidate source) and replaces the selection
    reuse    reads records and selection as they are

A Full layer without an index (V4 ratio 128) has no selection: it attends to all visible entries.
"""

import json
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from . import _C
from ._explain import explained
from .configs import BY_NAME

HEAD_DIM: int = _C.HEAD_DIM  # K = V, one vector
ROPE_DIMS: int = _C.ROPE_DIMS  # the last dims of a main, window or index vector
INDEX_DIM: int = _C.INDEX_DIM
POOL_BLOCK: int = _C.POOL_BLOCK  # positions of a candidate block
CONTIGUOUS_RATIO = 128  # at this ratio a layer may attend to every entry instead of selecting
RATIOS = (0, 1, 2, 4, CONTIGUOUS_RATIO)

# What the kernels and the rotation table are made for.
_FIXED = {
    "head_dim": HEAD_DIM,
    "qk_rope_head_dim": ROPE_DIMS,
    "index_head_dim": INDEX_DIM,
    "num_key_value_heads": 1,
    "compress_rope_theta": 160000,
}
_FIXED_YARN = {
    "factor": 16,
    "original_max_position_embeddings": 65536,
    "beta_fast": 32,
    "beta_slow": 1,
}

Mode = Literal["window", "full", "reindex", "reuse"]


@dataclass(frozen=True)
class Layer:
    """One layer. Sources are layer ids; a window layer has none, a contiguous one no index."""

    index: int
    mode: Mode
    ratio: int
    group: int | None = None
    kv_source: int | None = None
    index_source: int | None = None
    builds_pool: bool = False
    reads_pool: bool = False

    @property
    def contiguous(self) -> bool:
        """Attends to all visible entries of its group."""
        return self.kv_source is not None and self.index_source is None

    @property
    def scores(self) -> bool:
        """Has an index query of its own and writes a selection."""
        return self.index == self.index_source


@dataclass(frozen=True)
class GroupPlan:
    """A Full layer and the layers that read its records, in layer order."""

    index: int
    ratio: int
    layers: tuple[int, ...]
    indexed: bool
    overlap: bool  # ratio 4 of V4: an entry pools its own group of tokens and the one before

    @property
    def source(self) -> int:
        """The Full layer."""
        return self.layers[0]

    @property
    def span(self) -> int:
        """Tokens that one entry pools, hence rows that a tail must hold."""
        return 2 * self.ratio if self.overlap else self.ratio

    @property
    def main_width(self) -> int:
        """Columns of the kv and of the gate projection."""
        return 2 * HEAD_DIM if self.overlap else HEAD_DIM

    @property
    def index_width(self) -> int:
        """Columns of the index compressor's projections; 0 where keys come from the latent."""
        return 2 * INDEX_DIM if self.overlap and self.indexed else 0


@dataclass(frozen=True)
class LayerPlan:
    """The attention side of a model, layer by layer. Head counts are those of this shard."""

    family: Literal["v4", "v41"]
    layers: tuple[Layer, ...]
    groups: tuple[GroupPlan, ...]
    hidden: int
    heads: int
    q_lora_rank: int
    o_groups: int
    o_lora_rank: int
    index_heads: int
    topk: int
    pool_blocks: int  # blocks of 8 positions that a candidate source keeps; 0: no pool
    window: int
    eps: float
    theta: float
    compressed_theta: float
    max_positions: int

    @classmethod
    @explained()
    def from_config(
        cls, config: Mapping[str, Any] | str | os.PathLike, *, heads: int | None = None
    ) -> "LayerPlan":
        """The plan of a published configuration.

        Args:
            config: one of `flash_csa.configs`, its name ("v41-flash", "v4-flash", "v4-pro"), a
                mapping with the same fields, or the path of a config.json. Entries of
                `compress_ratios` after the last layer belong to draft layers and are ignored.
            heads: query heads of this tensor-parallel shard; default: all of the model's. Index
                heads are not split: every rank needs the same selection.

        Raises:
            ValueError: one line naming the field, for a missing field, an unsupported ratio or
                head dim, or source ids that no layer could read.
        """
        fields = _Fields(_load(config))
        family = fields.family()
        ratios = fields.ratios(family)
        layers, groups = _assign(fields, ratios, family)
        pooled = any(layer.builds_pool for layer in layers)
        for field, value in _FIXED.items():
            fields.fixed(field, value)
        scaling = _Fields(fields.mapping("rope_scaling"), "rope_scaling.")
        for field, value in _FIXED_YARN.items():
            scaling.fixed(field, value)
        if pooled:
            fields.fixed("candidate_block_size", POOL_BLOCK)
        if heads is not None and (not _is_int(heads) or heads < 1):
            raise _error("heads", "a positive integer", heads)
        return cls(
            family=family,
            layers=layers,
            groups=groups,
            hidden=fields.count("hidden_size"),
            heads=heads or fields.count("num_attention_heads"),
            q_lora_rank=fields.count("q_lora_rank"),
            o_groups=fields.count("o_groups"),
            o_lora_rank=fields.count("o_lora_rank"),
            index_heads=fields.count("index_n_heads"),
            topk=fields.count("index_topk"),
            pool_blocks=fields.count("candidate_topk_blocks") if pooled else 0,
            window=fields.count("sliding_window"),
            eps=fields.number("rms_norm_eps"),
            theta=fields.number("rope_theta"),
            compressed_theta=fields.number("compress_rope_theta"),
            max_positions=fields.count("max_position_embeddings"),
        )

    @property
    def ratios(self) -> tuple[int, ...]:
        """The ratios with a block table, ascending: `ratios` of `step_slots` and `schedule`."""
        return tuple(sorted({group.ratio for group in self.groups}))

    @property
    def contiguous_ratios(self) -> tuple[int, ...]:
        """The ratios of groups without an index."""
        return tuple(sorted({group.ratio for group in self.groups if not group.indexed}))

    @property
    def pool_ratio(self) -> int:
        """The candidate source's ratio; 0 without a pool."""
        return next((layer.ratio for layer in self.layers if layer.builds_pool), 0)

    @property
    def q_norm_eps(self) -> float | None:
        """Epsilon of the per-head query norm; None where the model has none."""
        return self.eps if self.family == "v4" else None

    @property
    def rotate(self) -> bool:
        """Index queries and keys pass a Hadamard rotation."""
        return self.family == "v4"


def _assign(
    fields: "_Fields", ratios: list[int], family: str
) -> tuple[tuple[Layer, ...], tuple[GroupPlan, ...]]:
    """Modes, sources and groups. A consumer reads the nearest source at or below it."""
    kv_sources = fields.sources("kv_source_layer_ids", ratios, family)
    index_sources = fields.sources("index_source_layer_ids", ratios, family)
    candidate = fields.candidate(kv_sources, index_sources)
    layers: list[Layer] = []
    members: dict[int, list[int]] = {source: [] for source in kv_sources}
    for index, ratio in enumerate(ratios):
        if ratio == 0:
            layers.append(Layer(index, "window", 0))
            continue
        kv_source = max((s for s in kv_sources if s <= index), default=None)
        if kv_source is None or ratios[kv_source] != ratio:
            found = "none" if kv_source is None else f"layer {kv_source}"
            raise _error(
                "kv_source_layer_ids", f"a source of ratio {ratio} for layer {index}", found
            )
        members[kv_source].append(index)
        indexed = kv_source in index_sources
        if not indexed and (ratio != CONTIGUOUS_RATIO or index in index_sources):
            raise _error(
                "index_source_layer_ids",
                f"a list with KV source {kv_source}, whose index keys layer {index} needs",
                list(index_sources),
            )
        # The KV source bounds the search: a selection of an older group addresses other records.
        index_source = max((s for s in index_sources if kv_source <= s <= index), default=None)
        mode: Mode = "full" if index == kv_source else "reuse"
        if mode == "reuse" and index == index_source:
            mode = "reindex"
        layers.append(
            Layer(
                index,
                mode,
                ratio,
                group=len([s for s in kv_sources if s < kv_source]),
                kv_source=kv_source,
                index_source=index_source,
                builds_pool=index == candidate,
                reads_pool=mode == "reindex" and kv_source == candidate,
            )
        )
    groups = tuple(
        GroupPlan(
            index=number,
            ratio=ratios[source],
            layers=tuple(members[source]),
            indexed=source in index_sources,
            overlap=family == "v4" and ratios[source] == 4,
        )
        for number, source in enumerate(kv_sources)
    )
    return tuple(layers), groups


class _Fields:
    """Checked access to the fields of a configuration."""

    def __init__(self, config: Mapping[str, Any], prefix: str = "") -> None:
        self._config = config
        self._prefix = prefix

    def get(self, field: str) -> Any:
        if self._config.get(field) is None:
            raise ValueError(f"flash_csa.LayerPlan: {self._prefix}{field} is missing")
        return self._config[field]

    def number(self, field: str) -> float:
        value = self.get(field)
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not number or not 0 < value <= sys.float_info.max:
            raise _error(self._prefix + field, "a positive number", value)
        return float(value)

    def count(self, field: str) -> int:
        value = self.get(field)
        if not _is_int(value) or value < 1:
            raise _error(self._prefix + field, "a positive integer", value)
        return value

    def fixed(self, field: str, expected: int) -> None:
        if self.get(field) != expected:
            raise _error(self._prefix + field, expected, self.get(field))

    def mapping(self, field: str) -> Mapping[str, Any]:
        value = self.get(field)
        if not isinstance(value, Mapping):
            raise _error(field, "a mapping", value)
        return value

    def family(self) -> Literal["v4", "v41"]:
        named = {"deepseek_v4": "v4", "deepseek_v41": "v41"}
        shares = self._config.get("kv_source_layer_ids") is not None
        model = self._config.get("model_type")
        if model is not None and not isinstance(model, str):
            raise _error("model_type", "a string", model)
        return named.get(model, "v41" if shares else "v4")

    def ratios(self, family: str) -> list[int]:
        """Of every layer. Ratio 4 overlaps, which V4.1's compressor does not."""
        supported = [ratio for ratio in RATIOS if family == "v4" or ratio != 4]
        layers = self.count("num_hidden_layers")
        ratios = self.get("compress_ratios")
        if not isinstance(ratios, list | tuple) or len(ratios) < layers:
            got = f"{len(ratios)} entries" if isinstance(ratios, list | tuple) else ratios
            raise _error("compress_ratios", f"a list of at least {layers} entries", got)
        for index, ratio in enumerate(ratios[:layers]):
            if not _is_int(ratio) or ratio not in supported:
                expected = f"one of {supported} in a model of family {family}"
                raise _error(f"compress_ratios[{index}]", expected, ratio)
        return list(ratios[:layers])

    def sources(self, field: str, ratios: list[int], family: str) -> tuple[int, ...]:
        """Source layer ids; in V4 every compressed layer is one, with an index below ratio 128."""
        if family == "v4" and self._config.get(field) is None:
            index = field == "index_source_layer_ids"
            return tuple(
                layer
                for layer, ratio in enumerate(ratios)
                if ratio and not (index and ratio == CONTIGUOUS_RATIO)
            )
        ids = self.get(field)
        if (
            not isinstance(ids, list | tuple)
            or not all(_is_int(layer) and 0 <= layer < len(ratios) for layer in ids)
            or list(ids) != sorted(set(ids))
        ):
            raise _error(field, f"ascending layer ids below {len(ratios)}", ids)
        for layer in ids:
            if ratios[layer] == 0:
                raise _error(field, "layers of ratio > 0", f"layer {layer} of ratio 0")
        return tuple(ids)

    def candidate(self, kv_sources: tuple[int, ...], index_sources: tuple[int, ...]) -> int | None:
        """The layer that builds the pool: it must score every visible entry."""
        layer = self._config.get("candidate_source_layer_id")
        if layer is not None and (layer not in kv_sources or layer not in index_sources):
            raise _error("candidate_source_layer_id", "a KV source and an index source", layer)
        return layer


def _load(config: Mapping[str, Any] | str | os.PathLike) -> Mapping[str, Any]:
    if isinstance(config, Mapping):
        return config
    if config in BY_NAME:
        return BY_NAME[config]
    try:
        with open(config, encoding="utf-8") as file:
            loaded = json.load(file)
    except (OSError, ValueError, RecursionError) as error:
        expected = f"one of {', '.join(BY_NAME)} or a readable config.json"
        raise _error("config", expected, f"{config} ({error})") from error
    if not isinstance(loaded, dict):
        raise _error(str(config), "a JSON object", type(loaded).__name__)
    return loaded


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _error(field: str, expected: Any, got: Any) -> ValueError:
    return ValueError(f"flash_csa.LayerPlan: {field} must be {expected}, got {got}")
