"""Faults of the kernels that store rows and queries."""

from mutants.mutant import Mutant

MUTANTS = (
    Mutant(
        1101,
        "store",
        "heads of whole parts only",
        "sm90/store/rope_store.cu",
        "    const int parts = (p.heads + kGroup * kLoads - 1) / (kGroup * kLoads);",
        "    const int parts = max(p.heads / (kGroup * kLoads), 1);",
        "heads come in sixteens",
        "Head counts and real dispatch",
        test="tests/test_store.py::test_rope_store",
    ),
    Mutant(
        1102,
        "store",
        "a lane's pairs turn by its neighbour's angles",
        "sm90/store/rope_store.cu",
        "const int first = lane % kHeadLanes * kLanePairs;",
        "const int first = (lane + 1) % kHeadLanes * kLanePairs;",
        "lanes counted from one",
    ),
    Mutant(
        1103,
        "store",
        "scale of the neighbouring group",
        "sm90/store/quantize_fp4.cu",
        "scales <<= lane % kHeadLanes / 2 * 8;",
        "scales <<= (lane % kHeadLanes / 2 ^ 1) * 8;",
        "bytes of the word in another order",
    ),
    Mutant(
        1104,
        "store",
        "ties of the largest step",
        "sm90/common/fp4_pairs.cuh",
        "__hfma2(q, __float2half2_rn(0.5f), __float2half2_rn(1028.0f));",
        "__hfma2(q, __float2half2_rn(0.5005f), __float2half2_rn(1028.0f));",
        "rounded away from zero by a factor that is a little too large",
        "E2M1 ties",
        test="tests/test_store.py",
    ),
    Mutant(
        1105,
        "store",
        "sines of the pair before",
        "sm90/store/norm_rope_store.cu",
        "cos_sin[kRopeDims / 2 + lane]",
        "cos_sin[kRopeDims / 2 - 1 + lane]",
        "the halves of the table counted from one",
        test="tests/test_store.py::test_rope_store",
    ),
)
