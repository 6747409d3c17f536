// Device against host: every function of csrc/core that back ends share, the same bits on the GPU.
//
// A case turns an index into a few output words, once on the device and once on the host. Inputs
// come from the index itself (all codes, all BF16 values) or from a hash of it (FP32 bit patterns
// of every exponent, NaN and Inf among them). Exit code 77 without a GPU.
#include <cuda_runtime.h>

#include <cstdint>
#include <cstdio>
#include <vector>

#include "core/causal.h"
#include "core/numerics.h"
#include "core/scoring.h"
#include "head_scores.h"

using namespace flash_csa;

namespace {

FCSA_HD uint32_t hash(uint32_t x) {  // a bijective mixer: as many distinct outputs as inputs
    x = (x ^ (x >> 16)) * 0x7feb352du;
    x = (x ^ (x >> 15)) * 0x846ca68bu;
    return x ^ (x >> 16);
}

FCSA_HD uint32_t nan_free_bits(float x) { return float_bits(canonical_nan(x)); }

// BF16 element i of random group `index`: in half of the groups near 1, else of any magnitude.
FCSA_HD uint16_t random_bf16(uint32_t index, uint32_t i) {
    const uint32_t bits = hash(index * 131071u + i);
    return static_cast<uint16_t>((index & 1) != 0 ? bits : (bits & 0x81ffu) | 0x3e00u);
}

FCSA_HD float random_f32(uint32_t index, uint32_t i) {
    return bf16_to_f32(random_bf16(index & ~1u, i)) * (1.0f + (hash(i) & 0xffff) * 0x1p-16f);
}

template <int kCount>
FCSA_HD uint32_t digest(const uint8_t* bytes) {  // FNV-1a
    uint32_t sum = 2166136261u;
    for (int i = 0; i < kCount; ++i) sum = (sum ^ bytes[i]) * 16777619u;
    return sum;
}

template <int kCount>
FCSA_HD uint32_t digest(const uint16_t* values) {
    uint32_t sum = 2166136261u;
    for (int i = 0; i < kCount; ++i) sum = (sum ^ values[i]) * 16777619u;
    return sum;
}

template <int kCount>
FCSA_HD uint32_t digest(const float* values) {
    uint32_t sum = 2166136261u;
    for (int i = 0; i < kCount; ++i) sum = (sum ^ float_bits(values[i])) * 16777619u;
    return sum;
}

struct Codes {  // every byte
    static constexpr uint32_t kCount = 256;
    static FCSA_HD uint32_t run(uint32_t i, int word) {
        const uint8_t byte = static_cast<uint8_t>(i);
        const float decoded[4] = {decode_e4m3(byte), decode_e2m1(byte), decode_ue8m0(byte),
                                  static_cast<float>(e2m1_half_units(byte))};
        return float_bits(decoded[word]);
    }
};

struct Scalars {  // 2^24 FP32 patterns, then every BF16 value at six offsets
    static constexpr uint32_t kRandom = 1u << 24;
    static constexpr uint32_t kCount = kRandom + 6 * 65536;
    static FCSA_HD float input(uint32_t i) {
        const uint32_t low[6] = {0, 1, 0x7fff, 0x8000, 0x8001, 0xffff};
        const uint32_t j = i - kRandom;
        return bits_float(i < kRandom ? hash(i) : (j / 6) << 16 | low[j % 6]);
    }
    static FCSA_HD uint32_t run(uint32_t i, int word) {
        const float x = input(i);
        const float amax = bits_float(float_bits(x) & kAbsMask);
        uint8_t main = 0, window = 0, index = 0;
        const uint32_t scales = float_bits(fp4_main_scale(amax, &main)) ^
                                float_bits(window_scale(amax, &window)) ^
                                float_bits(index_scale(amax, &index));
        if (word == 0) {
            return encode_e4m3(x) | encode_e2m1(x) << 8 | encode_ue8m0_ceil(x) << 16 | main << 24;
        }
        if (word == 1) return f32_to_bf16(x) | window << 16 | index << 24;
        if (word == 2) return scales ^ float_bits(index_fp8_scale(amax));
        return nan_free_bits(exp_fma(x)) ^ nan_free_bits(rsqrt_ieee(x)) * 3u ^ order_key(x) * 5u;
    }
};

struct Groups {  // encoders and what they wrote, decoded
    static constexpr uint32_t kCount = 1u << 18;
    static FCSA_HD uint32_t run(uint32_t i, int word) {
        uint16_t x[128], back[64];
        uint8_t codes[128], scale = 0;
        float values[128], row_scale = 0;
        for (int k = 0; k < 128; ++k) x[k] = random_bf16(i, k);
        if (i % 64 == 0) x[5] = 0x7f80;
        switch (word) {
            case 0:
                encode_groups_main<1>(x, codes, &scale);
                decode_groups_main<1>(codes, &scale, back);
                return digest<8>(codes) ^ digest<16>(back) ^ scale;
            case 1:
                encode_group_index(x, codes, &scale);
                decode_group_index(codes, scale, values);
                return digest<16>(codes) ^ digest<32>(values) ^ scale;
            case 2:
                encode_group_fp8<64>(x, codes, &scale);
                decode_group_fp8<64>(codes, scale, back);
                return digest<64>(codes) ^ digest<64>(back) ^ scale;
            default:
                encode_row_index_fp8(x, codes, &row_scale);
                decode_row_index_fp8(codes, row_scale, values);
                return digest<128>(codes) ^ digest<128>(values) ^ float_bits(row_scale);
        }
    }
};

struct Rows {  // RMSNorm, RoPE there and back, Hadamard
    static constexpr uint32_t kCount = 1u << 15;
    static FCSA_HD uint32_t run(uint32_t i, int word) {
        float x[512], w[512], angles[kRopeDims];
        uint16_t row[512];
        for (int k = 0; k < 512; ++k) x[k] = random_f32(i, k);
        for (int k = 0; k < 512; ++k) w[k] = random_f32(i + 2, k);
        for (int k = 0; k < kRopeDims; ++k) angles[k] = 0.25f * random_f32(i + 4, k);
        if (word == 3) {
            hadamard_128(x);
            return digest<128>(x);
        }
        rms_norm_row<512>(x, w, word == 0 ? 1e-6f : 1e-20f, row);
        if (word == 1) rope_row<512>(row, angles);
        if (word == 2) inverse_rope_row<512>(row, angles);
        return digest<512>(row);
    }
};

struct Scores {  // 32 heads against one key, scales of every exponent
    static constexpr uint32_t kCount = 1u << 14;
    static FCSA_HD uint32_t run(uint32_t i, int word) {
        uint8_t key[64], query[64], k_scales[4], q_scales[4];
        int8_t k_units[kIndexDims], q_units[kIndexDims];
        float dots[32], weights[32];
        for (int k = 0; k < 64; ++k) key[k] = static_cast<uint8_t>(hash(i * 64 + k));
        // Words 0..2: exponents around 0; word 3: any byte, overflow, underflow and NaN included.
        const uint32_t mask = word == 3 ? 0xff : 0x0f;
        const uint32_t base = word == 3 ? 0 : 119;
        for (int g = 0; g < 4; ++g) k_scales[g] = static_cast<uint8_t>(base + (hash(i + g) & mask));
        half_units_row(key, k_units);
        for (int h = 0; h < 32; ++h) {
            const uint32_t seed = (i * 4 + word) * 32 + h;
            for (int k = 0; k < 64; ++k) query[k] = static_cast<uint8_t>(hash(seed * 64 + k));
            for (int g = 0; g < 4; ++g) {
                q_scales[g] = static_cast<uint8_t>(base + (hash(seed * 4 + g) & mask));
            }
            half_units_row(query, q_units);
            dots[h] = head_dot(q_units, q_scales, k_units, k_scales);
            weights[h] = random_f32(seed, h);
        }
        return float_bits(sum_heads(dots, weights, 32));
    }
};

struct Causal {
    static constexpr uint32_t kCount = 1u << 16;
    static FCSA_HD uint32_t run(uint32_t i, int word) {
        const int32_t position = static_cast<int32_t>(i * 17) - 1;
        const int32_t ratio = word == 3 ? 128 : 1 << word;
        return (n_vis(position, ratio) * 7 + n_vis(position, ratio, true)) * 2 +
               closes(position, ratio) + window_length(position, 128, 1000) * 11 +
               window_first(position, 128) * 13;
    }
};

constexpr int kWords = 4;

template <class Case>
__global__ void run_case(uint32_t* out) {
    const uint32_t i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= Case::kCount) return;
    for (int word = 0; word < kWords; ++word) out[i * kWords + word] = Case::run(i, word);
}

// Number of indices at which device and host differ.
template <class Case>
uint32_t compare(const char* name) {
    const size_t words = size_t{Case::kCount} * kWords;
    std::vector<uint32_t> device(words);
    uint32_t* out = nullptr;
    cudaError_t status = cudaMalloc(&out, words * sizeof(uint32_t));
    if (status == cudaSuccess) {
        run_case<Case><<<(Case::kCount + 127) / 128, 128>>>(out);
        status = cudaMemcpy(device.data(), out, words * sizeof(uint32_t), cudaMemcpyDeviceToHost);
        cudaFree(out);
    }
    if (status != cudaSuccess) {
        std::fprintf(stderr, "%s: %s\n", name, cudaGetErrorString(status));
        return 1;
    }
    uint32_t wrong = 0;
    for (uint32_t i = 0; i < Case::kCount; ++i) {
        for (int word = 0; word < kWords; ++word) {
            const uint32_t expected = Case::run(i, word);
            const uint32_t got = device[size_t{i} * kWords + word];
            if (got != expected && wrong++ < 5) {
                std::fprintf(stderr, "%s[%u].%d: device %08x, host %08x\n", name, i, word, got,
                             expected);
            }
        }
    }
    std::printf("%-8s %9u indices, %u differ\n", name, Case::kCount, wrong);
    return wrong;
}

}  // namespace

int main() {
    int devices = 0;
    if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0) {
        std::puts("skipped: no GPU");
        return 77;
    }
    const uint32_t wrong = compare<Codes>("codes") + compare<Scalars>("scalars") +
                           compare<Groups>("groups") + compare<Rows>("rows") +
                           compare<Scores>("scores") + compare<Causal>("causal");
    return wrong == 0 ? 0 : 1;
}
