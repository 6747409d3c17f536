// The two products of attend on AMX: 16 x 16 results of 32 BF16 terms in one instruction.
//
// A matrix unit reads its second operand as words of two terms. Both operands hold a block of 32
// terms as 16 words, word l = terms l and 16 + l, and the unit adds the low halves in one FMA
// chain, the high halves in another, then their sum to the total: the order of attend.cpp, so the
// bits of every other level. It takes subnormals for 0, which only queries below 2^-64 could show:
// attend_tile.h and attend_records.h keep the other operands away from there.
#pragma once

#include <cstdint>
#include <cstring>

#include "core/numerics.h"
#include "core/params.h"
#include "cpu/attend_records.h"
#include "cpu/attend_tile.h"

#if defined(__x86_64__) && defined(__linux__) && __has_include(<amxbf16intrin.h>)
#define FCSA_HAS_AMX
#pragma GCC diagnostic push  // GCC 12 warns of the undefined vectors of its own header
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#include <immintrin.h>
#pragma GCC diagnostic pop

namespace flash_csa::cpu {

// GCC's tile loads do not say that they read memory: noipa keeps callers from dropping what they
// wrote there.
#ifdef __clang__
#define FCSA_TARGET_AMX __attribute__((noinline, target("amx-tile,amx-bf16")))
#else
#define FCSA_TARGET_AMX __attribute__((noipa, target("amx-tile,amx-bf16")))
#endif

constexpr int kTile = 16;  // rows of a tile register, words of a row
constexpr int kTileWords = kTile * kTile;
constexpr int kWordBlocks = kHeadDim / kTerms;  // of the dims
constexpr int kSideTiles = kSide / kTile;
static_assert(kTile == kChain, "a row of words is a block of terms");

// All 8 tile registers have 16 rows of 64 bytes.
struct TileConfig {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    uint8_t rows[16] = {kTile, kTile, kTile, kTile, kTile, kTile, kTile, kTile};
};
alignas(64) constexpr TileConfig kTileConfig;

// Sets the tile registers up while it lives.
class AmxTiles {
  public:
    FCSA_TARGET_AMX AmxTiles() { _tile_loadconfig(&kTileConfig); }
    FCSA_TARGET_AMX ~AmxTiles() { _tile_release(); }
    AmxTiles(const AmxTiles&) = delete;
    AmxTiles& operator=(const AmxTiles&) = delete;
};

// c[32][32] += a[32][terms] b[terms][32], of FP32 rows of kSide. A tile of a lies a_next behind the
// one above it and a_step behind that of the terms before; b likewise, its tiles side by side.
FCSA_TARGET_AMX inline void multiply_amx(const uint32_t* a, int a_next, int a_step,
                                         const uint32_t* b, int b_next, int b_step, int steps,
                                         float* c) {
    constexpr int kRow = kTile * sizeof(uint32_t);
    constexpr int kOutRow = kSide * sizeof(float);
    float* lower = c + kTile * kSide;
    _tile_loadd(0, c, kOutRow);
    _tile_loadd(1, c + kTile, kOutRow);
    _tile_loadd(2, lower, kOutRow);
    _tile_loadd(3, lower + kTile, kOutRow);
    for (int i = 0; i < steps; ++i, a += a_step, b += b_step) {
        _tile_loadd(4, a, kRow);
        _tile_loadd(5, a + a_next, kRow);
        _tile_loadd(6, b, kRow);
        _tile_loadd(7, b + b_next, kRow);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
    }
    _tile_stored(0, c, kOutRow);
    _tile_stored(1, c + kTile, kOutRow);
    _tile_stored(2, lower, kOutRow);
    _tile_stored(3, lower + kTile, kOutRow);
}

FCSA_HD uint32_t word_of(uint32_t low_bf16, uint32_t high_bf16) {
    return low_bf16 | (high_bf16 << 16);
}

// to[j][i] = from[i][j]: the 8 bits of an index rotated by 4, one perfect shuffle each.
FCSA_HD void transpose(const uint32_t* from, uint32_t* to) {
    uint32_t other[kTileWords];
    const auto shuffle = [](const uint32_t* in, uint32_t* out) {
        FCSA_VECTORISE for (int i = 0; i < kTileWords / 2; ++i) {
            out[2 * i] = in[i];
            out[2 * i + 1] = in[kTileWords / 2 + i];
        }
    };
    shuffle(from, other);
    shuffle(other, to);
    shuffle(to, other);
    shuffle(other, to);
}

struct alignas(64) AmxOperands {
    uint32_t q[kWordBlocks][kSideTiles][kTileWords];              // [word][head]
    uint32_t keys[kWordBlocks][kSide][kTile];                     // [record][word]
    uint32_t values[kSide / kTerms][kWordBlocks][2][kTileWords];  // [word of records][dim]
    uint32_t weights[kSide / kTerms][kSideTiles][kTileWords];     // [head][word of records]

    // Head h's dims 128 b + 8 l + 2 i and the next one are word l of block 4 b + i.
    FCSA_HD void load_query(const AttendParams& p, int64_t row, int first, int heads) {
        std::memset(q, 0, sizeof q);
        for (int t = 0; t * kTile < heads; ++t) {
            const int end = heads - t * kTile < kTile ? heads - t * kTile : kTile;
            for (int part = 0; part < kHeadDim / kTerms; ++part) {
                uint32_t rows[kTileWords] = {};  // [head][32 dims]
                uint32_t columns[kTileWords];
                for (int h = 0; h < end; ++h) {
                    std::memcpy(rows + h * kTile,
                                p.q.at(row, first + t * kTile + h) + part * kTerms,
                                kTile * sizeof *rows);
                }
                transpose(rows, columns);
                for (int w = 0; w < kTile; ++w) {
                    const int word = part % 4 * 4 + w / 4;
                    std::memcpy(q[part / 4 * 4 + w % 4][t] + word * kTile, columns + w * kTile,
                                kTile * sizeof *columns);
                }
            }
        }
    }

    FCSA_HD void put_record(int j, const RecordRef& ref) {
        float values[kHeadDim];
        dequantise(ref, {values, kSide});
        const float* record = values;
        for (int block = 0; block < kWordBlocks; ++block, record += kTerms) {
            FCSA_VECTORISE for (int l = 0; l < kTile; ++l) {
                keys[block][j][l] =
                    word_of(float_bits(record[l]) >> 16, float_bits(record[kChain + l]) >> 16);
            }
        }
    }

    FCSA_HD void clear_records(int begin, int end) {
        for (auto& block : keys) std::memset(block[begin], 0, (end - begin) * sizeof block[0]);
    }

    FCSA_HD void make_logits(TileState& s, int records, int lanes) {
        for (int j = 0; j < records; j += 2 * kTile) {
            for (int h = 0; h < lanes; h += 2 * kTile) {
                multiply_amx(keys[0][j], kTileWords, kSide * kTile, q[0][h / kTile], kTileWords,
                             kSideTiles * kTileWords, kWordBlocks, s.logits + j * kSide + h);
            }
        }
    }

    FCSA_HD void add_values(TileState& s, int records, int heads) {
        const int steps = records / kTerms;
        for (int k = 0; k < steps; ++k) {
            pair_records(k);
            pair_weights(s, k, heads);
        }
        for (int h = 0; h < heads; h += 2 * kTile) {
            for (int block = 0; block < kWordBlocks; ++block) {
                float* out = s.out[block / 2] + h * kSide + block % 2 * kTerms;
                multiply_amx(weights[0][h / kTile], kTileWords, kSideTiles * kTileWords,
                             values[0][block][0], kTileWords, sizeof values[0] / sizeof(uint32_t),
                             steps, out);
            }
        }
    }

    FCSA_HD void pair_records(int k) {
        for (int block = 0; block < kWordBlocks; ++block) {
            const uint32_t* low = keys[block][k * kTerms];
            const uint32_t* high = keys[block][k * kTerms + kChain];
            FCSA_VECTORISE for (int i = 0; i < kTileWords; ++i) {
                values[k][block][0][i] = word_of(low[i] & 0xffffu, high[i]);
                values[k][block][1][i] = (low[i] >> 16) | (high[i] & 0xffff0000u);
            }
        }
    }

    FCSA_HD void pair_weights(const TileState& s, int k, int heads) {
        const float* low = s.logits + k * kTerms * kSide;
        const float* high = low + kChain * kSide;
        for (int t = 0; t * kTile < heads; ++t) {
            uint32_t words[kTileWords];  // [word of records][head]
            for (int l = 0; l < kTile; ++l) {
                const int at = l * kSide + t * kTile;
                FCSA_VECTORISE for (int h = 0; h < kTile; ++h) {
                    words[l * kTile + h] =
                        word_of(float_bits(low[at + h]) >> 16, float_bits(high[at + h]) >> 16);
                }
            }
            transpose(words, weights[k][t]);
        }
    }
};

}  // namespace flash_csa::cpu
#endif
