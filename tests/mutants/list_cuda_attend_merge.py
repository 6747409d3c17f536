"""Faults of the kernel that merges partial results."""

from mutants.mutant import Mutant

MUTANTS = (
    Mutant(
        1621,
        "attend",
        "parts weighed against the first one",
        "sm90/attend/merge.cu",
        "if (!is_empty(lse)) largest = fmaxf(largest, lse);",
        "if (!is_empty(lse) && largest == -INFINITY) largest = lse;",
        "any common base does, until a weight overflows",
        test="tests/test_merge.py",
    ),
    Mutant(
        1622,
        "attend",
        "a sink in the merged lse",
        "sm90/attend/merge.cu",
        "empty ? INFINITY : largest + logf(sum);",
        "empty ? INFINITY : largest - logf(factor);",
        "the factor of the output has the sum in it, and more",
        "LSE base and merge",
    ),
)
