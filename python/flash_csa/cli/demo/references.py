"""How far the results are from two references, on some of the rows.

Quantised: every stage in FP64 on exactly what the cache holds. Selections must be equal, outputs
within the bounds of the attention kernel. Unquantised: FP32 from the same projections, nothing
rounded in between, with selections of its own; it shows what FP4 and FP8 cost.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ...group import Query
from ...plan import ROPE_DIMS, GroupPlan, Layer
from ...reference import attend as core
from ...reference import index as indexer
from ...reference import select as selector
from ...reference.compress import Compressor, csa2_entries, hadamard, rms_norm, v4_index_keys
from ...reference.quant import dequantize, quantize, round_bf16
from ...reference.rope import derotate, rotate
from ...reference.step import visible_entries, window_lists
from .compare import entries, window
from .passes import Pass

F32 = torch.float32


def role_of(layer: Layer) -> str:
    """The layer's mode; that of a Full layer without an index is "contiguous" (HCA)."""
    return "contiguous" if layer.contiguous else layer.mode


@dataclass(frozen=True)
class LayerErrors:
    """Of the checked rows of one layer; a relative error is that of a row's whole output.

    rounding: relative error against the quantised reference, the worst row.
    of_bound: largest part of its allowed error that an element uses.
    wrong: rows whose selection or pool is not that of the quantised reference.
    quantisation: relative error against the unquantised reference, mean of the rows.
    shared: part of the selection that the unquantised reference selects too.
    kept: part of the attention over everything visible that falls on window and selection, in
        the unquantised reference.
    """

    layer: int
    mode: str
    rounding: float
    of_bound: float
    wrong: int
    quantisation: float
    shared: float | None
    kept: float | None


@dataclass
class _Reference:
    """State of one reference: the records it reads, and what the last source layers chose."""

    main: Tensor | None = None  # f32 [N, 512], by position
    selection: selector.Selection | None = None
    pool: selector.Pool | None = None

    def choose(self, layer: Layer, scores: Tensor, n_vis: Tensor, k: int, blocks: int) -> None:
        pool = self.pool if layer.reads_pool else None
        self.selection = selector.select(scores, n_vis, k, pool)
        if layer.builds_pool:
            self.pool = selector.build_pool(scores, n_vis, blocks)


class References:
    """Both references of some rows of a pass; `rows` are numbers within the query rows."""

    def __init__(self, run: Pass, rows: list[int]) -> None:
        self.run, self.plan, self.inputs = run, run.plan, run.inputs
        self.rows = torch.tensor(rows)
        self.positions = self.inputs.first_query + self.rows
        self.held, self.exact = _Reference(), _Reference()

    def layers(self, advance: Callable[[], None] = lambda: None) -> list[LayerErrors]:
        """All layers, in order: consumers read what sources chose. `advance` after each."""
        found = []
        for layer in self.plan.layers:
            if layer.mode == "full":
                self._enter(self.plan.groups[layer.group])
            found.append(self._layer(layer))
            advance()
        return found

    def identical_records(self) -> dict[str, Tensor]:
        """bool [N] of each kind: records that the reference compressor makes byte for byte.

        It sums in FP64: another order of summation moves a few values across a rounding border.
        """
        same: dict[str, list[Tensor]] = {"main": [], "index": []}
        for group in self.plan.groups:
            for kind, rows in self._made(group).items():
                pages = getattr(self.run.cache.groups[group.index], kind)
                pairs = zip(
                    quantize(rows, pages.record),
                    entries(self.run, group.index, kind),
                    strict=True,
                )
                data, scales = ((a == b).all(1) for a, b in pairs)
                same[kind].append(data & scales)
        return {kind: torch.cat(rows) for kind, rows in same.items() if rows}

    def _made(self, group: GroupPlan) -> dict[str, Tensor]:
        """The group's main rows and index keys as the reference compressor makes them."""
        source, table = self.inputs.sources[group.index], self.run.cos_sin["compressed"]
        tokens, weights = source.tokens, source.compressor
        key = weights.key, weights.key_norm
        made = csa2_entries(self._compressor(group), tokens.kv, tokens.gate, table, *key)
        keys = made.keys
        if group.index_width:
            compressor = self._index_compressor(group)
            keys = v4_index_keys(compressor, tokens.index_kv, tokens.index_gate, table)
        elif group.indexed and self.plan.rotate:
            keys = hadamard(keys)
        return {"main": made.main} | ({"index": keys} if group.indexed else {})

    def _compressor(self, group: GroupPlan, **rounding: torch.dtype) -> Compressor:
        weights = self.inputs.sources[group.index].compressor
        shape = group.ratio, weights.norm, self.plan.eps, weights.bias, group.overlap
        return Compressor(*shape, **rounding)

    def _index_compressor(self, group: GroupPlan, **rounding: torch.dtype) -> Compressor:
        weights = self.inputs.sources[group.index].compressor
        shape = group.ratio, weights.index_norm, self.plan.eps, weights.index_bias, group.overlap
        return Compressor(*shape, **rounding)

    def _enter(self, group: GroupPlan) -> None:
        """Takes the group's records: as the cache holds them, and as they were before rounding."""
        record = self.run.cache.groups[group.index].main.record
        self.held.main = dequantize(*entries(self.run, group.index, "main"), record)
        if group.indexed:
            self.key_bytes = entries(self.run, group.index, "index")

        source, table = self.inputs.sources[group.index], self.run.cos_sin["compressed"]
        compressor = self._compressor(group, border=F32, precision=F32)
        latent = compressor.latent(compressor.pool(source.tokens.kv, source.tokens.gate))
        self.exact.main = compressor.main_rows(latent, table)
        if not group.indexed:
            return
        if group.index_width:
            # Without the Hadamard rotation of queries and keys: it keeps dot products.
            compressor = self._index_compressor(group, border=F32, precision=F32)
            pooled = compressor.pool(source.tokens.index_kv, source.tokens.index_gate)
            keys = compressor.latent(pooled)
        else:
            keys = latent @ source.compressor.key.float().T
            keys = rms_norm(keys, source.compressor.key_norm, self.plan.eps, F32)
        self.exact_keys = rotate(keys, compressor.entry_positions(len(keys)), table)

    def _layer(self, layer: Layer) -> LayerErrors:
        query = self.inputs.queries[layer.index]
        table = self.run.cos_sin["compressed" if layer.ratio else "window"]
        wrong = self._choose(layer, query, table) if layer.scores else 0

        got = torch.cat(self.run.results[layer.index].out)[self.rows].double()
        q = rotate(round_bf16(self._normed(query.q[self.rows])), self.positions, table)
        lists = self._lists(layer, self.held, self._held_window(layer))
        out, _ = core.attend(q, *lists, sink=query.sink)
        bound, _ = core.error_bounds(q, *lists, sink=query.sink)
        # The bounds are those of the output before derotation, which leaves these dims alone.
        kept_dims = (..., slice(0, -ROPE_DIMS))
        of_bound = ((got - out).abs() / bound)[kept_dims].max().item()
        rounding = _relative(got, core.derotated_output(out, self.positions, table)).max().item()

        q = rotate(self._normed(query.q[self.rows]).float(), self.positions, table)
        lists = self._lists(layer, self.exact, self._exact_window(layer, table))
        out, lse = core.attend(q, *lists, sink=query.sink, precision=F32)
        error = _relative(got, derotate(out, self.positions, table)).mean().item()
        selects = layer.index_source is not None
        return LayerErrors(
            layer=layer.index,
            mode=role_of(layer),
            rounding=rounding,
            of_bound=of_bound,
            wrong=wrong,
            quantisation=error,
            shared=self._shared() if selects else None,
            kept=self._kept(layer, q, lists, lse) if selects else None,
        )

    def _normed(self, q: Tensor) -> Tensor:
        """q [T, H, 512] after the per-head norm of the model, if it has one; not yet rounded."""
        eps = self.plan.q_norm_eps
        return q if eps is None else rms_norm(q, None, eps)

    def _choose(self, layer: Layer, query: Query, table: Tensor) -> int:
        """Both references choose; returns the rows where the pass did not choose as `held`."""
        plan = self.plan
        index_q, weights = query.index_q[self.rows], query.index_weights[self.rows]
        n_vis = visible_entries(self.positions, layer.ratio)
        quantised = indexer.quantize_query(
            index_q, self.positions, table, rotate_hadamard=plan.rotate
        )
        scores = indexer.index_scores_exact(quantised, *self.key_bytes, weights)
        self.held.choose(layer, scores, n_vis, plan.topk, plan.pool_blocks)
        rotated = rotate(index_q.float(), self.positions, table)
        scores = indexer.index_scores(rotated, self.exact_keys, weights, F32)
        self.exact.choose(layer, scores, n_vis, plan.topk, plan.pool_blocks)

        results = self.run.results[layer.index]
        wrong = torch.cat(results.selections)[self.rows] != self.held.selection.positions
        if layer.builds_pool:
            pools = torch.cat(results.pools)[self.rows] != self.held.pool.blocks
            wrong = torch.cat([wrong, pools], dim=1)
        return int(wrong.any(1).sum())

    def _lists(
        self, layer: Layer, reference: _Reference, window_rows: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Records and lists of the rows, as `core.attend` takes them."""
        lists, _ = window_lists(self.positions, self.plan.window)
        lists = torch.where(lists >= 0, lists - self._window_span().start, -1)
        if layer.ratio == 0:
            return window_rows, lists.long()
        if layer.contiguous:
            n_vis = visible_entries(self.positions, layer.ratio)
            chosen = core.contiguous_lists(n_vis, len(reference.main))
        else:
            chosen = reference.selection.positions
        return core.join(window_rows, lists, reference.main, chosen)

    def _window_span(self) -> range:
        """Positions that any of the rows has in its window."""
        return range(max(0, int(self.positions[0]) - self.plan.window + 1), self.inputs.tokens)

    def _held_window(self, layer: Layer) -> Tensor:
        record = self.run.cache.window[layer.index].record
        return dequantize(*window(self.run, layer.index, self._window_span()), record)

    def _exact_window(self, layer: Layer, table: Tensor) -> Tensor:
        span = self._window_span()
        rows = self.inputs.window_kv[layer.index][span.start : span.stop].float()
        return rotate(rows, torch.arange(span.start, span.stop), table)

    def _shared(self) -> float:
        """Part of the held selection that the exact one has too."""
        pairs = zip(self.held.selection.positions, self.exact.selection.positions, strict=True)
        parts = [torch.isin(a[a >= 0], b[b >= 0]).float() for a, b in pairs]
        return torch.cat(parts).mean().item()

    def _kept(self, layer: Layer, q: Tensor, lists: tuple[Tensor, Tensor], lse: Tensor) -> float:
        """exp(lse of what the rows read - lse of window and everything visible), mean."""
        n_vis = visible_entries(self.positions, layer.ratio)
        everything = core.contiguous_lists(n_vis, len(self.exact.main))
        seen = lists[1][:, : self.plan.window]
        records = lists[0][: len(lists[0]) - len(self.exact.main)]
        records, everything = core.join(records, seen, self.exact.main, everything)
        _, whole = core.attend(q, records, everything, precision=F32)
        return (lse - whole).exp().mean().item()


def _relative(got: Tensor, expected: Tensor) -> Tensor:
    """[rows]: norm of the difference over norm of the expected output, all heads together."""
    got, expected = got.double().flatten(1), expected.double().flatten(1)
    return (got - expected).norm(dim=1) / expected.norm(dim=1)
