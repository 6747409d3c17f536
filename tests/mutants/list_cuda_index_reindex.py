"""Faults of Reindex: scores of a pool, selected from shared memory."""

from mutants.mutant import Mutant

MUTANTS = (
    Mutant(
        1411,
        "index",
        "hidden entries of the newest block are scored",
        "sm90/index/reindex.cu",
        "min(kPoolBlock, row.columns.n_vis - static_cast<int32_t>(position))};",
        "kPoolBlock};",
        "a block is whole",
        "Candidate pinning and shortage",
    ),
)
