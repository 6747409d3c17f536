"""The stages that an experiment goes through, in position space.

`Formula` is plain PyTorch on any device: its only errors are those of the formats. `Compiled` (in
compiled.py) sends the same through the library's ops, and anything with the methods of `Formula`
can be measured in its place: `--backend package.module:Class`.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..reference.rope import rotate
from .formats import Variant

ROW_LIMIT = 1 << 26  # elements of a temporary


@dataclass(frozen=True)
class Stored:
    """Vectors as they are read back, f32 [N, dims], and what a back end holds of them."""

    values: Tensor
    variant: Variant
    held: Any = None


@dataclass(frozen=True)
class Where:
    """Query rows at `positions` i64 [Q] over entries of `ratio` tokens. strict: a row does not see
    the entry that it closes."""

    positions: Tensor
    ratio: int
    strict: bool = False

    @property
    def n_vis(self) -> Tensor:
        """i64 [Q]: entries that each row sees."""
        return (self.positions + (not self.strict)) // self.ratio


class Formula:
    """Every stage as its formula. Subclass to measure another implementation, or a fault."""

    name = "formula"
    pool_block: int | None = None  # the only block size of a pool; None: any
    exact_scores = False  # FP4 scores are those of reference.index.index_scores_exact, bit for bit

    def outputs(self) -> dict[str, "Formula"]:
        """Back ends that differ in what attention writes, by its type: "BF16", "FP32"."""
        return {"FP32": self}

    def supports(self, variant: Variant) -> bool:
        """Whether `store` and what reads it take the variant."""
        return True

    def store(self, rows: Tensor, variant: Variant) -> Stored:
        """rows bf16 [N, dims] as main, window or index records."""
        return Stored(variant.round_trip(rows), variant)

    def query(self, index_q: Tensor, where: Where, cos_sin: Tensor, variant: Variant) -> Stored:
        """Index queries bf16 [Q, Hi, 128], rotated to their positions and quantised."""
        return Stored(variant.round_trip(rotate(index_q, where.positions, cos_sin)), variant)

    def scores(self, query: Stored, keys: Stored, weights: Tensor, where: Where) -> Tensor:
        """f32 [Q, N]: sum over heads of weight * max(0, q . k)."""
        keys_t = keys.values.T.contiguous()
        rows = [
            weight @ (heads @ keys_t).clamp_(min=0)
            for heads, weight in zip(query.values, weights.float(), strict=True)
        ]
        return torch.stack(rows)

    def pool(self, scores: Tensor, where: Where, blocks: int, block: int) -> Tensor:
        """i64 [Q, blocks] ascending, -1 padded: the best blocks by their best visible score, and
        always the newest."""
        n_vis, size = where.n_vis, scores.shape[1]
        seen = torch.arange(size, device=scores.device) < n_vis[:, None]
        padding = -size % block
        best = torch.nn.functional.pad(
            torch.where(seen, scores, -torch.inf), (0, padding), value=-torch.inf
        )
        best = best.unflatten(1, (-1, block)).amax(2)
        newest = ((n_vis - 1) // block).clamp(min=0)[:, None]
        best = best.scatter(1, newest, torch.where(n_vis > 0, torch.inf, -torch.inf)[:, None])
        return _best(best, blocks)

    def select(
        self,
        scores: Tensor,
        where: Where,
        k: int,
        pool: Tensor | None = None,
        block: int = 0,
    ) -> Tensor:
        """i64 [Q, k] positions ascending, -1 padded: the best visible ones, inside `pool`."""
        allowed = torch.arange(scores.shape[1], device=scores.device) < where.n_vis[:, None]
        if pool is not None:
            blocks = -(-scores.shape[1] // block)
            kept = torch.zeros(len(pool), blocks + 1, dtype=torch.bool, device=pool.device)
            kept.scatter_(1, torch.where(pool < 0, blocks, pool), True)
            allowed &= kept[:, :blocks].repeat_interleave(block, 1)[:, : scores.shape[1]]
        return _best(torch.where(allowed & ~scores.isnan(), scores, -torch.inf), k)

    def reuse(self, selection: Tensor) -> Tensor:
        """What a Reuse layer reads of a selection: all of it, as it is."""
        return selection

    def attend(
        self,
        q: Tensor,
        main: Stored,
        lists: Tensor,
        window: Stored,
        window_lists: Tensor,
        sink: Tensor,
    ) -> Tensor:
        """f32 [Q, H, 512]: q bf16 [Q, H, 512] after RoPE over main records at `lists` i64 [Q, K]
        and window records at `window_lists` i64 [Q, W], -1 skipped; sink f32 [H]."""
        heads, width = q.shape[1], lists.shape[1] + window_lists.shape[1]
        chunk = max(1, ROW_LIMIT // (width * max(q.shape[2], heads)))
        outs = []
        for rows, chosen, recent in zip(
            q.split(chunk), lists.split(chunk), window_lists.split(chunk), strict=True
        ):
            kv = torch.cat([_gather(window.values, recent), _gather(main.values, chosen)], 1)
            absent = torch.cat([recent, chosen], 1) < 0
            outs.append(softmax_attend(rows.float(), kv, absent, sink))
        return torch.cat(outs)


def softmax_attend(q: Tensor, kv: Tensor, absent: Tensor, sink: Tensor) -> Tensor:
    """f32 [Q, H, dim]: q f32 [Q, H, dim] over kv f32 [Q, n, dim], without those `absent`."""
    logits = q @ kv.transpose(1, 2) * q.shape[2] ** -0.5
    logits = logits.masked_fill(absent[:, None], -torch.inf)
    denominator = torch.logaddexp(logits.logsumexp(2), sink.expand(q.shape[:2]))
    return (logits - denominator[:, :, None]).exp() @ kv


def _gather(values: Tensor, lists: Tensor) -> Tensor:
    return values[lists.clamp(min=0)]


def _best(keys: Tensor, count: int) -> Tensor:
    """i64 [Q, count] ascending: columns of the largest keys, lower columns first among equals; -1
    where only -inf is left."""
    order = (keys + 0.0).sort(dim=1, descending=True, stable=True)
    columns = torch.where(order.values > -torch.inf, order.indices, keys.shape[1])[:, :count]
    columns = torch.nn.functional.pad(
        columns.sort(1).values, (0, count - columns.shape[1]), value=keys.shape[1]
    )
    return torch.where(columns < keys.shape[1], columns, -1)
