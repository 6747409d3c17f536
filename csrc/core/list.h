// The records that a row attends, by place in its list: window first, then main. Absent ones (a
// slot outside the pages, an entry of a -1 page) are there with slot -1.
#pragma once

#include <cstdint>

#include "core/params.h"
#include "core/platform.h"

namespace flash_csa {

struct RowList {
    int64_t window = 0;  // records of the window list
    int64_t main = 0;    // of the selection, or of the contiguous entries
    const int32_t* window_slots = nullptr;
    const int32_t* main_slots = nullptr;
    const int32_t* table = nullptr;  // contiguous: the request's pages
    int32_t request = 0, page_size = 1;

    FCSA_HD int64_t size() const { return window + main; }

    // Slot of main record `entry`; the caller asks the pages whether they hold it.
    FCSA_HD int64_t main_slot(int64_t entry) const {
        if (table == nullptr) return main_slots[entry];
        const int32_t page = table[entry / page_size];
        return page < 0 ? -1 : int64_t{page} * page_size + entry % page_size;
    }
};

FCSA_HD int64_t clamp_length(int64_t length, int64_t most) {
    return length < 0 ? 0 : length < most ? length : most;
}

FCSA_HD int64_t list_length(const RecordList& list, int32_t length) {
    return clamp_length(length, list.columns);
}

// Of a row whose main list is not contiguous. A row whose de-rotation position is out of range is
// padded: its list is empty. What is read of the row is asked for before any of it is looked at.
FCSA_HD RowList slot_lists(const AttendParams& p, int64_t row) {
    const int32_t window = p.window.lengths == nullptr ? 0 : p.window.lengths[row];
    const int32_t main = p.main.lengths == nullptr ? 0 : p.main.lengths[row];
    const int32_t position = p.derotate_positions == nullptr ? -1 : p.derotate_positions[row];
    if (p.derotate_positions != nullptr && !p.derotate.holds(position)) return RowList{};
    RowList list;
    list.window = list_length(p.window, window);
    list.window_slots = p.window.slots ? p.window.slots.row(row) : nullptr;
    list.main = list_length(p.main, main);
    list.main_slots = p.main.slots ? p.main.slots.row(row) : nullptr;
    return list;
}

// The same of any row. A row whose request is out of range is padded, too.
FCSA_HD RowList row_list(const AttendParams& p, int64_t row) {
    if (p.contiguous.data == nullptr) return slot_lists(p, row);
    const int32_t window = p.window.lengths == nullptr ? 0 : p.window.lengths[row];
    const int32_t main = p.contiguous_n_vis[row], request = p.contiguous_request[row];
    const int32_t position = p.derotate_positions == nullptr ? -1 : p.derotate_positions[row];
    if (request < 0 || request >= p.contiguous.requests) return RowList{};
    if (p.derotate_positions != nullptr && !p.derotate.holds(position)) return RowList{};
    RowList list;
    list.window = list_length(p.window, window);
    list.window_slots = p.window.slots ? p.window.slots.row(row) : nullptr;
    list.main = clamp_length(main, int64_t{p.contiguous.columns} * p.main.pages.page_size);
    list.table = p.contiguous.row(request);
    list.request = request;
    list.page_size = p.main.pages.page_size;
    return list;
}

}  // namespace flash_csa
