"""Faults of the kernels that select: ties, bins, bounds, places, pools."""

from mutants.mutant import Mutant

MUTANTS = (
    Mutant(
        1501,
        "select",
        "a tie lost",
        "sm90/select/candidates.cuh",
        "at < inside && better == need - 1;",
        "at < inside && better == max(need - 2, 0);",
        "an index that counts from one where the ranks count from zero",
        "Tie overflow and infinities",
    ),
    Mutant(
        1502,
        "select",
        "scores far above the bound wrap into low bins",
        "sm90/select/candidates.cuh",
        "return min(key - low >> kFineBits, uint32_t{kDigitBins - 1});",
        "return key - low >> kFineBits & uint32_t{kDigitBins - 1};",
        "the mask of a digit instead of the clamp of a range",
        "Top-k bucket overflow",
    ),
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
        1506,
        "select",
        "a bound that was too high is believed",
        "sm90/select/candidates.cuh",
        "return high <= max(base, 1u);",
        "return true;",
        "the sample is trusted: rows whose best lie close together lose some",
        "Top-k bucket overflow",
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
