// What a step computes once and every layer shares: slots of its rows and lists, and the schedule.
#include "core/schedule.h"
#include "cpu/kernels.h"
#include "cpu/parallel.h"

namespace flash_csa::cpu {
namespace {

constexpr int64_t kRowsPerTask = 64;

// Slot of record `offset` of a page, -1 if the page is absent or has no 32-bit slot.
int32_t slot_of(int32_t page, int32_t page_size, int32_t offset) {
    const int64_t slot = int64_t{page} * page_size + offset;
    return page >= 0 && slot <= INT32_MAX ? static_cast<int32_t>(slot) : -1;
}

void fill(int32_t* out, int32_t begin, int32_t end, int32_t value) {
    for (int32_t i = begin; i < end; ++i) out[i] = value;
}

// Page that holds a window position: window storage is a ring of pages.
int32_t window_page(const StepSlotsParams& p, int32_t request, int32_t position) {
    const BlockTable& table = p.window_table;
    if (table.columns == 0) return -1;
    return table.row(request)[position / p.window_page_size % table.columns];
}

// The row's window list, oldest first. Returns its length.
int32_t window_list(const StepSlotsParams& p, int32_t request, int32_t position, int32_t* slots) {
    const int32_t size = p.window_page_size;
    int32_t first = position - p.window + 1;
    if (p.window_first != nullptr && first < p.window_first[request]) {
        first = p.window_first[request];
    }
    if (first < 0) first = 0;
    const int32_t length = first <= position ? position - first + 1 : 0;
    for (int32_t column = 0; column < length;) {
        const int32_t page = window_page(p, request, first + column);
        for (int32_t offset = (first + column) % size; offset < size && column < length; ++offset) {
            slots[column++] = slot_of(page, size, offset);
        }
    }
    return length;
}

// Slot of the entry that the row closes, -1 if it closes none or the entry is stored already.
int32_t entry_slot(const StepSlotsParams& p, int32_t i, int32_t request, int32_t position) {
    const int64_t tokens = int64_t{position} + 1;
    const int64_t entry = tokens / p.ratios[i] - 1;
    const int64_t column = entry / p.page_sizes[i];
    if (tokens % p.ratios[i] != 0 || column >= p.block_tables[i].columns) return -1;
    if (p.entry_first && entry < p.entry_first.row(i)[request]) return -1;
    return slot_of(p.block_tables[i].row(request)[column], p.page_sizes[i],
                   static_cast<int32_t>(entry % p.page_sizes[i]));
}

int32_t visible_entries(const StepSlotsParams& p, int32_t i, int32_t position) {
    const int64_t closed = (int64_t{position} + (p.strict ? 0 : 1)) / p.ratios[i];
    const int64_t capacity = int64_t{p.block_tables[i].columns} * p.page_sizes[i];
    return static_cast<int32_t>(closed < capacity ? closed : capacity);
}

void slots_of_row(const StepSlotsParams& p, int64_t row) {
    const int32_t position = p.batch.positions[row];
    const int32_t request = p.batch.row_request[row];
    const bool valid = position >= 0 && request >= 0 && request < p.batch.requests;
    int32_t* list = p.window_slots.row(row);

    p.window_store[row] = valid ? slot_of(window_page(p, request, position), p.window_page_size,
                                          position % p.window_page_size)
                                : -1;
    const int32_t length = valid ? window_list(p, request, position, list) : 0;
    p.window_lengths[row] = length;
    fill(list, length, p.window, -1);
    for (int32_t i = 0; i < p.num_ratios; ++i) {
        p.entry_slots.row(i)[row] = valid ? entry_slot(p, i, request, position) : -1;
        p.n_vis.row(i)[row] = valid ? visible_entries(p, i, position) : 0;
    }
}

}  // namespace

void step_slots(const StepSlotsParams& p) {
    parallel_for(p.batch.rows, kRowsPerTask, [&](int64_t begin, int64_t end) {
        for (int64_t row = begin; row < end; ++row) slots_of_row(p, row);
    });
}

void schedule(const ScheduleParams& p) {
    parallel_for(num_sections(p.num_ratios), 1, [&](int64_t begin, int64_t end) {
        for (int64_t s = begin; s < end; ++s) build_section(p, static_cast<int32_t>(s));
    });
}

}  // namespace flash_csa::cpu
