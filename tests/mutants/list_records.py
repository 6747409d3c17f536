"""Faults of what writes and reads records: codec and compressor."""

from mutants.mutant import Mutant

RECORD_MUTANTS = (
    # ---- codec
    Mutant(
        101,
        "codec",
        "nibbles swapped",
        "core/numerics.h",
        """\
        packed[i] = static_cast<uint8_t>(nibbles[2 * i] | (nibbles[2 * i + 1] << 4));
    }
}

template <int kCount>
FCSA_HD void unpack_nibbles(const uint8_t* packed, uint8_t* nibbles) {
    FCSA_VECTORISE for (int i = 0; i < kCount / 2; ++i) {
        nibbles[2 * i] = packed[i] & 0x0f;
        nibbles[2 * i + 1] = packed[i] >> 4;
""",
        """\
        packed[i] = static_cast<uint8_t>(nibbles[2 * i + 1] | (nibbles[2 * i] << 4));
    }
}

template <int kCount>
FCSA_HD void unpack_nibbles(const uint8_t* packed, uint8_t* nibbles) {
    FCSA_VECTORISE for (int i = 0; i < kCount / 2; ++i) {
        nibbles[2 * i + 1] = packed[i] & 0x0f;
        nibbles[2 * i] = packed[i] >> 4;
""",
        "writer and reader agree on the high nibble for the even channel: every round trip holds",
        "Nibble order",
    ),
    Mutant(
        102,
        "codec",
        "scale of the next group",
        "core/numerics.h",
        "const float scale = decode_e4m3(scales[g]);",
        "const float scale = decode_e4m3(scales[g + 1 < kGroups ? g + 1 : g]);",
        "the reader's index of the scale is one ahead",
        "Tests that can fail",
    ),
    Mutant(
        103,
        "codec",
        "reciprocal instead of division",
        "core/numerics.h",
        "encode_e2m1(div_rn(bf16_to_f32(x[16 * g + i]), divisors[g])) & keep;",
        "encode_e2m1(mul_rn(bf16_to_f32(x[16 * g + i]), div_rn(1.0f, divisors[g]))) & keep;",
        "one division per group instead of sixteen: 42 ties of about 100,000 pairs move",
        "E2M1 ties",
    ),
    Mutant(
        104,
        "codec",
        "E2M1 ties away from zero",
        "core/numerics.h",
        "min_u32(bits & kAbsMask, 0x40c00000u)",
        "min_u32((bits & kAbsMask) + 1u, 0x40c00000u)",
        "rounding by thresholds with >= at every boundary",
        "E2M1 ties",
    ),
    Mutant(
        105,
        "codec",
        "E2M1 without saturation",
        "core/numerics.h",
        "round_magnitude<1, 127>(min_u32(bits & kAbsMask, 0x40c00000u));  // 6",
        "round_magnitude<1, 127>(bits & kAbsMask);",
        "a scale rounded up to a power of two needs no clamp; a nearest E4M3 scale does",
        "E4M3 scale below amax/6",
    ),
    Mutant(
        106,
        "codec",
        "E2M1 loses the sign of zero",
        "core/numerics.h",
        "return static_cast<uint8_t>(code | ((bits >> 28) & 8u));",
        "return static_cast<uint8_t>(code == 0 ? 0u : code | ((bits >> 28) & 8u));",
        "negative zero is tidied up",
        "E2M1 ties",
    ),
    Mutant(
        107,
        "codec",
        "E4M3 ties away from zero",
        "core/numerics.h",
        "round_magnitude<3, 121>(min_u32(mag, 0x43e00000u));",
        "round_magnitude<3, 121>(min_u32(mag + 1u, 0x43e00000u));",
        "round half up",
        "E4M3 exhaustively",
    ),
    Mutant(
        108,
        "codec",
        "E4M3 overflows to NaN",
        "core/numerics.h",
        "round_magnitude<3, 121>(min_u32(mag, 0x43e00000u));",
        "round_magnitude<3, 121>(min_u32(mag, 0x43f00000u));",
        "saturation at 480, the code that E4M3FN gave to NaN",
        "E4M3 scale below amax/6",
    ),
    Mutant(
        109,
        "codec",
        "subnormals read with the leading one",
        "core/numerics.h",
        "return sub_rn(with_one, bits_float(subnormal & (kMinExponent << 23)));",
        "return with_one;",
        "no branch for exponent 0",
        "E4M3 exhaustively",
    ),
    Mutant(
        110,
        "codec",
        "floor of log2",
        "core/numerics.h",
        "min_u32((mag + 0x7fffffu) >> 23, 0xfeu)",
        "min_u32(mag >> 23, 0xfeu)",
        "the exponent field is the floor",
    ),
    Mutant(
        111,
        "codec",
        "main scale without floor",
        "core/numerics.h",
        "encode_e4m3(div_rn(max_nan(amax, 0x1.8p-7f), 6.0f));",
        "encode_e4m3(div_rn(amax, 6.0f));",
        "a group of tiny values divides by a scale of zero",
        "Zero and tiny blocks",
    ),
    Mutant(
        112,
        "codec",
        "window floor on the scale",
        "core/numerics.h",
        "*byte = encode_ue8m0_ceil(div_rn(max_nan(amax, 1e-4f), 448.0f));",
        "*byte = encode_ue8m0_ceil(max_nan(div_rn(amax, 448.0f), 1e-4f));",
        "1e-4 bounds the scale instead of amax",
        "Zero and tiny blocks",
    ),
    Mutant(
        113,
        "codec",
        "Inf saturates",
        "core/numerics.h",
        "*byte = float_bits(amax) >= kInfBits ? kNanE4M3 : finite;",
        "*byte = float_bits(amax) > kInfBits ? kNanE4M3 : finite;",
        "an Inf becomes 448 * 6 and is never seen again",
    ),
    Mutant(
        114,
        "codec",
        "scales where a page of 64 has them",
        "core/records.h",
        ": int64_t{page_size} * data_bytes + int64_t{offset} * scale_bytes;",
        ": int64_t{64} * data_bytes + int64_t{offset} * scale_bytes;",
        "the default page size is wired into the page-split order",
        "Planar versus interleaved record",
    ),
    Mutant(
        115,
        "codec",
        "page stride ignored",
        "core/params.h",
        "return data + slot / page_size * page_stride + r.scale_at(slot % page_size, page_size);",
        "return data + slot / page_size * r.payload(page_size) +\n"
        "               r.scale_at(slot % page_size, page_size);",
        "pages are taken to be packed",
        "Padded page stride",
    ),
    Mutant(
        116,
        "codec",
        "32-bit byte offset",
        "core/params.h",
        "return data + slot / page_size * page_stride + r.data_at(slot % page_size);",
        "return data + ((slot / page_size * page_stride + r.data_at(slot % page_size)) &\n"
        "                       INT32_MAX);",
        "the offset keeps 31 bits: a page beyond 2 GiB lands inside the buffer",
        "2 GiB byte offset",
    ),
    Mutant(
        117,
        "codec",
        "slot equal to the capacity accepted",
        "core/params.h",
        "return slot >= 0 && slot < num_pages * page_size;",
        "return slot >= 0 && slot <= num_pages * page_size;",
        "> instead of >= in a bound check",
    ),
    Mutant(
        118,
        "codec",
        "NaN scale with live codes",
        "core/numerics.h",
        "const uint8_t keep = *scale == kNanUE8M0 ? 0x00 : 0x0f;",
        "const uint8_t keep = 0x0f;",
        "the codes of a group that holds a NaN are whatever the encoder makes of it",
    ),
    # ---- compressor
    Mutant(
        301,
        "compressor",
        "pooled value not rounded",
        "cpu/compress.cpp",
        "pooled[c] = round_bf16(div_rn(acc[c], sum[c]));",
        "pooled[c] = div_rn(acc[c], sum[c]);",
        "the BF16 border between pool and norm is missing",
        "Round to bf16 before quantising",
    ),
    Mutant(
        302,
        "compressor",
        "projected key not rounded",
        "cpu/compress.cpp",
        "            for (int c = 0; c < kIndexDim; ++c) keys[i][c] = round_bf16(keys[i][c]);\n",
        "",
        "the BF16 border between the key projection and its norm is missing",
        "Round to bf16 before quantising",
    ),
    Mutant(
        303,
        "compressor",
        "norm rounds before its weight",
        "core/numerics.h",
        "f32_to_bf16(mul_rn(mul_rn(x[i], factor), w[i]));",
        "f32_to_bf16(mul_rn(round_bf16(mul_rn(x[i], factor)), w[i]));",
        "as RMSNorm is written for other models: a border too many",
        "Round to bf16 before quantising",
    ),
    Mutant(
        304,
        "compressor",
        "rotation of the entry fused",
        "cpu/compress.cpp",
        "    rope_row<kHeadDim>(row, p.cos_sin.at(e.index * p.ratio));\n",
        """\
    const float* cos_sin = p.cos_sin.at(e.index * p.ratio);
    for (int i = 0; i < kRopeDims / 2; ++i) {
        uint16_t* pair = row + kHeadDim - kRopeDims + 2 * i;
        const float a = bf16_to_f32(pair[0]), b = bf16_to_f32(pair[1]);
        pair[0] = f32_to_bf16(fma_rn(a, cos_sin[i], -mul_rn(b, cos_sin[kRopeDims / 2 + i])));
        pair[1] = f32_to_bf16(fma_rn(a, cos_sin[kRopeDims / 2 + i], mul_rn(b, cos_sin[i])));
    }
""",
        "a multiply-add that the compiler would like to make",
        "CPU equals GPU",
    ),
    Mutant(
        321,
        "compressor",
        "latent rotated before it is rounded",
        "cpu/compress.cpp",
        """\
template <int kDim>
inline void make_latent(const CompressParams& p, const Entry& e, uint16_t* latent) {
    float pooled[kDim];
    if (p.kv_bf16) {  // ratio 1: every token is an entry
        const uint16_t* row = p.kv_bf16.row(e.row);
        for (int c = 0; c < kDim; ++c) pooled[c] = bf16_to_f32(row[c]);
    } else {
        pool<kDim>(p, e, pooled);
    }
    rms_norm_row<kDim>(pooled, p.norm_weight, p.eps, latent);
    if (p.latent_out) std::memcpy(p.latent_out.row(e.row), latent, kDim * sizeof *latent);
}

inline void store_main(const CompressParams& p, const Entry& e, const uint16_t* latent) {
    const int32_t slot = p.entry_slots[e.row];
    if (p.main.data == nullptr || !p.main.holds(slot)) return;
    uint16_t row[kHeadDim];
    std::memcpy(row, latent, sizeof row);
    rope_row<kHeadDim>(row, p.cos_sin.at(e.index * p.ratio));
""",
        """\
thread_local float normed[kHeadDim];

template <int kDim>
inline void make_latent(const CompressParams& p, const Entry& e, uint16_t* latent) {
    float pooled[kDim];
    if (p.kv_bf16) {  // ratio 1: every token is an entry
        const uint16_t* row = p.kv_bf16.row(e.row);
        for (int c = 0; c < kDim; ++c) pooled[c] = bf16_to_f32(row[c]);
    } else {
        pool<kDim>(p, e, pooled);
    }
    rms_norm_row<kDim>(pooled, p.norm_weight, p.eps, latent);
    const float factor = rms_factor<kDim>(pooled, p.eps);
    for (int c = 0; c < kDim; ++c) normed[c] = mul_rn(mul_rn(pooled[c], factor), p.norm_weight[c]);
    if (p.latent_out) std::memcpy(p.latent_out.row(e.row), latent, kDim * sizeof *latent);
}

inline void store_main(const CompressParams& p, const Entry& e, const uint16_t* latent) {
    const int32_t slot = p.entry_slots[e.row];
    if (p.main.data == nullptr || !p.main.holds(slot)) return;
    uint16_t row[kHeadDim];
    std::memcpy(row, latent, sizeof row);
    const float* cos_sin = p.cos_sin.at(e.index * p.ratio);
    for (int i = 0; i < kRopeDims / 2; ++i) {
        const int at = kHeadDim - kRopeDims + 2 * i;
        float a = 0, b = 0;
        rope_pair(normed[at], normed[at + 1], cos_sin[i], cos_sin[kRopeDims / 2 + i], &a, &b);
        row[at] = f32_to_bf16(a);
        row[at + 1] = f32_to_bf16(b);
    }
""",
        "the BF16 border between norm and RoPE is missing",
        "Round to bf16 before quantising",
    ),
    Mutant(
        305,
        "compressor",
        "entry rotated at its last token",
        "cpu/compress.cpp",
        "rope_row<kHeadDim>(row, p.cos_sin.at(e.index * p.ratio));",
        "rope_row<kHeadDim>(row, p.cos_sin.at(e.position));",
        "the position of the token that closes the group, j * m + 1 for ratio 2",
        "RoPE of entries and inverse rotation",
    ),
    Mutant(
        306,
        "compressor",
        "index key rotated at its last token",
        "cpu/compress.cpp",
        "rotate_index_vector(key, p.cos_sin.at(e.index * p.ratio), p.rotate);",
        "rotate_index_vector(key, p.cos_sin.at(e.position), p.rotate);",
        "as above, in the key alone",
        "RoPE of entries and inverse rotation",
    ),
    Mutant(
        307,
        "compressor",
        "key projected from the rotated latent",
        "cpu/compress.cpp",
        "        block.add(e, latent);\n",
        "        rope_row<kHeadDim>(latent, p.cos_sin.at(e.index * p.ratio));\n"
        "        block.add(e, latent);\n",
        "the stored vector is at hand, the latent before RoPE is not",
    ),
    Mutant(
        308,
        "compressor",
        "first overlapping group padded with zeros",
        "cpu/compress.cpp",
        "    for (int c = 0; c < kDim; ++c) pooled[c] = round_bf16(",
        """\
    if (p.overlap && e.index == 0) {
        for (int c = 0; c < kDim; ++c) sum[c] += 4.0f * exp_fma(0.0f - largest[c]);
    }
    for (int c = 0; c < kDim; ++c) pooled[c] = round_bf16(""",
        "the missing previous group enters the softmax with gates 0 instead of weights 0",
        "Prefill versus decode compression",
    ),
    Mutant(
        309,
        "compressor",
        "bias of the next row",
        "core/entry.h",
        "p.bias.row(position % p.ratio) + column",
        "p.bias.row((position + 1) % p.ratio) + column",
        "position counted from 1",
    ),
    Mutant(
        310,
        "compressor",
        "roles of the two halves swapped",
        "core/entry.h",
        "p.overlap && position >= e.index * p.ratio ? p.dim : 0;",
        "p.overlap && position < e.index * p.ratio ? p.dim : 0;",
        "the first half of the columns is read for the current group",
        "Prefill versus decode compression",
    ),
    Mutant(
        311,
        "compressor",
        "tail of the neighbour request",
        "core/entry.h",
        """\
        const int64_t slot = p.batch.tail_slot[e.request];
        return {p.tail.kv(slot""",
        """\
        const int64_t slot = e.request % p.tail.slots;
        return {p.tail.kv(slot""",
        "state addressed by the place in the batch instead of the request's slot",
        "Tail state isolation",
    ),
    Mutant(
        312,
        "compressor",
        "tail ring off by one",
        "core/params.h",
        "int64_t{static_cast<int32_t>(position) % ring} * width;",
        "int64_t{(static_cast<int32_t>(position) + 1) % ring} * width;",
        "reader and writer agree on a row that the interface does not name",
        "Prefix reuse",
    ),
    Mutant(
        313,
        "compressor",
        "tail keeps a row too few",
        "cpu/compress.cpp",
        "const int64_t kept = end - p.tail.ring;",
        "const int64_t kept = end - p.tail.ring + 1;",
        "a full ring is written one short",
        "Rollback of rejected tokens",
    ),
    Mutant(
        314,
        "compressor",
        "stored entries computed again",
        "core/entry.h",
        "if (index < first_entry(p, request)) return false;",
        "if (index + 1 < first_entry(p, request)) return false;",
        "entry_first taken for the last stored entry",
    ),
    Mutant(
        315,
        "compressor",
        "no slot means slot 0",
        "cpu/compress.cpp",
        """\
inline void store_main(const CompressParams& p, const Entry& e, const uint16_t* latent) {
    const int32_t slot = p.entry_slots[e.row];
""",
        """\
inline void store_main(const CompressParams& p, const Entry& e, const uint16_t* latent) {
    const int32_t slot = p.entry_slots[e.row] < 0 ? 0 : p.entry_slots[e.row];
""",
        "a target clamped to 0",
        "Slot 0 pollution",
    ),
    Mutant(
        316,
        "compressor",
        "Hadamard left out of the index key",
        "cpu/compress.cpp",
        "p.cos_sin.at(e.index * p.ratio), p.rotate);",
        "p.cos_sin.at(e.index * p.ratio), false);",
        "a flag that is passed on nowhere",
        "Flags take effect",
    ),
    Mutant(
        317,
        "compressor",
        "Hadamard without its scale",
        "core/numerics.h",
        "x[i] = mul_rn(x[i], 0.08838834764831845f);",
        "x[i] = mul_rn(x[i], 0.0625f);",
        "128^-1/2 taken for a power of two",
        "Flags take effect",
    ),
    Mutant(
        318,
        "compressor",
        "eps of the key norm fixed",
        "cpu/compress.cpp",
        "rms_norm_row<kIndexDim>(keys[i], p.key_norm_weight, p.eps, key);",
        "rms_norm_row<kIndexDim>(keys[i], p.key_norm_weight, 1e-6f, key);",
        "the usual 1e-6, though the model has 1e-20",
    ),
    Mutant(
        319,
        "compressor",
        "exponential's polynomial changed",
        "core/numerics.h",
        "p = fma_rn(p, r, 0x1.fffffcp-2f);",
        "p = fma_rn(p, r, 0.5f);",
        "the coefficient of the series instead of the fitted one: an ulp now and then",
        "CPU equals GPU",
    ),
    Mutant(
        320,
        "compressor",
        "sum of squares in order",
        "core/numerics.h",
        """\
        for (int l = 0; l < 32; ++l) lanes[l] = fma_rn(x[base + l], x[base + l], lanes[l]);
    }
""",
        """\
        for (int l = 0; l < 32; ++l) lanes[0] = fma_rn(x[base + l], x[base + l], lanes[0]);
    }
""",
        "one running sum instead of 32: within rounding, but not the same bits",
        "CPU equals GPU",
    ),
)
