// Constants of the online softmax, which works in base 2.
#pragma once

namespace mla {

constexpr float kLog2E = 1.4426950408889634f;
constexpr float kLn2 = 0.6931471805599453f;

// Where the reference of the exponents follows a row's maximum only when that has grown by more than 2^8, weights stay
// below 256, which bf16 and fp16 hold as precisely as most below 1, and the output is seldom rescaled.
constexpr float kSlack = 8.0f;

}  // namespace mla
