"""(g) The ceiling of every selection: dense attention mass, over k."""

import torch

from ..case import FORMULA, Case
from ..formats import INDEX_BF16, INDEX_FP4, MAIN_FP4
from ..metrics import covered, relative_error
from ..table import Table

HELD = "main KV FP4, window FP8, ratio 1; expected: attention to every entry of the same records"
SHARES = (1 / 8, 1 / 4, 1 / 2, 1.0, 2.0)


def measure(case: Case, table: Table) -> None:
    main, where = case.main(MAIN_FP4, backend=FORMULA), case.where()
    for share in SHARES:
        k = max(1, int(case.k * share))
        newest = where.n_vis[:, None] - k + torch.arange(k, device=case.positions.device)
        for layer in case.layers:
            expected = case.dense(layer, variant=MAIN_FP4)
            choices = {
                "oracle": case.oracle(layer, k),
                "FP32 index": FORMULA.select(
                    case.scores(layer, INDEX_BF16, backend=FORMULA), where, k
                ),
                "FP4 index": case.backend.select(case.scores(layer, INDEX_FP4), where, k),
                "newest": newest.clamp(min=-1),
            }
            for name, lists in choices.items():
                variant = f"{name}, k {k}"
                mass = covered(case.mass(layer), lists)
                table.put(case, variant, "mass covered", layer, mass, k=k)
                out = case.attend(layer, main, lists, FORMULA)
                error = relative_error(out, expected)
                table.put(case, variant, "output error", layer, error)
