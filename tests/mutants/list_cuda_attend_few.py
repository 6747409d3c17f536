"""Faults of attention's kernel for 8, 16 and 32 heads."""

from mutants.mutant import Mutant

MUTANTS = (
    Mutant(
        1651,
        "attend",
        "a warp's second eight records are as absent as its first",
        "sm90/attend/few_heads_values.cuh",
        "if ((there >> (g + i / 2 % 2 * 8) & 1) == 0) logits[i] = -INFINITY;",
        "if ((there >> g & 1) == 0) logits[i] = -INFINITY;",
        "half of the rows of a fragment share the other half's mask",
        "Holes in the index list",
    ),
    Mutant(
        1652,
        "attend",
        "sums keep the weight of an older maximum",
        "sm90/attend/few_heads_values.cuh",
        "            sum[c] *= keep;\n",
        "",
        "the output is rescaled in another place, the sum is forgotten",
        test="tests/test_attend_maxima.py",
    ),
    Mutant(
        1653,
        "attend",
        "values keep the weight of an older maximum",
        "sm90/attend/few_heads_values.cuh",
        "if (shared.over[tile.at] != 0) rescale();",
        "",
        "the group that adds values is not told of a higher base",
        test="tests/test_attend_maxima.py",
    ),
    Mutant(
        1654,
        "attend",
        "the second half of the dims meets the query of the first",
        "sm90/attend/few_heads_convert.cuh",
        "2 * (kSpans * group + s) * kQueryPanel",
        "2 * s * kQueryPanel",
        "spans are counted within a warpgroup",
    ),
    Mutant(
        1655,
        "attend",
        "signs of window codes are their neighbours'",
        "sm90/attend/dequant.cuh",
        "permute(low, high, selector)",
        "__byte_perm(low, high, selector)",
        "the intrinsic clears the bits of a selector that ask for a sign",
    ),
)
