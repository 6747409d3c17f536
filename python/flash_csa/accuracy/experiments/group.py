"""(e) What a longer group costs: its length, the number of Reindex layers, pool and k are swept,
and the head of the group is set against its tail."""

from ..activations import layer_modes
from ..case import Case
from ..formats import INDEX_FP4
from ..metrics import covered, recall
from ..table import Table
from .reuse import selections

HELD = (
    "index FP4, ratio 1; one value swept at a time from 8 layers, 1 Reindex, a pool of half the "
    "context and the default k; teacher: every layer for itself; head: first layer after "
    "the Full one, tail: last layer"
)
LAYERS = 20  # that the group needs
SHARE = 1 / 2


def measure(case: Case, table: Table) -> None:
    k = case.k
    sweeps = {
        **{f"{n} layers": (n, 1, SHARE, k) for n in (2, 4, 8, 20)},
        **{f"{n} Reindex": (8, n, SHARE, k) for n in (0, 1, 3, 7)},
        **{f"pool 1/{round(1 / s)}": (8, 1, s, k) for s in (1 / 8, 1 / 4, 1 / 2, 1.0)},
        **{f"k {n}": (8, 1, SHARE, n) for n in (k // 8, k // 4, k // 2, k)},
    }
    for name, (layers, reindex, share, selected) in sweeps.items():
        if layers > len(case.inputs.layers):
            continue
        chosen = selections(case, layer_modes(layers, reindex), share, selected)
        for end, layer in (("head", 1), ("tail", layers - 1)):
            scores = case.scores(layer, INDEX_FP4)
            wanted = case.backend.select(scores, case.where(), selected)
            variant = f"{name}, {end}"
            same = recall(chosen[layer], wanted, case.size())
            table.put(case, variant, "recall", layer, same)
            table.put(
                case, variant, "mass covered", layer, covered(case.mass(layer), chosen[layer])
            )
