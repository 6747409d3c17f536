"""Faults of Reindex: scores of a pool, selected from shared memory, or from a scan."""

from mutants.mutant import Mutant

MUTANTS = (
    Mutant(
        1411,
        "index",
        "hidden entries of the newest block are scored",
        "sm90/index/pool_scores.cuh",
        "return n_vis - blocks[i] * kPoolBlock;",
        "return n_vis > blocks[i] * kPoolBlock ? kPoolBlock : 0;",
        "a block is whole",
        "Candidate pinning and shortage",
    ),
    Mutant(
        1412,
        "index",
        "of equal scores in a pool, the later entries win",
        "sm90/index/pool_top_k.cuh",
        "return uint64_t{candidate.x} << 32 | ~candidate.y;",
        "return uint64_t{candidate.x} << 32 | candidate.y;",
        "larger is better, for columns too",
    ),
    Mutant(
        1415,
        "index",
        "more candidates than there is room for",
        "sm90/index/pool_top_k.cuh",
        "header.x > static_cast<uint32_t>(room())",
        "header.x > kSent",
        "a block has room for all of the cluster's",
    ),
    Mutant(
        1416,
        "index",
        "exponents fold that integers do not hold",
        "sm90/index/pool_scores.cuh",
        "(shifts & 0xfcfcfcfcu) == 0",
        "(shifts & 0xf8f8f8f8u) == 0",
        "12 half units times 2^7 are taken for a byte",
    ),
    Mutant(
        1417,
        "index",
        "blocks beside those of the pool are not hidden",
        "sm90/index/pool_mask.cu",
        "if (inside != 0xfu) fours[i]",
        "if (inside == 0) fours[i]",
        "four blocks are looked at at once",
    ),
)
