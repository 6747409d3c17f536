"""Faults of the kernel of index_scores for odd page sizes."""

from mutants.mutant import Mutant

MUTANTS = (
    Mutant(
        1421,
        "index",
        "rows of a block score one request's keys",
        "sm90/index/index_scores_plain.cu",
        "if (columns.pages != loaded) {",
        "if (loaded == nullptr) {",
        "rows beside each other mostly are of one request",
        "Page geometry",
    ),
    Mutant(
        1422,
        "index",
        "whole tiles only",
        "sm90/index/index_scores_plain.cu",
        "tile * kThreads < count; tile += plan.slices",
        "(tile + 1) * kThreads <= count; tile += plan.slices",
        "counts of entries are multiples of a tile in benchmarks",
        "Page geometry",
    ),
)
