"""(f) What compression costs, apart from what selection costs."""

from ..case import FORMULA, Case
from ..formats import BF16_MAIN, INDEX_BF16
from ..metrics import covered, relative_error
from ..table import Table

HELD = (
    "main KV and index BF16, window FP8; compressors with drawn gates; expected: attention to "
    "every token (ratio 1, dense)"
)
RATIOS = (1, 2, 4, 128)


def measure(case: Case, table: Table) -> None:
    for ratio in RATIOS:
        if case.size(ratio) == 0:
            continue
        main = case.main(BF16_MAIN, ratio, FORMULA)
        for layer in case.layers:
            expected = case.dense(layer)
            choices = {
                "all entries": case.dense(layer, ratio),
                "oracle": case.attend(layer, main, case.oracle(layer, ratio=ratio), FORMULA),
                "index": case.attend(layer, main, case.teacher(layer, INDEX_BF16, ratio), FORMULA),
            }
            for name, out in choices.items():
                variant = f"ratio {ratio}, {name}"
                error = relative_error(out, expected)
                table.put(case, variant, "output error", layer, error, ratio=ratio)
            for name, lists in (
                ("oracle", case.oracle(layer, ratio=ratio)),
                ("index", case.teacher(layer, INDEX_BF16, ratio)),
            ):
                share = covered(case.mass(layer, ratio), lists)
                table.put(case, f"ratio {ratio}, {name}", "mass covered", layer, share)
