// Pages whose records are found without a division.
#pragma once

#include <cutlass/fast_math.h>

#include <algorithm>
#include <cstdint>

#include "core/params.h"

namespace flash_csa::sm90 {

struct Places {
    Pages pages;
    int32_t slots = 0;              // that the pages hold: all others are absent
    cutlass::FastDivmod page_size;  // a multiplication and a shift

    Places() = default;
    explicit Places(const Pages& pages)
        : pages(pages),
          slots(pages.data == nullptr ? 0
                                      : static_cast<int32_t>(std::min<int64_t>(
                                            pages.num_pages * pages.page_size, INT32_MAX))),
          page_size(pages.page_size) {}

    __device__ __forceinline__ bool holds(int32_t slot) const {
        return static_cast<uint32_t>(slot) < static_cast<uint32_t>(slots);
    }
    __device__ __forceinline__ uint8_t* row(const Record& r, int32_t slot) const {
        int page, at;
        page_size(page, at, slot);
        return pages.data + page * pages.page_stride + r.data_at(at);
    }
    // The same; null where the slot is absent.
    __device__ __forceinline__ uint8_t* find(const Record& r, int32_t slot) const {
        return holds(slot) ? row(r, slot) : nullptr;
    }
    __device__ __forceinline__ uint8_t* scales(const Record& r, int32_t slot) const {
        int page, at;
        page_size(page, at, slot);
        return pages.data + page * pages.page_stride + r.scale_at(at, pages.page_size);
    }
};

// Of the entries' records.
struct RecordPlaces {
    Places main, index;
};

}  // namespace flash_csa::sm90
