"""Faults of the compressor's kernels."""

from mutants.mutant import Mutant

MUTANTS = (
    Mutant(
        1303,
        "compress",
        "tail rows that were read stay",
        "sm90/compress/tail.cuh",
        "        if (row < 0) continue;\n",
        "        continue;\n",
        "a reader leaves the slot to a writer that leaves it to the reader",
        "Tail state isolation",
    ),
    Mutant(
        1304,
        "compress",
        "tail rows replaced before they are read",
        "sm90/compress/tail.cuh",
        "        if (is_read(p, row, position, half)) continue;\n",
        "",
        "every block keeps its own rows: a race between blocks",
        "Tail state isolation",
    ),
    Mutant(
        1306,
        "compress",
        "projected key not rounded",
        "sm90/compress/rows.cu",
        "make_float2(round_bf16(key_sum(sums, n, 0)), round_bf16(key_sum(sums, n, 1)));",
        "make_float2(key_sum(sums, n, 0), key_sum(sums, n, 1));",
        "the norm takes FP32 anyway",
        "Round to bf16 before quantising",
    ),
)
