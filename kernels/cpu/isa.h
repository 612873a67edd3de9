// The instruction sets that kernels are compiled for, and which of them this machine runs.
#pragma once

#include <cstdint>
#include <string>

namespace mla::cpu {

// In the order of variants(), the best first: variant n is Isa(n - 1).
enum class Isa : int32_t { kAmx, kAvx512Bf16, kAvx512, kAvx2, kPortable };

constexpr int32_t kIsas = 5;

const char* name_of(Isa isa);

// Asked of the machine once. For AMX that includes asking the kernel for the permission to use its tiles.
bool runs_here(Isa isa);

// Of a params struct's `variant`: 0 is the best that this machine runs, n is the n-th. Returns what is wrong, or "".
std::string choose(int32_t variant, Isa& isa);

}  // namespace mla::cpu
