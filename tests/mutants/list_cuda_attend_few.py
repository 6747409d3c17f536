"""Faults of attention's kernel for 8, 16 and 32 heads."""

from mutants.mutant import Mutant

MUTANTS = (
    Mutant(
        1651,
        "attend",
        "a warp's second eight records are as absent as its first",
        "sm90/attend/few_heads.cu",
        "if ((there >> (g + i / 2 % 2 * 8) & 1) == 0) logits[i] = -INFINITY;",
        "if ((there >> g & 1) == 0) logits[i] = -INFINITY;",
        "half of the rows of a fragment share the other half's mask",
        "Holes in the index list",
    ),
    Mutant(
        1655,
        "attend",
        "sums of a row's pieces added as they are",
        "sm90/attend/few_heads.cu",
        "                total += exp2_approx(__ldcg(&partials[i].max[threadIdx.x]) - base) *\n"
        "                         __ldcg(&partials[i].sum[threadIdx.x]);",
        "                total += __ldcg(&partials[i].sum[threadIdx.x]);",
        "seen only where rows are cut",
    ),
    Mutant(
        1657,
        "attend",
        "scales of the window where main records have them",
        "sm90/attend/few_heads.cu",
        "record_of(at) + (window ? kWindow.data_bytes : kMain.data_bytes) + 16 * part;",
        "record_of(at) + kMain.data_bytes + 16 * part;",
        "one loader for two records",
        "Real FP4 storage",
    ),
)
