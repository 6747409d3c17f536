"""(d) What sharing selections across layers costs: Reindex replaced by Reuse, and by full-domain
scoring."""

from collections.abc import Sequence

from torch import Tensor

from ...configs import V41_FLASH
from ..case import Case
from ..formats import INDEX_FP4, MAIN_FP4
from ..metrics import covered, recall, relative_error
from ..planted import POOL_BLOCK
from ..table import Table
from .pool import blocks_of

HELD = (
    "index FP4, main KV FP4, window FP8, ratio 1, pool: the model's 16,384 positions or half the "
    "context, whichever is less; teacher: every layer selects for itself among all visible entries"
)
MODEL_POOL = V41_FLASH["candidate_topk_blocks"] * POOL_BLOCK


def pool_share(tokens: int) -> float:
    """Share of `tokens` entries that the pool holds."""
    return min(MODEL_POOL / tokens, 1 / 2)


def measure(case: Case, table: Table) -> None:
    modes = case.inputs.modes
    plans = {
        "as planned": modes,
        "Reuse only": ("full", *["reuse"] * (len(modes) - 1)),
        "Reindex over everything": tuple("full" if m == "reindex" else m for m in modes),
    }
    for name, plan in plans.items():
        for layer, lists in enumerate(selections(case, plan)):
            _layer(case, table, name, layer, lists)
    for layer in case.layers:
        mass = covered(case.mass(layer), case.oracle(layer))
        table.put(case, "oracle", "mass covered", layer, mass)


def selections(
    case: Case, plan: Sequence[str], share: float | None = None, k: int | None = None
) -> list[Tensor]:
    """i64 [Q, k] of each layer, by its mode in `plan`; only the first "full" builds the pool, of
    `share` of the context."""
    backend, where, k = case.backend, case.where(), k or case.k
    share = pool_share(case.size()) if share is None else share
    found: list[Tensor] = []
    pool = None
    for layer, mode in enumerate(plan):
        if mode == "reuse":
            found.append(backend.reuse(found[-1]))
            continue
        scores = case.scores(layer, INDEX_FP4)
        if pool is None:
            blocks = blocks_of(case, share, POOL_BLOCK)
            pool = backend.pool(scores, where, blocks, POOL_BLOCK)
        inside = pool if mode == "reindex" else None
        found.append(backend.select(scores, where, k, inside, POOL_BLOCK))
    return found


def _layer(case: Case, table: Table, name: str, layer: int, lists: Tensor) -> None:
    wanted = case.teacher(layer, INDEX_FP4)
    table.put(case, name, "recall", layer, recall(lists, wanted, case.size()))
    table.put(case, name, "mass covered", layer, covered(case.mass(layer), lists))
    expected = case.expected(layer, wanted, MAIN_FP4)
    out = case.attend(layer, case.main(MAIN_FP4), lists)
    table.put(case, name, "output error", layer, relative_error(out, expected))
