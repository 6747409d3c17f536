"""Faults of attention's kernel for FP32 outputs."""

from mutants.mutant import Mutant

MUTANTS = (
    Mutant(
        1631,
        "attend",
        "sums keep the weight of an older maximum in FP32",
        "sm90/attend/plain.cu",
        "s.sum = fmaf(s.sum, keep, warp_sum(weight));",
        "s.sum += warp_sum(weight);",
        "the accumulator is rescaled, the sum is forgotten",
        test="tests/test_attend_maxima.py::test_levels_in_fp32",
    ),
    Mutant(
        1632,
        "attend",
        "main list read behind the window's length",
        "sm90/attend/plain.cu",
        "list.main_slot(at - list.window)",
        "list.main_slot(at)",
        "two lists taken for one array",
        test="tests/test_attend.py",
    ),
    Mutant(
        1633,
        "attend",
        "a sink that is not relative to the maximum",
        "sm90/attend/plain.cu",
        "exp_fma(sink - s.max)",
        "exp_fma(sink)",
        "the sum is relative to it, the sink is a plain logit",
        "Sink really used",
    ),
)
