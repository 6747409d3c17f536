"""(a) What the format of main KV costs: selections are fixed, records change."""

import torch

from ..backends import Stored
from ..case import FORMULA, Case
from ..formats import BF16_MAIN, MAIN_VARIANTS
from ..metrics import relative_error
from ..table import Table

HELD = (
    "selections: each layer's own, FP32 scores of BF16 keys over all visible entries; "
    "window FP8; ratio 1"
)


def measure(case: Case, table: Table) -> None:
    exact = case.main(BF16_MAIN, backend=FORMULA)
    lists = [case.teacher(layer) for layer in case.layers]
    expected = [case.expected(layer, lists[layer]) for layer in case.layers]
    for variant in MAIN_VARIANTS:
        if not case.backend.supports(variant):
            continue
        # Not kept in the case: at a million tokens all variants together would fill a GPU.
        stored = case.backend.store(case.entries().main, variant)
        facts = {"bytes": variant.bytes, "record": variant.record}
        for layer in case.layers:
            out = case.attend(layer, stored, lists[layer])
            error = relative_error(out, expected[layer])
            table.put(case, variant.name, "output error", layer, error, **facts)
            errors = _value_errors(stored, exact, lists[layer])
            table.put(case, variant.name, "value error", layer, errors)


def _value_errors(stored: Stored, exact: Stored, lists: torch.Tensor) -> torch.Tensor:
    """f32 [Q]: relative error of all values that a row selects."""
    wrong = (stored.values - exact.values).square().sum(1)
    whole = exact.values.square().sum(1)
    chosen, present = lists.clamp(min=0), lists >= 0
    sums = [torch.where(present, each[chosen], 0.0).sum(1) for each in (wrong, whole)]
    return (sums[0] / sums[1].clamp(min=1e-30)).sqrt()
