"""Faults of the kernel of index_scores for IndexFp8 keys."""

from mutants.mutant import Mutant

MUTANTS = (
    Mutant(
        1431,
        "index",
        "keys of a page share the first one's scale",
        "sm90/index/index_scores_fp8.cu",
        "const int64_t scale_at = r.scale_at(place.at, index.page_size);",
        "const int64_t scale_at = r.scale_at(0, index.page_size);",
        "scales lie behind the codes of the page",
    ),
    Mutant(
        1432,
        "index",
        "groups of an FP4 head taken to the top one's exponent",
        "sm90/index/index_scores_fp8.cu",
        "max(127 + kTopExponent - below, 0)",
        "max(127 + kTopExponent - below / 32, 0)",
        "most groups of a head have one exponent",
    ),
)
