"""What a plain step leaves out: pools of foreign lists, selections and pools of shards, and pages
that are parts of larger ones."""

from collections.abc import Iterator

import torch
from torch import Tensor

from ..plan import HEAD_DIM
from ..reference.select import normalize_pool
from .backends import Where
from .case import FORMULA, Case
from .checks import HELD, Check
from .codecs import AXIS, ROWS, differ
from .formats import INDEX_FP4, MAIN_FP4
from .planted import POOL_BLOCK

POSITIONS = range(5, 69)  # of foreign pools: every end of a block among them
FOREIGN = 24  # blocks of a foreign list, of twice as many as the rows see
SHARDS = 3


def compare(case: Case) -> Iterator[Check]:
    """All of them, if the back end has them."""
    if hasattr(case.backend, "store_apart"):
        yield from _foreign(case)
        yield from _shards(case)
        yield from _apart(case)


def _foreign(case: Case) -> Iterator[Check]:
    positions = torch.tensor(POSITIONS, device=case.inputs.device)
    random = torch.Generator().manual_seed(0)
    last = 2 * POSITIONS.stop // POOL_BLOCK
    blocks = torch.randint(-1, last, (len(positions), FOREIGN), generator=random)
    for strict in (False, True):
        where = Where(positions, 1, strict)
        made = case.backend.normalize_pool(blocks.to(positions.device), where, last * POOL_BLOCK)
        expected = normalize_pool(blocks.int(), where.n_vis.cpu(), FOREIGN).blocks
        name = f"blocks of foreign lists{', strict,' * strict}"
        yield _equal("pool", name, made.cpu(), expected)


def _shards(case: Case) -> Iterator[Check]:
    """Every shard has its own best of a part of the blocks; joined, they are the best of all."""
    where, scores = case.where(), case.scores(0, INDEX_FP4, backend=FORMULA)
    k, count, rows = case.k // 2, max(1, case.k // POOL_BLOCK), len(scores)
    seen = torch.arange(scores.shape[1], device=scores.device) < where.n_vis[:, None]
    scores = torch.nn.functional.pad(
        torch.where(seen, scores, -torch.inf), (0, -scores.shape[1] % POOL_BLOCK), value=-torch.inf
    )
    best = scores.unflatten(1, (-1, POOL_BLOCK)).amax(2)
    newest = Where((where.n_vis - 1) // POOL_BLOCK, 1)
    for axis, values, seeing, width in (
        ("selection", scores, where, k),
        ("pool", best, newest, count),
    ):
        step = POOL_BLOCK if axis == "selection" else 1
        shard = torch.arange(values.shape[1], device=values.device) // step % SHARDS
        lists = torch.stack(
            [
                FORMULA.select(torch.where(shard == each, values, -torch.inf), seeing, width)
                for each in range(SHARDS)
            ]
        )
        held = values.expand(SHARDS, rows, -1).gather(2, lists.clamp(min=0))
        if axis == "selection":
            made = case.backend.merge_selections(lists, held, where, scores.shape[1], k)
            yield _equal(axis, "slots of shards, joined,", made, FORMULA.select(scores, where, k))
        else:
            made = case.backend.merge_pools(lists, held, where, count)
            expected = FORMULA.pool(scores, where, count, POOL_BLOCK)
            yield _equal(axis, "blocks of shards, joined,", made, expected)


def _apart(case: Case) -> Iterator[Check]:
    """Against the back end's own records in pages without bytes between them."""
    backend, layer, where = case.backend, case.inputs.layers[0], case.where()
    entries = case.entries()
    for variant, axis in AXIS.items():
        if not backend.supports(variant):
            continue
        rows = (entries.main if variant.dims == HEAD_DIM else entries.keys)[:ROWS]
        made, own = backend.store_apart(rows, variant), backend.store(rows, variant)
        name = f"{variant.name}, in pages that lie apart"
        yield _equal(axis, f"{name}, values", made.values, own.values)
        yield _equal(axis, f"{name}, bytes", backend.bytes_of(made), backend.bytes_of(own))
    query = backend.query(layer.index_q, where, case.cos_sin, INDEX_FP4)
    scores, own = (
        backend.scores(query, keys, layer.index_weights, where)
        for keys in (backend.store_apart(entries.keys, INDEX_FP4), case.keys(INDEX_FP4))
    )
    seen = torch.arange(case.size(), device=scores.device) < where.n_vis[:, None]
    yield _equal("index scores", "of pages that lie apart, bits", scores[seen], own[seen])
    window = case.window(), case.window_lists(), layer.sink
    outs = [
        backend.attend(case.q(0), main, case.teacher(0), *window)
        for main in (backend.store_apart(entries.main, MAIN_FP4), case.main(MAIN_FP4))
    ]
    yield _equal("attention", "over pages that lie apart, bits", *outs)


def _equal(axis: str, name: str, made: Tensor, expected: Tensor) -> Check:
    """Share of elements that differ must be 0."""
    share = differ(made, expected)
    return Check(axis, f"{name} that differ", share, 0.0, 0.0, made.numel(), HELD)
