"""Faults of the tensor-core kernel of index_scores."""

from mutants.mutant import Mutant

MUTANTS = (
    Mutant(
        1401,
        "index",
        "last partial unit not scored",
        "sm90/index/score_work.cuh",
        "return (columns + kUnitKeys - 1) / kUnitKeys;",
        "return columns / kUnitKeys;",
        "the number of units rounded down",
    ),
    Mutant(
        1402,
        "index",
        "factor of another scale group",
        "sm90/index/score_groups.cuh",
        "dot = fma_rn(sums[2][at], factors[half].y, dot);",
        "dot = fma_rn(sums[2][at], factors[half].x, dot);",
        "a group's power of two taken for its neighbour's",
    ),
    Mutant(
        1407,
        "index",
        "rows of a group share the first one's length",
        "sm90/index/unit_keys.cuh",
        "column < shared.fixed->counts[row]",
        "column < shared.fixed->counts[0]",
        "the mask of causality is taken once for all rows",
    ),
    Mutant(
        1408,
        "index",
        "last exchange of a quad sends what stays",
        "sm90/index/unit_keys.cuh",
        "const float give = upper ? pairs[0] : pairs[1];",
        "const float give = upper ? pairs[1] : pairs[0];",
        "lanes of a pair add the sums of two keys",
    ),
)
