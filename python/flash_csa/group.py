"""Layers of a model on the cache: what a serving loop calls once per step and once per layer.

    step = Step(cache, batch, pool.block_tables, pool.window_table)     once per batch shape
    step.begin(batch)                                                   once per step
    groups[g].full(layer, step, query, tokens)                          once per layer, in layer
    groups[g].reuse(layer, step, query)                                 order, by its mode
    window_layer(cache, layer, step, query, cos_sin)

Groups hold references only, and a step all buffers that its layers share, so a captured step
replays at any length: update `batch` and the tables in place.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from ._explain import explained
from ._fakes import describe
from .attend import attend
from .batch import Batch
from .cache import Cache
from .compress import compress
from .index import IndexQuery, quantize_query
from .plan import HEAD_DIM, Layer
from .select import Pool, Selection, index_select
from .sizes import default_num_sms, workspace_bytes
from .step import StepSlots, schedule, step_slots
from .store import rope_store

_WORKSPACE_OPS = ("attend", "index_select", "compress")
_KINDS = ("index", "reindex", "attend", "contiguous")  # sections of a ratio, in their order


@dataclass(frozen=True)
class Query:
    """What a layer brings for the rows of a step, before RoPE.

    q: bf16 [R, H, 512], rotated in place. window_kv: bf16 [R, 512]. sink: f32 [H] or None.
    index_q: bf16 [R, Hi, 128] and index_weights: f32 or bf16 [R, Hi], all factors included, where
    the layer has an index query of its own (full and reindex).
    """

    q: torch.Tensor
    window_kv: torch.Tensor
    sink: torch.Tensor | None = None
    index_q: torch.Tensor | None = None
    index_weights: torch.Tensor | None = None


@dataclass(frozen=True)
class Tokens:
    """Compressor inputs of a Full layer for the rows of a step, as `compress` takes them.

    kv, gate: of the main compressor. index_kv, index_gate: of the index compressor (V4 CSA).
    """

    kv: torch.Tensor
    gate: torch.Tensor | None = None
    index_kv: torch.Tensor | None = None
    index_gate: torch.Tensor | None = None


@dataclass(frozen=True)
class Compressor:
    """Weights of a Full layer's compressors.

    norm: f32 [512]. V4.1: key bf16 [128, 512] and key_norm f32 [128] make the index key of the
    latent. V4: bias f32 [ratio, width]; CSA also index_norm f32 [128] and index_bias f32 [4, 256].
    """

    norm: torch.Tensor
    key: torch.Tensor | None = None
    key_norm: torch.Tensor | None = None
    bias: torch.Tensor | None = None
    index_norm: torch.Tensor | None = None
    index_bias: torch.Tensor | None = None


class Step:
    """The rows of a step and all that its layers share; buffers are allocated once per shape.

    Attributes:
        batch: the rows. slots: StepSlots of the rows.
        selection: of the last layer that selected. pool: of the candidate source, or None.
        selected_by, pooled_by: the layers that wrote them in this step; None before.
    """

    @explained()
    def __init__(
        self,
        cache: Cache,
        batch: Batch,
        block_tables: Mapping[int, torch.Tensor],
        window_table: torch.Tensor,
        *,
        window_first: torch.Tensor | None = None,
        entry_first: torch.Tensor | None = None,
        strict: bool = False,
        batch_invariant: bool = False,
        num_sms: int | None = None,
    ) -> None:
        """Buffers for steps of the shape of `batch`.

        Args:
            cache: pages and tails. batch: kept, and overwritten by `begin`.
            block_tables: by ratio, i32 [B, max_pages]. window_table: i32 [B, W].
            window_first, entry_first: of a bounded replay, see `step_slots`.
            strict: visibility `position // ratio`. batch_invariant: see `attend`.
            num_sms: workers of the schedule; default: the device's.
        """
        plan, spec, device = cache.layout.plan, cache.layout.spec, batch.positions.device
        for ratio in plan.ratios:
            table = block_tables.get(ratio)
            if not isinstance(table, torch.Tensor) or table.dim() != 2:
                name, got = f"block_tables[{ratio}]", describe(table)
                raise _error("Step", name, f"int32 [{batch.num_requests}, max_pages]", got)
        rows = batch.num_rows
        self.batch, self.strict, self.batch_invariant = batch, strict, batch_invariant
        self.block_tables = {ratio: block_tables[ratio] for ratio in plan.ratios}
        self.window_table, self.window_first = window_table, window_first
        self.entry_first = entry_first
        self.slots = StepSlots.empty(rows, len(plan.ratios), plan.window, device)
        self.selection = Selection.empty(rows, plan.topk, device)
        self.pool = Pool.empty(rows, plan.pool_blocks, device) if plan.pool_blocks else None
        self.query = IndexQuery.empty(rows, plan.index_heads, spec.index, device)
        self.selected_by: int | None = None
        self.pooled_by: int | None = None
        self._plan, self._spec = plan, spec
        self._ratios = {ratio: number for number, ratio in enumerate(plan.ratios)}
        self._num_sms = default_num_sms(device) if num_sms is None else num_sms
        self._schedule: torch.Tensor | None = None
        self.workspace = torch.zeros(self._workspace_bytes(), dtype=torch.uint8, device=device)

    @explained()
    def begin(self, batch: Batch | None = None) -> "Step":
        """Takes over the rows of `batch`, then finds slots and deals out the work: two launches.

        Without `batch` the rows are those already in `self.batch` (a captured step).
        """
        if batch is not None and batch is not self.batch:
            self.batch.copy_(batch)
        plan, spec, ratios = self._plan, self._spec, self._plan.ratios
        step_slots(
            self.batch,
            list(self.block_tables.values()),
            self.window_table,
            ratios=ratios,
            page_sizes=[spec.page_sizes[ratio] for ratio in ratios],
            window_page_size=spec.window_page_size,
            window=plan.window,
            strict=self.strict,
            window_first=self.window_first,
            entry_first=self.entry_first,
            out=self.slots,
        )
        self._schedule = schedule(
            self.batch,
            ratios=ratios,
            max_entries=[self._max_entries(ratio) for ratio in ratios],
            k=plan.topk,
            heads=plan.heads,
            index_heads=plan.index_heads,
            window=plan.window,
            window_first=self.window_first,
            pool_blocks=plan.pool_blocks,
            pool_ratio=plan.pool_ratio,
            contiguous_ratios=plan.contiguous_ratios,
            strict=self.strict,
            batch_invariant=self.batch_invariant,
            num_sms=self._num_sms,
            out=self._schedule,
        )
        self.selected_by = self.pooled_by = None
        return self

    def n_vis(self, ratio: int) -> torch.Tensor:
        """i32 [R], entries that each row sees at the ratio."""
        return self.slots.n_vis[self._number(ratio)]

    def entry_slots(self, ratio: int) -> torch.Tensor:
        """i32 [R], slot of the entry that each row closes at the ratio, else -1."""
        return self.slots.entry_slots[self._number(ratio)]

    def stored_entries(self, ratio: int) -> torch.Tensor | None:
        """i32 [B], the ratio's row of `entry_first`."""
        number = self._number(ratio)
        return None if self.entry_first is None else self.entry_first[number]

    def section(self, ratio: int, kind: str) -> torch.Tensor:
        """The schedule of one kind of work: window, index, reindex, attend or contiguous."""
        if self._schedule is None:
            raise ValueError("flash_csa.Step: step must have begun (Step.begin), got a new one")
        if kind == "window":
            return self._schedule[0]
        if kind not in _KINDS:
            raise _error("Step", "kind", f"one of {', '.join(('window', *_KINDS))}", kind)
        return self._schedule[1 + 4 * self._number(ratio) + _KINDS.index(kind)]

    def _number(self, ratio: int) -> int:
        if ratio not in self._ratios:
            raise _error("Step", "ratio", f"one of {list(self._ratios)}", ratio)
        return self._ratios[ratio]

    def _max_entries(self, ratio: int) -> int:
        return self.block_tables[ratio].shape[1] * self._spec.page_sizes[ratio]

    def _workspace_bytes(self) -> int:
        plan = self._plan
        return max(
            workspace_bytes(
                op,
                max_rows=self.batch.num_rows,
                heads=plan.heads,
                k=plan.topk,
                max_entries=max((self._max_entries(r) for r in plan.ratios), default=0),
                pool_blocks=plan.pool_blocks,
                num_sms=self._num_sms,
            )
            for op in _WORKSPACE_OPS
        )


class Group:
    """A Full layer and the Reindex and Reuse layers that read its records.

    Holds references: the group's pages and tails, the layers' windows, weights, rotation table.
    """

    @explained()
    def __init__(
        self, cache: Cache, index: int, *, cos_sin: torch.Tensor, compressor: Compressor
    ) -> None:
        """`index`: number of the group in the plan. `cos_sin`: f32 [max_pos, 64], theta 160000
        with YaRN, shared by all groups."""
        self.cache = cache
        self.plan = cache.layout.plan
        groups = len(self.plan.groups)
        if not 0 <= index < groups:
            raise ValueError(f"flash_csa.Group: index must be in [0, {groups - 1}], got {index}")
        self.group = self.plan.groups[index]
        self.pages = cache.groups[index]
        self.tails = cache.tails[index]
        self.cos_sin = cos_sin
        self.compressor = compressor

    @explained()
    def full(
        self,
        layer: int,
        step: Step,
        query: Query,
        tokens: Tokens | None = None,
        *,
        out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Compresses the rows, selects among all visible entries and attends.

        A candidate source also writes the step's pool. A contiguous group selects nothing.

        Args:
            layer: the group's source. step: begun. query: of this layer.
            tokens: compressor inputs; None where the rows' entries are stored already.
            out: bf16 or f32 [R, H, 512], lse: f32 [R, H]; default: a new bf16 output, no lse.

        Returns:
            The attention output after inverse RoPE, ready for the output projection.

        Raises:
            ValueError: the layer has another mode or group, or an op refuses an argument. The ops
                before that one have run: records, tails, window and q may be written.
        """
        planned = self._layer("full", layer)
        if tokens is not None:
            self.compress(step, tokens)
        if self.group.indexed:
            self._select(planned, step, query)
        return self._attend(planned, step, query, out, lse)

    @explained()
    def reindex(
        self,
        layer: int,
        step: Step,
        query: Query,
        *,
        out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Replaces the step's selection by one inside the pool, and attends. Writes no record.

        Arguments and result as of `full`.

        Raises:
            ValueError: as `full`; the step holds no pool of this group.
        """
        planned = self._layer("reindex", layer)
        if planned.reads_pool and step.pooled_by != planned.kv_source:
            raise ValueError(
                f"flash_csa.Group.reindex: layer {layer} needs the pool of layer "
                f"{planned.kv_source}, the step holds that of layer {step.pooled_by}"
            )
        self._select(planned, step, query)
        return self._attend(planned, step, query, out, lse)

    @explained()
    def reuse(
        self,
        layer: int,
        step: Step,
        query: Query,
        *,
        out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attends with the step's selection as it is: no scoring, no copy.

        Arguments and result as of `full`.

        Raises:
            ValueError: as `full`; the step holds another layer's selection.
        """
        return self._attend(self._layer("reuse", layer), step, query, out, lse)

    @explained()
    def compress(self, step: Step, tokens: Tokens) -> None:
        """Writes the records of the entries that the rows close, and the tails.

        `full` does this; alone it serves rows without queries, such as all but the last tokens of
        a prompt at the decoder's source.
        """
        group, weights, plan = self.group, self.compressor, self.plan
        common = {
            "ratio": group.ratio,
            "eps": plan.eps,
            "cos_sin": self.cos_sin,
            "entry_first": step.stored_entries(group.ratio),
            "rotate": plan.rotate,
            "workspace": step.workspace,
        }
        slots = step.entry_slots(group.ratio)
        own_keys = group.index_width > 0
        compress(
            tokens.kv,
            step.batch,
            slots,
            norm_weight=weights.norm,
            gate=tokens.gate,
            bias=weights.bias,
            tail=self.tails.main,
            main=self.pages.main,
            index=None if own_keys else self.pages.index,
            key_weight=weights.key,
            key_norm_weight=weights.key_norm,
            **common,
        )
        if own_keys:
            compress(
                tokens.index_kv,
                step.batch,
                slots,
                norm_weight=weights.index_norm,
                gate=tokens.index_gate,
                bias=weights.index_bias,
                tail=self.tails.index,
                index=self.pages.index,
                **common,
            )

    def _layer(self, mode: str, layer: int) -> Layer:
        fitting = [i for i in self.group.layers if self.plan.layers[i].mode == mode]
        if layer not in fitting:
            raise ValueError(f"flash_csa.Group.{mode}: layer must be one of {fitting}, got {layer}")
        return self.plan.layers[layer]

    def _select(self, layer: Layer, step: Step, query: Query) -> None:
        """Writes the step's selection, and its pool at the candidate source."""
        plan = self.plan
        quantised = quantize_query(
            query.index_q,
            step.batch.positions,
            self.cos_sin,
            record=self.pages.index.record,
            rotate=plan.rotate,
            out=step.query,
        )
        index_select(
            quantised,
            self.pages.index,
            query.index_weights,
            step.batch,
            step.block_tables[layer.ratio],
            step.section(layer.ratio, "reindex" if layer.reads_pool else "index"),
            plan.topk,
            ratio=layer.ratio,
            strict=step.strict,
            pool=step.pool if layer.reads_pool else None,
            pool_blocks=plan.pool_blocks if layer.builds_pool else 0,
            workspace=step.workspace,
            out=(step.selection, step.pool if layer.builds_pool else None),
        )
        step.selected_by = layer.index
        if layer.builds_pool:
            step.pooled_by = layer.index

    def _attend(
        self,
        layer: Layer,
        step: Step,
        query: Query,
        out: torch.Tensor | None,
        lse: torch.Tensor | None,
    ) -> torch.Tensor:
        if step.selected_by != layer.index_source and not layer.contiguous:
            raise ValueError(
                f"flash_csa.Group.{layer.mode}: layer {layer.index} needs the selection of layer "
                f"{layer.index_source}, the step holds that of layer {step.selected_by}"
            )
        table, requests = step.block_tables[layer.ratio], step.batch.row_request
        contiguous = (table, requests, step.n_vis(layer.ratio)) if layer.contiguous else None
        return _attend_layer(
            self.cache,
            layer,
            step,
            query,
            self.cos_sin,
            step.section(layer.ratio, "contiguous" if layer.contiguous else "attend"),
            main=self.pages.main,
            selection=None if layer.contiguous else step.selection,
            contiguous=contiguous,
            out=out,
            lse=lse,
        )


@explained()
def window_layer(
    cache: Cache,
    layer: int,
    step: Step,
    query: Query,
    cos_sin: torch.Tensor,
    *,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
) -> torch.Tensor:
    """A layer of ratio 0: stores its window records and attends to the window alone.

    Arguments and result as of `Group.full`; cos_sin: theta 10000 without YaRN.

    Raises:
        ValueError: the layer has a compressor, or an op refuses an argument.
    """
    planned = _planned("window_layer", cache, layer)
    if planned.mode != "window":
        raise ValueError(
            f"flash_csa.window_layer: layer must be of mode window, got {layer} ({planned.mode})"
        )
    section = step.section(0, "window")
    return _attend_layer(cache, planned, step, query, cos_sin, section, out=out, lse=lse)


@explained()
def store_window(
    cache: Cache, layer: int, step: Step, window_kv: torch.Tensor, cos_sin: torch.Tensor
) -> None:
    """Stores a layer's window records of rows without queries: window_kv bf16 [R, 512]."""
    _planned("store_window", cache, layer)
    no_heads = window_kv.new_empty(len(window_kv), 0, HEAD_DIM)
    _rope_store(cache, layer, step, no_heads, window_kv, cos_sin)


def _error(owner: str, name: str, expected: str, got: object) -> ValueError:
    return ValueError(f"flash_csa.{owner}: {name} must be {expected}, got {got}")


def _planned(function: str, cache: Cache, layer: int) -> Layer:
    layers = cache.layout.plan.layers
    if not 0 <= layer < len(layers):
        most = len(layers) - 1
        raise ValueError(f"flash_csa.{function}: layer must be in [0, {most}], got {layer}")
    return layers[layer]


def _rope_store(
    cache: Cache,
    layer: int,
    step: Step,
    q: torch.Tensor,
    window_kv: torch.Tensor,
    cos_sin: torch.Tensor,
) -> None:
    rope_store(
        q,
        window_kv,
        cache.window[layer],
        step.slots.window_store,
        step.batch.positions,
        cos_sin,
        q_norm_eps=cache.layout.plan.q_norm_eps,
    )


def _attend_layer(
    cache: Cache,
    layer: Layer,
    step: Step,
    query: Query,
    cos_sin: torch.Tensor,
    section: torch.Tensor,
    **lists,
) -> torch.Tensor:
    """Rotates q, stores the rows' window records, then attends to window and main records."""
    _rope_store(cache, layer.index, step, query.q, query.window_kv, cos_sin)
    return attend(
        query.q,
        window_pages=cache.window[layer.index],
        window=step.slots.lists,
        sink=query.sink,
        derotate=(step.batch.positions, cos_sin),
        batch_invariant=step.batch_invariant,
        schedule=section,
        workspace=step.workspace,
        **lists,
    )
