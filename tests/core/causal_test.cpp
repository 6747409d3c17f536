// Worked examples of core/causal.h.
#include "core/causal.h"

#include "check.h"

int main() {
    using namespace flash_csa;
    CHECK(n_vis(0, 1) == 1 && n_vis(0, 2) == 0 && n_vis(1, 2) == 1);
    CHECK(n_vis(1, 2, true) == 0 && n_vis(2, 2, true) == 1);
    CHECK(n_vis(126, 128) == 0 && n_vis(127, 128) == 1);
    CHECK(n_vis(-1, 1) == 0 && n_vis(-1, 4, true) == 0);
    CHECK(closes(3, 4) && !closes(2, 4) && closes(0, 1) && !closes(-1, 1));
    CHECK(entry_of(7, 4) == 1 && entry_of(8, 4) == 2);
    CHECK(window_first(200, 128) == 73 && window_length(200, 128) == 128);
    CHECK(window_first(5, 128) == 0 && window_length(5, 128) == 6);
    CHECK(window_first(200, 128, 150) == 150 && window_length(200, 128, 150) == 51);
    CHECK(window_length(-1, 128) == 0 && window_length(5, 128, 9) == 0);
    return test::report();
}
