// Which entries and window tokens a query may read. A padded row has position -1: it sees nothing
// and closes nothing. Ratios are at least 1; layers of ratio 0 have no entries and do not ask.
// Positions are device data: no value of theirs overflows.
#pragma once

#include <cstdint>

#include "core/platform.h"

namespace flash_csa {

// Number of entries visible at a position. Inclusive: the token that closes a group sees its entry;
// strict leaves that entry to the next token.
FCSA_HD int32_t n_vis(int32_t position, int32_t ratio, bool strict = false) {
    if (position < 0) return 0;
    const int64_t closed = int64_t{position} + (strict ? 0 : 1);
    // At most 2^31: a division of 32 bits, which costs a kernel a fifth of one of 64.
    const uint32_t visible = static_cast<uint32_t>(closed) / static_cast<uint32_t>(ratio);
    return static_cast<int32_t>(visible < INT32_MAX ? visible : INT32_MAX);
}

// True where the token at a position is the last of its group.
FCSA_HD bool closes(int32_t position, int32_t ratio) {
    return position >= 0 && position % ratio == ratio - 1;
}

// Entry to which the token at a position (not padded) belongs.
FCSA_HD int32_t entry_of(int32_t position, int32_t ratio) { return position / ratio; }

// Oldest position in the window of a query; first is the oldest that the window storage holds
// (bounded replay), 0 otherwise.
FCSA_HD int32_t window_first(int32_t position, int32_t window, int32_t first = 0) {
    const int32_t oldest = position - (window - 1);
    const int32_t held = first > 0 ? first : 0;
    return oldest > held ? oldest : held;
}

// Number of positions in that window, the query's own included.
FCSA_HD int32_t window_length(int32_t position, int32_t window, int32_t first = 0) {
    const int32_t length = position - window_first(position, window, first) + 1;
    return position < 0 || length < 0 ? 0 : length;
}

}  // namespace flash_csa
