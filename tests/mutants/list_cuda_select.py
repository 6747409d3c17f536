"""Faults of the kernels that select: ties, bins, bounds, places, pools."""

from mutants.mutant import Mutant

MUTANTS = (
    Mutant(
        1503,
        "select",
        "one barrier less before the ranks",
        "sm90/select/cluster_top_k.cuh",
        "            __syncthreads();\n            base += rank_words(base);",
        "            base += rank_words(base);",
        "the prefix sum has barriers of its own, but reads the bits before them",
    ),
    Mutant(
        1507,
        "select",
        "pool without the newest block",
        "sm90/select/score_sources.cuh",
        "return row.columns.n_vis > 0 ? (row.columns.n_vis - 1) / kPoolBlock : -1;",
        "return -1;",
        "the newest block is expected to win by its scores",
        "Candidate pinning and shortage",
    ),
    Mutant(
        1508,
        "select",
        "results of a window start at the row's first",
        "sm90/select/cluster_top_k.cuh",
        "base += rank_words(base);",
        "rank_words(base);",
        "seen where a block owns more ids than a window of bits",
    ),
)
