#include "kernels/cpu/isa.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace mla::cpu {
namespace {

#if defined(__x86_64__)

// Compilers' own test knows that the system saves the registers, but not every name.
bool has_avx2() {
  unsigned a, b, c, d;
  constexpr unsigned kF16C = 1u << 29;
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __get_cpuid(1, &a, &b, &c, &d) != 0 &&
         (c & kF16C) != 0;
}

bool has_avx512() {
  return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}

bool has_avx512_bf16() { return has_avx512() && __builtin_cpu_supports("avx512bf16"); }

bool has_amx_tiles() {
#if defined(JAX_MLA_EMULATE_AMX)
  return true;
#elif defined(__linux__)
  unsigned a, b, c, d;
  constexpr unsigned kAmxBf16 = 1u << 22, kAmxTile = 1u << 24;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || (d & kAmxBf16) == 0 || (d & kAmxTile) == 0) return false;
  // Tiles are off until the process asks for them; the permission then holds for all its threads.
  constexpr int kRequestPermission = 0x1023, kTileData = 18;
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#else
  return false;
#endif
}

#endif

struct Machine {
  bool runs[kIsas] = {};

  Machine() {
    runs[static_cast<int>(Isa::kPortable)] = true;
#if defined(__x86_64__)
    runs[static_cast<int>(Isa::kAvx2)] = has_avx2();
    runs[static_cast<int>(Isa::kAvx512)] = has_avx512();
    runs[static_cast<int>(Isa::kAvx512Bf16)] = has_avx512_bf16();
    runs[static_cast<int>(Isa::kAmx)] = has_avx512_bf16() && has_amx_tiles();
#endif
  }
};

}  // namespace

const char* name_of(Isa isa) {
  switch (isa) {
    case Isa::kAmx: return "amx";
    case Isa::kAvx512Bf16: return "avx512_bf16";
    case Isa::kAvx512: return "avx512";
    case Isa::kAvx2: return "avx2";
    case Isa::kPortable: return "portable";
  }
  return "";
}

bool runs_here(Isa isa) {
  static const Machine machine;
  return machine.runs[static_cast<int>(isa)];
}

std::string choose(int32_t variant, Isa& isa) {
  if (variant < 0 || variant > kIsas) {
    return "variant is " + std::to_string(variant) + ", expected 0 (the best) to " + std::to_string(kIsas);
  }
  if (variant > 0) {
    isa = static_cast<Isa>(variant - 1);
    if (runs_here(isa)) return {};
    return std::string("this machine cannot run the variant '") + name_of(isa) + "'";
  }
  for (int32_t i = 0; i < kIsas; ++i) {
    isa = static_cast<Isa>(i);
    if (runs_here(isa)) break;
  }
  return {};
}

}  // namespace mla::cpu
