// What a step computes once and every layer shares: slots of its rows and lists, and the schedule.
#include "core/step.h"

#include "core/schedule.h"
#include "cpu/kernels.h"
#include "cpu/parallel.h"

namespace flash_csa::cpu {
namespace {

constexpr int64_t kRowsPerTask = 64;

void fill(int32_t* out, int32_t begin, int32_t end, int32_t value) {
    for (int32_t i = begin; i < end; ++i) out[i] = value;
}

// The row's window list, oldest first. Returns its length.
int32_t window_list(const StepSlotsParams& p, int32_t request, int32_t position, int32_t* slots) {
    const int32_t size = p.window_page_size;
    const int32_t first = window_begin(p, request, position);
    const int32_t length = first <= position ? position - first + 1 : 0;
    for (int32_t column = 0; column < length;) {
        const int32_t page = window_page(p, request, first + column);
        for (int32_t offset = (first + column) % size; offset < size && column < length; ++offset) {
            slots[column++] = slot_of(page, size, offset);
        }
    }
    return length;
}

void slots_of_row(const StepSlotsParams& p, int64_t row) {
    const int32_t position = p.batch.positions[row];
    const int32_t request = p.batch.row_request[row];
    const bool valid = valid_row(p.batch, position, request);
    int32_t* list = p.window_slots.row(row);

    p.window_store[row] = valid ? window_slot(p, request, position) : -1;
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
    const int64_t sections = num_sections(p.num_ratios);
    // For few rows, waking a thread takes longer than all sections.
    const int64_t grain = p.batch.rows < kRowsPerTask ? sections : 1;
    parallel_for(sections, grain, [&](int64_t begin, int64_t end) {
        for (int64_t s = begin; s < end; ++s) build_section(p, static_cast<int32_t>(s));
    });
}

}  // namespace flash_csa::cpu
