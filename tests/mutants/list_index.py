"""Faults of what finds entries: causal rule, scores, selection and pool."""

from mutants.mutant import Mutant

INDEX_MUTANTS = (
    # ---- causal rule
    Mutant(
        201,
        "causal",
        "position // ratio",
        "core/causal.h",
        "const int64_t closed = int64_t{position} + (strict ? 0 : 1);",
        "const int64_t closed = int64_t{position} + (strict ? 0 : 0);",
        "the token that closes a group does not see its entry",
        "Visibility at group edges",
    ),
    Mutant(
        202,
        "causal",
        "strict ignored by index and select",
        "core/columns.h",
        "n_vis(position, ratio, strict)",
        "n_vis(position, ratio, strict && false)",
        "the option reaches the op and no further",
        "Visibility at group edges",
    ),
    Mutant(
        203,
        "causal",
        "open group visible",
        "core/causal.h",
        "const int64_t closed = int64_t{position} + (strict ? 0 : 1);",
        "const int64_t closed = int64_t{position} + (strict ? 0 : 1) + ratio - 1;",
        "the number of entries rounded up: an entry of tokens to come",
        "Visibility at group edges",
    ),
    Mutant(
        204,
        "causal",
        "strict ignored by the step",
        "core/step.h",
        "n_vis(position, p.ratios[i], p.strict);",
        "n_vis(position, p.ratios[i]);",
        "the option reaches the op and no further",
        "Visibility at group edges",
    ),
    Mutant(
        205,
        "causal",
        "schedule counts position // ratio",
        "core/schedule.h",
        "n_vis(position, p.ratios[i], p.strict);",
        "position / p.ratios[i];",
        "the schedule has its own idea of what a row sees",
        "Visibility at group edges",
    ),
    Mutant(
        206,
        "causal",
        "one contiguous entry too many",
        "core/list.h",
        "clamp_length(main, int64_t{p.contiguous.columns}",
        "clamp_length(main + 1, int64_t{p.contiguous.columns}",
        "last visible index taken for a count",
        "Visibility at group edges",
    ),
    Mutant(
        207,
        "causal",
        "group closed by its first token",
        "core/causal.h",
        "return position >= 0 && position % ratio == ratio - 1;",
        "return position >= 0 && position % ratio == 0;",
        "position counted from 1",
        "Slot 0 pollution",
    ),
    # ---- scores
    Mutant(
        401,
        "scores",
        "ReLU after the weight",
        "core/scoring.h",
        "return fma_rn(weight, relu(dot), partial);",
        "return add_rn(partial, relu(mul_rn(weight, dot)));",
        "max(0, w * dot): a negative weight counts positive or not at all",
        "Score formula",
    ),
    Mutant(
        402,
        "scores",
        "heads summed in a row",
        "core/scoring.h",
        "add_rn(add_rn(partials[0], partials[1]), add_rn(partials[2], partials[3])));",
        "add_rn(add_rn(add_rn(partials[0], partials[1]), partials[2]), partials[3]));",
        "the last additions in another order: within rounding, but not the same bits",
        "CPU equals GPU",
    ),
    Mutant(
        403,
        "scores",
        "heads dealt out one by one",
        "core/scoring.h",
        "return (head % 8) / 2;",
        "return head % 4;",
        "another partial sum for most heads: within rounding, but not the same bits",
        "CPU equals GPU",
    ),
    Mutant(
        404,
        "scores",
        "groups combined from the last",
        "core/scoring.h",
        """\
    float dot = mul_rn(mul_rn(static_cast<float>(quarters[0]), 0.25f), scales[0]);
    for (int g = 1; g < kIndexGroups; ++g) {
""",
        """\
    float dot = mul_rn(mul_rn(static_cast<float>(quarters[3]), 0.25f), scales[3]);
    for (int g = kIndexGroups - 2; g >= 0; --g) {
""",
        "the chain runs the other way: seen where exponents of groups lie far apart",
        "CPU equals GPU",
    ),
    Mutant(
        405,
        "scores",
        "NaN passes as zero",
        "core/scoring.h",
        "return x < 0.0f ? 0.0f : x;",
        "return x > 0.0f ? x : 0.0f;",
        "ReLU as everybody writes it: a key of NaN scores 0 and can be selected",
        "NaN poison in unused cache",
    ),
    Mutant(
        406,
        "scores",
        "key scales read big-endian",
        "cpu/score_keys.h",
        "scales[g][e] = decode_ue8m0(static_cast<uint8_t>(words[e] >> (8 * g)));",
        "scales[g][e] = decode_ue8m0(static_cast<uint8_t>(words[e] >> (8 * (3 - g))));",
        "the first group in the highest byte",
        "Planar versus interleaved record",
    ),
    Mutant(
        407,
        "scores",
        "FP8 query scale dropped",
        "cpu/score_keys.h",
        "return mul_rn(mul_rn(head.scales[0], keys.scales[0][e]), sum);",
        "return mul_rn(keys.scales[0][e], sum);",
        "harmless for the order within a head, wrong for the sum over heads",
        "Score formula",
    ),
    Mutant(
        408,
        "scores",
        "tail of a row's keys skipped",
        "cpu/index.cpp",
        "if (visible == 0) continue;",
        "if (visible < lanes_) continue;",
        "a block of keys that a row sees in part is left out for it",
        "Page geometry",
    ),
    Mutant(
        409,
        "scores",
        "Hadamard before RoPE",
        "cpu/row_codec.h",
        """\
    rope_row<kIndexDim>(x, cos_sin);
    if (!hadamard) return;
    float values[kIndexDim];
    for (int i = 0; i < kIndexDim; ++i) values[i] = bf16_to_f32(x[i]);
    hadamard_128(values);
    for (int i = 0; i < kIndexDim; ++i) x[i] = f32_to_bf16(values[i]);
""",
        """\
    if (hadamard) {
        float values[kIndexDim];
        for (int i = 0; i < kIndexDim; ++i) values[i] = bf16_to_f32(x[i]);
        hadamard_128(values);
        for (int i = 0; i < kIndexDim; ++i) x[i] = f32_to_bf16(values[i]);
    }
    rope_row<kIndexDim>(x, cos_sin);
""",
        "the same order for keys and queries, so scores of equal positions agree",
        "Flags take effect",
    ),
    Mutant(
        410,
        "scores",
        "Hadamard left out of the query",
        "cpu/store.cpp",
        "rotate_index_vector(head, p.cos_sin.at(p.positions[t]), p.rotate);",
        "rotate_index_vector(head, p.cos_sin.at(p.positions[t]), false);",
        "a flag that is passed on nowhere",
        "Flags take effect",
    ),
    Mutant(
        411,
        "scores",
        "even and odd channels of the key swapped at AVX512-VNNI",
        "cpu/score_keys_vnni.h",
        """\
                _mm512_store_si512(&out->words[2 * w][v], _mm512_shuffle_epi8(table, even));
                _mm512_store_si512(&out->words[2 * w + 1][v], _mm512_shuffle_epi8(table, odd));
""",
        """\
                _mm512_store_si512(&out->words[2 * w][v], _mm512_shuffle_epi8(table, odd));
                _mm512_store_si512(&out->words[2 * w + 1][v], _mm512_shuffle_epi8(table, even));
""",
        "one variant of the inner loop has its own nibble order",
        "Nibble order",
    ),
    # ---- select
    Mutant(
        501,
        "select",
        "ties to the higher position",
        "cpu/topk.h",
        """\
        for (int32_t i = 0; i < size_; ++i) ties -= keys_[i] > threshold_ ? 1 : 0;
        int32_t kept = 0;
        for (int32_t i = 0; i < size_; ++i) {
            const bool tied = keys_[i] == threshold_ && ties > 0;
""",
        """\
        for (int32_t i = 0; i < size_; ++i) ties -= keys_[i] > threshold_ ? 1 : 0;
        int32_t skipped = -ties;
        for (int32_t i = 0; i < size_; ++i) skipped += keys_[i] == threshold_ ? 1 : 0;
        int32_t kept = 0;
        for (int32_t i = 0; i < size_; ++i) {
            const bool tied = keys_[i] == threshold_ && skipped-- <= 0;
""",
        "any k of the tied are right, as far as their scores tell",
        "Rank-identical top-k",
    ),
    Mutant(
        502,
        "select",
        "-0.0 below +0.0",
        "core/scoring.h",
        "(bits & kAbsMask) == 0 ? 0x80000000u : bits ^ (negative | 0x80000000u);",
        "bits ^ (negative | 0x80000000u);",
        "the order of the bits is not the order of the numbers",
        "Tie overflow and infinities",
    ),
    Mutant(
        503,
        "select",
        "NaN selected",
        "core/scoring.h",
        "return (bits & kAbsMask) > kInfBits ? 0u : key;",
        "return key;",
        "a NaN has larger bits than Inf, so it comes first",
        "NaN poison in unused cache",
    ),
    Mutant(
        504,
        "select",
        "-Inf never selected",
        "core/scoring.h",
        "return (bits & kAbsMask) > kInfBits ? 0u : key;",
        "return (bits & kAbsMask) > kInfBits || bits == (kInfBits | 0x80000000u) ? 0u : key;",
        "-Inf taken for a mask, though it is a score like any other",
        "Tie overflow and infinities",
    ),
    Mutant(
        505,
        "select",
        "entries of absent pages selected",
        "cpu/select.cpp",
        "if (slot < 0) std::fill_n(keys + (column - begin), length, 0u);",
        "if (slot == kHidden) std::fill_n(keys + (column - begin), length, 0u);",
        "only invisible columns are masked, not those whose page is elsewhere",
        "Holes in the index list",
    ),
    Mutant(
        506,
        "select",
        "last range of a long row lost",
        "cpu/select.cpp",
        "for (int64_t i = 0; i < num_parts; ++i) {",
        "for (int64_t i = 0; i < num_parts - (num_parts > 1 ? 1 : 0); ++i) {",
        "a row cut for the threads is joined from one part too few",
        "Top-k bucket overflow",
    ),
    Mutant(
        507,
        "select",
        "length is what could be selected",
        "cpu/write_lists.h",
        "out.lengths[row] = best.size();",
        "out.lengths[row] = std::min(k, columns.n_vis);",
        "entries that may not be selected are counted",
        "Holes in the index list",
    ),
    Mutant(
        508,
        "select",
        "pages of the first request",
        "core/columns.h",
        "row(padded ? 0 : request);",
        "row(0);",
        "a table of one request works in every test of one request",
        "Prefix reuse",
    ),
    Mutant(
        509,
        "select",
        "at most 512 ties kept",
        "cpu/topk.h",
        "int32_t ties = k_;  // pairs at the threshold that are kept, the lowest ids",
        "int32_t ties = std::min(k_, 512);",
        "a fixed number of tied candidates is kept",
        "Tie overflow and infinities",
    ),
    # ---- pool
    Mutant(
        601,
        "pool",
        "newest block not forced",
        "cpu/select.cpp",
        "        block_keys[newest] = kForcedKey;\n",
        "",
        "the block of the newest position competes with full old ones",
        "Candidate pinning and shortage",
    ),
    Mutant(
        602,
        "pool",
        "block after the newest forced",
        "cpu/select.cpp",
        "(state->columns.n_vis - 1) / kPoolBlock - first;",
        "state->columns.n_vis / kPoolBlock - first;",
        "number of positions taken for the last position: seen where a block is full",
        "Candidate pinning and shortage",
    ),
    Mutant(
        603,
        "pool",
        "block maximum over invisible positions",
        "cpu/select.cpp",
        "    uint32_t block_keys[kChunkBlocks];\n",
        """\
    uint32_t block_keys[kChunkBlocks];
    const int32_t open = p.scores ? std::min<int32_t>(-n & (kPoolBlock - 1), p.columns - end) : 0;
    order_keys_body(scores + n, open, keys + n);
""",
        "whole blocks are read, whatever their last columns hold",
        "Candidate pinning and shortage",
    ),
    Mutant(
        604,
        "pool",
        "columns returned as positions",
        "cpu/write_lists.h",
        "positions[i] = static_cast<int32_t>(columns.position(best.id(i)));",
        "positions[i] = best.id(i);",
        "a selection within a pool is not mapped back",
    ),
    Mutant(
        605,
        "pool",
        "block maximum of seven positions",
        "cpu/select.cpp",
        "for (int32_t i = 0; i < kPoolBlock; ++i) best =",
        "for (int32_t i = 1; i < kPoolBlock; ++i) best =",
        "a loop that starts with the first value in hand, and does not have it",
        "Candidate pinning and shortage",
    ),
    Mutant(
        606,
        "pool",
        "forced block scored as forced",
        "cpu/write_lists.h",
        "scores[i] = score_of_key(key == kForcedKey ? newest_key : key);",
        "scores[i] = score_of_key(key);",
        "the mark that forces a block leaks into the scores that shards are merged by",
    ),
    Mutant(
        607,
        "pool",
        "duplicates kept",
        "cpu/pool.cpp",
        "            kept.erase(std::unique(kept.begin(), kept.end()), kept.end());\n",
        "",
        "foreign lists are taken to be unique",
        "Block list contract",
    ),
    Mutant(
        608,
        "pool",
        "block without a visible position kept",
        "cpu/pool.cpp",
        "int64_t{blocks[i]} * kPoolBlock < n_vis",
        "int64_t{blocks[i]} * kPoolBlock <= n_vis",
        "the block behind the last full one",
        "Block list contract",
    ),
    Mutant(
        609,
        "pool",
        "row reads its neighbour's pool",
        "core/columns.h",
        "columns.blocks = p.pool.blocks.row(row);",
        "columns.blocks = p.pool.blocks.row(request);",
        "a pool per request instead of per query token",
    ),
)
