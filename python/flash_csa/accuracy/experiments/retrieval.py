"""Planted evidence: is it selected, and can it be read from the attention output? One axis at a
time, and both together."""

from torch import Tensor

from ..case import FORMULA, Case
from ..formats import BF16_MAIN, INDEX_FP4, MAIN_FP4
from ..metrics import answered, found, members
from ..table import Table
from .reuse import selections

HELD = "window FP8, ratio 1; k and the needles are the same in every row"


def measure(case: Case, table: Table) -> None:
    evidence = case.inputs.evidence
    if evidence is None:
        raise ValueError("flash_csa.accuracy: retrieval needs planted evidence")
    shared = selections(case, case.inputs.modes)
    for layer in case.layers:
        fp4 = case.backend.select(case.scores(layer, INDEX_FP4), case.where(), case.k)
        exact = case.teacher(layer)
        choices = {
            "oracle, BF16 KV": (case.oracle(layer), BF16_MAIN),
            "FP32 index, BF16 KV": (exact, BF16_MAIN),
            "FP32 index, FP4 KV": (exact, MAIN_FP4),
            "FP4 index, BF16 KV": (fp4, BF16_MAIN),
            "FP4 index, FP4 KV": (fp4, MAIN_FP4),
            "as planned, FP4 KV": (shared[layer], MAIN_FP4),
        }
        for name, (lists, variant) in choices.items():
            held = case.backend if case.backend.supports(variant) else FORMULA
            out = case.attend(layer, case.main(variant, backend=held), lists, held)
            table.put(case, name, "answered", layer, answered(out, evidence))
            table.put(case, name, "found", layer, _found(case, lists))
            table.put(case, name, "decoy wins", layer, _decoys(case, lists))


def _found(case: Case, lists: Tensor) -> Tensor:
    """bool [Q]: all needles are in the lists, or in the window."""
    needles = case.inputs.evidence.needles
    recent = (needles >= 0) & (case.positions[:, None] - needles < case.window_lists().shape[1])
    return found(lists, needles.masked_fill(recent, -1), 1, case.size())


def _decoys(case: Case, lists: Tensor) -> Tensor:
    """f32 [Q]: a decoy is selected while its needle is not; NaN where there is none."""
    decoys = case.inputs.evidence.decoys
    chosen = members(lists, case.size()).gather(1, decoys.clamp(min=0)) & (decoys >= 0)
    wins = (chosen.any(1) & ~_found(case, lists)).float()
    return wins.masked_fill(~(decoys >= 0).any(1), float("nan"))
