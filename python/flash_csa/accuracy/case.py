"""One input at work: entries, teachers and oracles, computed when they are first asked for.

Teachers hold everything in BF16 and FP32: what a layer would select with its own query over all
visible entries. The oracle selects by dense attention mass, which no indexer can beat.
"""

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from ..reference.compress import Entries
from ..reference.rope import cos_sin_table, rotate
from .activations import Activations
from .backends import ROW_LIMIT, Formula, Stored, Where, softmax_attend
from .formats import BF16_MAIN, INDEX_BF16, MAIN_FP4, MAIN_FP8, Variant
from .planted import WINDOW

THETA = 160000.0
FORMULA = Formula()


@lru_cache(maxsize=1)
def _table(tokens: int, device: torch.device) -> Tensor:
    return cos_sin_table(tokens, THETA, yarn=True).to(device)


class Case:
    """Activations, a top-k and the back end under test, whose stages may err; what results are
    compared with comes from `FORMULA`."""

    def __init__(self, activations: Activations, k: int, backend: Formula = FORMULA) -> None:
        self.inputs, self.k, self.backend = activations, k, backend
        self.positions = activations.positions
        self.cos_sin = _table(activations.tokens, activations.device)
        self._made: dict[tuple, Any] = {}

    @property
    def layers(self) -> range:
        return range(len(self.inputs.layers))

    def where(self, ratio: int = 1) -> Where:
        return Where(self.positions, ratio)

    def size(self, ratio: int = 1) -> int:
        """Entries of the sequence."""
        return self.inputs.tokens // ratio

    def entries(self, ratio: int = 1) -> Entries:
        return self._once(("entries", ratio), lambda: self.inputs.entries(ratio, self.cos_sin))

    def q(self, layer: int) -> Tensor:
        """bf16 [Q, H, 512] after RoPE."""
        return rotate(self.inputs.layers[layer].q, self.positions, self.cos_sin)

    # Records

    def main(self, variant: Variant = MAIN_FP4, ratio: int = 1, backend=None) -> Stored:
        """Main records of the back end under test, or of another."""
        backend = backend or self.backend
        key = ("main", variant, ratio, backend)
        return self._once(key, lambda: backend.store(self.entries(ratio).main, variant))

    def keys(self, variant: Variant, ratio: int = 1, backend=None) -> Stored:
        """Index records."""
        backend = backend or self.backend
        key = ("keys", variant, ratio, backend)
        return self._once(key, lambda: backend.store(self.entries(ratio).keys, variant))

    def window(self, backend=None) -> Stored:
        """Window records, FP8 as in the model."""
        backend = backend or self.backend

        def made() -> Stored:
            tokens = torch.arange(self.inputs.tokens, device=self.inputs.device)
            rows = rotate(self.inputs.window_kv, tokens, self.cos_sin)
            return backend.store(rows, MAIN_FP8)

        return self._once(("window", backend), made)

    def window_lists(self) -> Tensor:
        """i64 [Q, 128]: the last positions up to each row's own, -1 before the first."""
        recent = torch.arange(1 - WINDOW, 1, device=self.inputs.device)
        return (self.positions[:, None] + recent).clamp(min=-1)

    # Stages

    def scores(self, layer: int, variant: Variant, ratio: int = 1, backend=None) -> Tensor:
        """f32 [Q, N]: index scores with queries and keys of one format."""
        backend = backend or self.backend

        def made() -> Tensor:
            queries, where = self.inputs.layers[layer], self.where(ratio)
            query = backend.query(queries.index_q, where, self.cos_sin, variant)
            keys = self.keys(variant, ratio, backend)
            return backend.scores(query, keys, queries.index_weights, where)

        return self._once(("scores", layer, variant, ratio, backend), made)

    def attend(self, layer: int, main: Stored, lists: Tensor, backend=None) -> Tensor:
        """f32 [Q, H, 512]: the layer over its window and `lists` of `main`."""
        backend = backend or self.backend
        sink = self.inputs.layers[layer].sink
        window = self.window(backend)
        return backend.attend(self.q(layer), main, lists, window, self.window_lists(), sink)

    # Teachers and oracles

    def teacher(self, layer: int, variant: Variant = INDEX_BF16, ratio: int = 1) -> Tensor:
        """i64 [Q, k]: the layer's own selection among everything visible, by formula."""

        def made() -> Tensor:
            scores = self.scores(layer, variant, ratio, FORMULA)
            return FORMULA.select(scores, self.where(ratio), self.k)

        return self._once(("teacher", layer, variant, ratio), made)

    def expected(self, layer: int, lists: Tensor, variant: Variant = BF16_MAIN) -> Tensor:
        """The layer's output over `lists`, by formula, ratio 1."""
        return self.attend(layer, self.main(variant, 1, FORMULA), lists, FORMULA)

    def mass(self, layer: int, ratio: int = 1) -> Tensor:
        """f32 [Q, N]: attention over all visible entries, BF16, mean of the heads; sums to 1."""

        def made() -> Tensor:
            main = self.main(BF16_MAIN, ratio, FORMULA).values
            q, n_vis = self.q(layer).float(), self.where(ratio).n_vis
            chunk = max(1, ROW_LIMIT // max(1, q.shape[1] * len(main)))
            columns = torch.arange(len(main), device=main.device)
            masses = []
            for rows, visible in zip(q.split(chunk), n_vis.split(chunk), strict=True):
                logits = (rows.flatten(0, 1) @ main.T).unflatten(0, rows.shape[:2])
                hidden = columns >= visible[:, None, None]
                logits = (logits * q.shape[2] ** -0.5).masked_fill(hidden, -torch.inf)
                masses.append(logits.softmax(2).nan_to_num(0.0).mean(1))
            return torch.cat(masses)

        return self._once(("mass", layer, ratio), made)

    def oracle(self, layer: int, k: int | None = None, ratio: int = 1) -> Tensor:
        """i64 [Q, k]: the entries of the largest attention mass."""
        return FORMULA.select(self.mass(layer, ratio), self.where(ratio), k or self.k)

    def dense(self, layer: int, ratio: int = 1, variant: Variant = BF16_MAIN) -> Tensor:
        """f32 [Q, H, 512]: the layer over its window and every visible entry, by formula."""

        def made() -> Tensor:
            main = self.main(variant, ratio, FORMULA).values
            window, lists = self.window(FORMULA).values, self.window_lists()
            sink = self.inputs.layers[layer].sink
            outs = []
            for row, (q, visible) in enumerate(
                zip(self.q(layer).float(), self.where(ratio).n_vis.tolist(), strict=True)
            ):
                recent = lists[row][lists[row] >= 0]
                kv = torch.cat([window[recent], main[:visible]])
                absent = torch.zeros(1, len(kv), dtype=torch.bool, device=kv.device)
                outs.append(softmax_attend(q[None], kv[None], absent, sink))
            return torch.cat(outs)

        return self._once(("dense", layer, ratio, variant), made)

    def _once(self, key: tuple, make: Callable[[], Any]) -> Any:
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]
