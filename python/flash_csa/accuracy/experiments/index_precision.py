"""(b) What the precision of the index costs: KV is fixed, scores change."""

import torch
from torch import Tensor

from ..backends import Formula, Stored
from ..case import FORMULA, Case
from ..formats import INDEX_BF16, INDEX_FP4, INDEX_FP8, MAIN_FP4, Variant
from ..metrics import boundary_gap, covered, jaccard, recall, relative_error
from ..table import Table

HELD = (
    "main KV FP4 (MainFp4), window FP8, ratio 1; every layer scores all visible entries itself; "
    "teacher: FP32 scores of BF16 queries and keys"
)
LEVELS = {"FP32": INDEX_BF16, "FP8": INDEX_FP8, "FP4": INDEX_FP4}


def measure(case: Case, table: Table) -> None:
    for layer in case.layers:
        teacher = case.teacher(layer)
        main = case.main(MAIN_FP4, backend=FORMULA)
        expected = case.attend(layer, main, teacher, FORMULA)
        choices = _selections(case, layer)
        for name, (lists, nbytes) in choices.items():
            facts = {"bytes": nbytes}
            same = recall(lists, teacher, case.size())
            table.put(case, name, "recall", layer, same, **facts)
            table.put(case, name, "differing slots", layer, 1 - same)
            table.put(case, name, "Jaccard", layer, jaccard(lists, teacher, case.size()))
            table.put(case, name, "mass covered", layer, covered(case.mass(layer), lists))
            oracle = recall(lists, case.oracle(layer), case.size())
            table.put(case, name, "recall of the oracle", layer, oracle)
            if name == "oracle":
                continue  # its output is further from the teacher's because it is better
            out = case.attend(layer, main, lists, FORMULA)
            table.put(case, name, "output error", layer, relative_error(out, expected))
        for name, variant in LEVELS.items():
            if case.backend.supports(variant):
                gap = boundary_gap(case.scores(layer, variant), case.where().n_vis, case.k)
                table.put(case, name, "boundary gap", layer, gap)


def _selections(case: Case, layer: int) -> dict[str, tuple[Tensor, int]]:
    """Name: lists and bytes of a key. The oracle's is the ceiling of this axis."""

    def chosen(scores: Tensor) -> Tensor:
        return case.backend.select(scores, case.where(), case.k)

    found: dict[str, tuple[Tensor, int]] = {}
    for name, variant in LEVELS.items():
        if case.backend.supports(variant):
            found[name] = chosen(case.scores(layer, variant)), variant.bytes
    if case.backend.supports(INDEX_BF16):
        rounded = rounded_scores(case, layer, INDEX_BF16)
        found["BF16 rounded"] = chosen(rounded), INDEX_BF16.bytes
        rounded = rounded_scores(case, layer, INDEX_FP4)
        found["FP4, BF16 rounded"] = chosen(rounded), INDEX_FP4.bytes
        found["FP4 keys alone"] = chosen(_mixed_scores(case, layer)), INDEX_FP4.bytes
    found["oracle"] = case.oracle(layer), 0
    return found


def _query(case: Case, layer: int, variant: Variant, backend: Formula) -> Stored:
    index_q = case.inputs.layers[layer].index_q
    return backend.query(index_q, case.where(), case.cos_sin, variant)


def rounded_scores(case: Case, layer: int, variant: Variant, backend: Formula | None = None):
    """f32 [Q, N] as an eager BF16 model has them: dots, products and head sums rounded."""
    backend = backend or case.backend
    weights = case.inputs.layers[layer].index_weights.bfloat16()
    keys = case.keys(variant, backend=backend).values.T.contiguous()
    rows = []
    for heads, weight in zip(_query(case, layer, variant, backend).values, weights, strict=True):
        dots = (heads @ keys).bfloat16().clamp_(min=0)
        rows.append((dots * weight[:, None]).float().sum(0).bfloat16().float())
    return torch.stack(rows)


def _mixed_scores(case: Case, layer: int) -> Tensor:
    """FP4 keys under exact queries."""
    query, keys = _query(case, layer, INDEX_BF16, case.backend), case.keys(INDEX_FP4)
    return case.backend.scores(query, keys, case.inputs.layers[layer].index_weights, case.where())
