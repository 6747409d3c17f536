// Where the rows of a step read and write: slots of window positions and of closed entries. Tables
// are device data: a negative page, or one without a 32-bit slot, is absent.
#pragma once

#include <cstdint>

#include "core/causal.h"
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

// Oldest position of the row's window list; behind the row's own where a replay starts later.
FCSA_HD int32_t window_begin(const StepSlotsParams& p, int32_t request, int32_t position) {
    return window_first(position, p.window, p.window_first ? p.window_first[request] : 0);
}

// Slot of the entry that the row closes, -1 if it closes none or the entry is stored already.
FCSA_HD int32_t entry_slot(const StepSlotsParams& p, int32_t i, int32_t request, int32_t position) {
    const int32_t entry = entry_of(position, p.ratios[i]);
    const int32_t column = entry / p.page_sizes[i];
    if (!closes(position, p.ratios[i]) || column >= p.block_tables[i].columns) return -1;
    if (p.entry_first && entry < p.entry_first.row(i)[request]) return -1;
    return slot_of(p.block_tables[i].row(request)[column], p.page_sizes[i],
                   entry % p.page_sizes[i]);
}

// Entries that the row sees, clipped to what its block table can address.
FCSA_HD int32_t visible_entries(const StepSlotsParams& p, int32_t i, int32_t position) {
    const int32_t closed = n_vis(position, p.ratios[i], p.strict);
    const int64_t capacity = int64_t{p.block_tables[i].columns} * p.page_sizes[i];
    return closed < capacity ? closed : static_cast<int32_t>(capacity);
}

}  // namespace flash_csa
