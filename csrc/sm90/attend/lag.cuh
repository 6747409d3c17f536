// How far maxima may lag behind, in every kernel with a running softmax.
#pragma once

namespace flash_csa::sm90 {

// Logits are in units of log 2. What weights are relative to stands until a logit exceeds it by
// kSlack, so that sums and outputs need not be scaled at almost every tile.
inline constexpr float kSlack = 8.f;

}  // namespace flash_csa::sm90
