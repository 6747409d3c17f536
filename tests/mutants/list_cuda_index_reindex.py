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
    Mutant(
        1412,
        "index",
        "scale of the next group",
        "sm90/index/pool_scores.cuh",
        "const uint32_t byte = key_scales[i] >> (8 * g) & 0xff;",
        "const uint32_t byte = key_scales[i] >> (8 * (g ^ 1)) & 0xff;",
        "bytes of the scale word taken in pairs the wrong way round",
    ),
    Mutant(
        1413,
        "index",
        "wide exponents take the short way",
        "sm90/index/pool_scores.cuh",
        "moderate = moderate && e >= -kModerateKey && e <= kModerateKey;",
        "moderate = moderate && e >= -kModerateKey - 200 && e <= kModerateKey + 200;",
        "no random data has such exponents",
        test="tests/test_index_reindex.py::test_exponents_at_the_ends",
    ),
    Mutant(
        1414,
        "index",
        "a stage of the ring filled while it is read",
        "sm90/index/pool_scores.cuh",
        "fetch(tile + kStages * kPoolWarps, stage);",
        "fetch(tile + (kStages - 1) * kPoolWarps, stage);",
        "one tile is fetched twice, the one behind it never",
        test="tests/test_index_reindex.py::test_many_rows_with_long_pools",
    ),
)
