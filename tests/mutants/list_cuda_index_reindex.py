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
        "return {relative.x, relative.y, relative.z,",
        "return {relative.y, relative.x, relative.z,",
        "bytes of the scale word taken in pairs the wrong way round",
    ),
    Mutant(
        1413,
        "index",
        "wide exponents take the short way",
        "sm90/index/pool_scores.cuh",
        "plain = __all_sync(~0u, is_plain(odd_key_bits(scales))) && plain;",
        "plain = __all_sync(~0u, lane_ >= 0) && plain;",
        "no random data has such exponents",
        test="tests/test_index_reindex.py::test_exponents_at_the_ends",
    ),
    Mutant(
        1414,
        "index",
        "a stage of the ring filled while it is read",
        "sm90/index/pool_scores.cuh",
        "fetch(unit + kPoolStages * kPoolGroups, stage);",
        "fetch(unit + (kPoolStages - 1) * kPoolGroups, stage);",
        "one unit is fetched twice, the one behind it never",
        test="tests/test_index_reindex.py::test_many_rows_with_long_pools",
    ),
)
