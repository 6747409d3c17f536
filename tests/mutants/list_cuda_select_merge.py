"""Faults of the kernels that merge lists of shards and put foreign ones in order."""

from mutants.mutant import Mutant

MUTANTS = (
    Mutant(
        1521,
        "select",
        "one window of ids",
        "sm90/select/shard_keys.cuh",
        "            first = next;\n",
        "            first = kNoId;\n",
        "tests have short contexts",
        test="tests/test_pool.py::test_merges_of_long_contexts",
    ),
    Mutant(
        1522,
        "select",
        "an id of two shards has the first one's score",
        "sm90/select/shard_keys.cuh",
        "atomicMax(&table[id - first], key);",
        "atomicCAS(&table[id - first], 0u, key);",
        "shards have no id in common",
        test="tests/test_pool.py::test_merges_are_the_reference",
    ),
    Mutant(
        1524,
        "select",
        "blocks that are not whole left out",
        "sm90/select/normalize_pool.cu",
        "n_vis / kPoolBlock + (n_vis % kPoolBlock != 0);",
        "n_vis / kPoolBlock;",
        "a division that rounds down",
        "Block list contract",
    ),
    Mutant(
        1525,
        "select",
        "every window of bits starts the list anew",
        "sm90/select/normalize_pool.cu",
        "count = append(first, end, count, out, shared);",
        "count = append(first, end, 0, out, shared);",
        "one window in most contexts",
        test="tests/test_pool.py::test_foreign_lists_of_long_contexts",
    ),
)
