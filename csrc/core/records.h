// The record table: the only place that knows the size of a record or where its parts lie.
//
// A record holds the bytes of one entry (or one window token) in one format: a row of codes, then
// scales. A page holds page_size records of one kind in one of two orders:
//   token-major  record after record, each row followed by its own scales;
//   page-split   all rows of the page first, then all scale words.
// A new format is one row of kRecords, a codec if its element is new, and its golden bytes.
#pragma once

#include <cstdint>

#include "core/platform.h"

namespace flash_csa {

enum class RecordId : int32_t { MainFp4, WindowFp8, IndexFp4, MixedFp8, IndexFp8 };
enum class Element : int32_t { E2M1, E4M3 };
enum class ScaleKind : int32_t { E4M3, UE8M0, FP32 };
enum class PageOrder : int32_t { TokenMajor, PageSplit };

struct Record {
    const char* name;
    Element element;
    ScaleKind scale_kind;
    PageOrder order;
    int32_t dims;         // values of one record
    int32_t coded_dims;   // leading values that are quantised; the others are BF16 in the row
    int32_t group;        // values that share a scale
    int32_t data_bytes;   // the row: codes, then BF16 values
    int32_t scale_bytes;  // the scales, padding included
    int32_t page_align;   // a page's payload is rounded up to a multiple of this

    FCSA_HD constexpr int32_t bytes() const { return data_bytes + scale_bytes; }
    FCSA_HD constexpr int32_t num_scales() const { return coded_dims / group; }

    // Bytes of a page of `page_size` records.
    FCSA_HD constexpr int64_t payload(int32_t page_size) const {
        const int64_t used = int64_t{page_size} * bytes();
        return (used + page_align - 1) / page_align * page_align;
    }
    // Byte offset, within its page, of the row and of the scales of record `offset`.
    FCSA_HD constexpr int64_t data_at(int32_t offset) const {
        return int64_t{offset} * (order == PageOrder::TokenMajor ? bytes() : data_bytes);
    }
    FCSA_HD constexpr int64_t scale_at(int32_t offset, int32_t page_size) const {
        return order == PageOrder::TokenMajor
                   ? int64_t{offset} * bytes() + data_bytes
                   : int64_t{page_size} * data_bytes + int64_t{offset} * scale_bytes;
    }
};

inline constexpr int32_t kNumRecords = 5;
inline constexpr int32_t kMaxPageSize = 256;

namespace detail {
// clang-format off
inline constexpr Record kRecords[kNumRecords] = {
    // name        element        scale             page order             dims coded group data scale align
    {"MainFp4",   Element::E2M1, ScaleKind::E4M3,  PageOrder::TokenMajor, 512, 512,  16, 256, 32,   1},
    {"WindowFp8", Element::E4M3, ScaleKind::UE8M0, PageOrder::TokenMajor, 512, 512,  32, 512, 16,   1},
    {"IndexFp4",  Element::E2M1, ScaleKind::UE8M0, PageOrder::PageSplit,  128, 128,  32,  64,  4,   1},
    {"MixedFp8",  Element::E4M3, ScaleKind::UE8M0, PageOrder::PageSplit,  512, 448,  64, 576,  8, 576},
    {"IndexFp8",  Element::E4M3, ScaleKind::FP32,  PageOrder::PageSplit,  128, 128, 128, 128,  4,   1},
};
// clang-format on
}  // namespace detail

// A function, not an array: device code cannot index a host array, but it can fold this.
FCSA_HD constexpr Record record(RecordId id) {
    constexpr Record table[kNumRecords] = {detail::kRecords[0], detail::kRecords[1],
                                           detail::kRecords[2], detail::kRecords[3],
                                           detail::kRecords[4]};
    return table[static_cast<int32_t>(id)];
}

template <RecordId kId>
struct RecordTag {
    static constexpr RecordId kRecord = kId;
};

// f(RecordTag<id>{}) for an id known at run time, on the host.
template <class F>
auto with_record(RecordId id, const F& f) {
    switch (id) {
        case RecordId::MainFp4:
            return f(RecordTag<RecordId::MainFp4>{});
        case RecordId::WindowFp8:
            return f(RecordTag<RecordId::WindowFp8>{});
        case RecordId::IndexFp4:
            return f(RecordTag<RecordId::IndexFp4>{});
        case RecordId::MixedFp8:
            return f(RecordTag<RecordId::MixedFp8>{});
        case RecordId::IndexFp8:
            break;
    }
    return f(RecordTag<RecordId::IndexFp8>{});
}

static_assert(record(RecordId::MainFp4).bytes() == 288);
static_assert(record(RecordId::WindowFp8).bytes() == 528);
static_assert(record(RecordId::IndexFp4).bytes() == 68);
static_assert(record(RecordId::MixedFp8).bytes() == 584);
static_assert(record(RecordId::IndexFp8).bytes() == 132);
// 3 Full layers at half an entry a token and one at a whole: 2.5 entries, the published figure.
static_assert(5 * (record(RecordId::MainFp4).bytes() + record(RecordId::IndexFp4).bytes()) ==
              2 * 890);

}  // namespace flash_csa
