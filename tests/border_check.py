"""Each layer of a step against the reference, which gets what the library got at that layer: the
pages before it, the queries, the lists. Lists, windows, queries and tails are compared exactly,
records as close as FP32 and FP64 sums are, attention within its bounds."""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

import flash_csa as fc
from compare import assert_same_bytes
from flash_csa.plan import Layer
from flash_csa.reference import attend as ref_attend
from flash_csa.reference import ops as ref
from flash_csa.reference.group import Model, rotated_query

if TYPE_CHECKING:
    from border_case import Stack


def check_slots(stack: "Stack", step: fc.Step) -> None:
    """What the layers of a step share."""
    plan, spec = stack.plan, stack.spec
    want = ref.step_slots(
        step.batch,
        list(step.block_tables.values()),
        step.window_table,
        ratios=plan.ratios,
        page_sizes=[spec.page_sizes[ratio] for ratio in plan.ratios],
        window_page_size=spec.window_page_size,
        window=plan.window,
        strict=step.strict,
        window_first=step.window_first,
        entry_first=step.entry_first,
    )
    for name in ("window_store", "entry_slots", "n_vis"):
        assert_same_bytes(getattr(step.slots, name), getattr(want, name), name)
    assert_same_bytes(step.slots.lists.slots, want.lists.slots, "window lists")
    assert_same_bytes(step.slots.lists.lengths, want.lists.lengths, "window lengths")


@dataclass
class Before:
    """What a layer may write, as it is before."""

    window: fc.Pages
    main: fc.Pages | None = None
    index: fc.Pages | None = None
    tail: fc.Tail | None = None
    index_tail: fc.Tail | None = None

    @classmethod
    def of(cls, cache: fc.Cache, layer: Layer) -> "Before":
        def pages(given: fc.Pages | None) -> fc.Pages | None:
            return given and replace(given, data=given.data.clone())

        def tail(given: fc.Tail | None) -> fc.Tail | None:
            return given and fc.Tail(given.rows.clone())

        window = pages(cache.window[layer.index])
        if layer.group is None:
            return cls(window)
        own, tails = cache.groups[layer.group], cache.tails[layer.group]
        return cls(window, pages(own.main), pages(own.index), tail(tails.main), tail(tails.index))


@dataclass(frozen=True)
class Work:
    """A layer of a step that is done. query: as it was given; turned_q: its q afterwards."""

    stack: "Stack"
    cache: fc.Cache
    step: fc.Step
    layer: Layer
    query: fc.Query
    turned_q: torch.Tensor
    before: Before

    @property
    def table(self) -> torch.Tensor:
        return self.stack.table(self.layer.index)

    def check_compress(self, tokens: fc.Tokens) -> None:
        plan, weights = self.stack.plan, self.stack.compressors[self.layer.group]
        step, before, ratio = self.step, self.before, self.layer.ratio
        slots = step.entry_slots(ratio)
        common = {
            "ratio": ratio,
            "eps": plan.eps,
            "cos_sin": self.table,
            "entry_first": step.stored_entries(ratio),
            "rotate": plan.rotate,
        }
        own_keys = tokens.index_kv is not None
        ref.compress(
            tokens.kv,
            step.batch,
            slots,
            gate=tokens.gate,
            bias=weights.bias,
            norm_weight=weights.norm,
            tail=before.tail,
            main=before.main,
            index=None if own_keys else before.index,
            key_weight=weights.key,
            key_norm_weight=weights.key_norm,
            **common,
        )
        if own_keys:
            ref.compress(
                tokens.index_kv,
                step.batch,
                slots,
                gate=tokens.index_gate,
                bias=weights.index_bias,
                norm_weight=weights.index_norm,
                tail=before.index_tail,
                index=before.index,
                **common,
            )
        pages, tails = self.cache.groups[self.layer.group], self.cache.tails[self.layer.group]
        stored = int((slots >= 0).sum())
        for got, want in ((pages.main, before.main), (pages.index, before.index)):
            if got is not None:
                differ = int((got.data != want.data).count_nonzero())
                most = 0.01 * stored * fc.RECORDS[got.record].bytes + 16 * (stored > 0)
                assert differ <= most, f"{self.layer}: {differ} bytes of {stored} records"
        for got, want in ((tails.main, before.tail), (tails.index, before.index_tail)):
            if got is not None:
                assert_same_bytes(got.rows, want.rows, f"tail of {self.layer}")

    def check_selection(self) -> None:
        """Queries, selection and pool, from the keys as they lie in the cache."""
        step, layer, plan = self.step, self.layer, self.stack.plan
        index = self.cache.groups[layer.group].index
        want = ref.quantize_query(
            self.query.index_q,
            step.batch.positions,
            self.table,
            record=index.record,
            rotate=plan.rotate,
        )
        assert_same_bytes(step.query.codes, want.codes, f"query codes of {layer}")
        assert_same_bytes(step.query.scales, want.scales, f"query scales of {layer}")
        chosen, pool = ref.index_select(
            step.query,
            index,
            self.query.index_weights,
            step.batch,
            step.block_tables[layer.ratio],
            plan.topk,
            ratio=layer.ratio,
            strict=step.strict,
            pool=step.pool if layer.reads_pool else None,
            pool_blocks=plan.pool_blocks if layer.builds_pool else 0,
            exact=True,
        )
        for name in ("positions", "slots", "lengths"):
            got = getattr(step.selection, name)
            assert_same_bytes(got, getattr(chosen, name), f"{name} of {layer}")
        if layer.builds_pool:
            assert_same_bytes(step.pool.blocks, pool.blocks, f"pool of {layer}")
            assert_same_bytes(step.pool.counts, pool.counts, f"pool of {layer}")

    def check_attend(self, out: torch.Tensor, lse: torch.Tensor) -> None:
        step, layer, batch = self.step, self.layer, self.step.batch
        real = batch.positions >= 0
        positions, sink = batch.positions[real], self.query.sink
        model = Model(self.table, q_norm_eps=self.stack.plan.q_norm_eps)
        q = rotated_query(self.query.q[real], positions, model)
        torch.testing.assert_close(self.turned_q[real], q, rtol=2.0**-6, atol=2.0**-7)
        kv, store = self.query.window_kv[real], step.slots.window_store[real]
        ref.rope_store(q.clone(), kv, self.before.window, store, positions, self.table)
        window = self.cache.window[layer.index]
        assert_same_bytes(window.data, self.before.window.data, f"window of {layer}")

        lists = {"window_pages": window, "window": step.slots.lists}
        if layer.contiguous:
            places = (step.block_tables[layer.ratio], batch.row_request, step.n_vis(layer.ratio))
            lists |= {"main": self.cache.groups[layer.group].main, "contiguous": places}
        elif layer.group is not None:
            lists |= {"main": self.cache.groups[layer.group].main, "selection": step.selection}
        records, rows = ref.attend_lists(**lists)
        asked = (self.turned_q[real], records, rows[real])
        want, want_lse = ref_attend.attend(*asked, sink=sink)
        bound, lse_bound = ref_attend.error_bounds(*asked, sink=sink)
        assert ((lse[real] - want_lse).abs() <= lse_bound).all(), f"lse of {layer}"
        want = ref_attend.derotated_output(want, positions, self.table).double()
        bound = 2 * bound + 2.0**-7 * want.abs()
        bound[..., -64:] += 2.0**-7 * want.abs().amax(-1, keepdim=True)  # pairs mix
        assert ((out[real] - want).abs() <= bound).all(), f"output of {layer}"
