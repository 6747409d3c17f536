// Where the rows of a step read and write: slots of window positions and of closed entries. Tables
// are device data: a negative page, or one without a 32-bit slot, is absent.
#pragma once

#include <cstdint>

#include "core/params.h"
#include "core/platform.h"

namespace flash_csa {

// Slot of record `offset` of a page, -1 if the page is absent or has no 32-bit slot.
FCSA_HD int32_t slot_of(int32_t page, int32_t page_size, int32_t offset) {
    const int64_t slot = int64_t{page} * page_size + offset;
    return page >= 0 && slot <= INT32_MAX ? static_cast<int32_t>(slot) : -1;
}

// A padded row has no position or no request.
FCSA_HD bool valid_row(const BatchView& batch, int32_t position, int32_t request) {
    return position >= 0 && request >= 0 && request < batch.requests;
}

// Page that holds a window position: window storage is a ring of pages.
FCSA_HD int32_t window_page(const StepSlotsParams& p, int32_t request, int32_t position) {
    const BlockTable& table = p.window_table;
    if (table.columns == 0) return -1;
    return table.row(request)[position / p.window_page_size % table.columns];
}

FCSA_HD int32_t window_slot(const StepSlotsParams& p, int32_t request, int32_t position) {
    return slot_of(window_page(p, request, position), p.window_page_size,
                   position % p.window_page_size);
}

// Oldest position of the row's window list.
FCSA_HD int32_t window_begin(const StepSlotsParams& p, int32_t request, int32_t position) {
    int32_t first = position - p.window + 1;
    if (p.window_first != nullptr && first < p.window_first[request]) {
        first = p.window_first[request];
    }
    return first < 0 ? 0 : first;
}

// Slot of the entry that the row closes, -1 if it closes none or the entry is stored already.
FCSA_HD int32_t entry_slot(const StepSlotsParams& p, int32_t i, int32_t request, int32_t position) {
    const int64_t tokens = int64_t{position} + 1;
    const int64_t entry = tokens / p.ratios[i] - 1;
    const int64_t column = entry / p.page_sizes[i];
    if (tokens % p.ratios[i] != 0 || column >= p.block_tables[i].columns) return -1;
    if (p.entry_first && entry < p.entry_first.row(i)[request]) return -1;
    return slot_of(p.block_tables[i].row(request)[column], p.page_sizes[i],
                   static_cast<int32_t>(entry % p.page_sizes[i]));
}

FCSA_HD int32_t visible_entries(const StepSlotsParams& p, int32_t i, int32_t position) {
    const int64_t closed = (int64_t{position} + (p.strict ? 0 : 1)) / p.ratios[i];
    const int64_t capacity = int64_t{p.block_tables[i].columns} * p.page_sizes[i];
    return static_cast<int32_t>(closed < capacity ? closed : capacity);
}

}  // namespace flash_csa
