"""(c) What the candidate pool costs: its size and the size of its blocks."""

from torch import Tensor

from ..case import FORMULA, Case
from ..formats import INDEX_FP4
from ..metrics import covered, recall
from ..planted import POOL_BLOCK
from ..table import Table

HELD = (
    "index FP4, ratio 1; the Full layer builds the pool, every later layer selects inside it with "
    "its own query; teacher: its own selection over all visible entries"
)
SHARES = {
    "1/8 of the context": 1 / 8,
    "1/4 of the context": 1 / 4,
    "1/2 of the context": 1 / 2,
    "everything": 1.0,
}
BLOCKS = (1, 4, POOL_BLOCK, 32)
RANKS = (64, 256, 1024)


def measure(case: Case, table: Table) -> None:
    for share_name, share in SHARES.items():
        for block in BLOCKS:
            if case.backend.pool_block not in (None, block):
                continue
            if share == 1.0 and block != POOL_BLOCK:
                continue
            blocks = blocks_of(case, share, block)
            pool = case.backend.pool(case.scores(0, INDEX_FP4), case.where(), blocks, block)
            name = f"{share_name}, blocks of {block}"
            for layer in case.layers[1:]:
                _layer(case, table, layer, name, pool, block)


def blocks_of(case: Case, share: float, block: int) -> int:
    """Blocks of a pool that holds a share of the sequence's entries."""
    return max(1, -(-int(share * case.size()) // block))


def _layer(case: Case, table: Table, layer: int, name: str, pool: Tensor, block: int) -> None:
    where, facts = case.where(), {"positions": pool.shape[1] * block, "block": block}
    scores = case.scores(layer, INDEX_FP4)
    lists = case.backend.select(scores, where, case.k, pool, block)
    wanted = case.teacher(layer, INDEX_FP4)
    table.put(case, name, "recall", layer, recall(lists, wanted, case.size()), **facts)
    table.put(case, name, "mass covered", layer, covered(case.mass(layer), lists))
    inside = FORMULA.select(scores, where, pool.shape[1] * block, pool, block)
    exact = case.scores(layer, INDEX_FP4, backend=FORMULA)
    for rank in RANKS:
        best = FORMULA.select(exact, where, rank)
        table.put(case, name, f"pool recall@{rank}", layer, recall(inside, best, case.size()))
