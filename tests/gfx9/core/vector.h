// How a vector instruction is made of a lambda over one lane's values.
#pragma once

#include <tuple>
#include <utility>

#include "machine.h"
#include "registry.h"

namespace gfx9 {

// With MODE's bit FP16_OVFL set, results of 16 bits clamp as well. Only 8-bit conversions and matrix instructions are
// modelled in that mode.
inline void refuse_overflow_mode(const Wave& wave) {
  if (wave.mode & kModeFp16Overflow) throw Fault("a 16-bit float result with FP16_OVFL set is not modelled");
}

// A lambda (sources...) -> result. Operand 0 is the result, the sources follow; with kAccumulates the last source is
// the result's old value. Float results take the output modifiers.
template <bool kAccumulates>
struct VectorAlu {
  template <class F, class R, class... A>
  struct Of {
    static constexpr int kSources = sizeof...(A);

    static void run(Wave& wave, const Instruction& in) { apply(wave, in, std::make_index_sequence<kSources>{}); }

    template <size_t... I>
    static void apply(Wave& wave, const Instruction& in, std::index_sequence<I...>) {
      alignas(64) std::tuple<std::array<A, kLanes>...> sources;
      (read(wave, in, kAccumulates && I + 1 == kSources ? 0 : I + 1, I, std::get<I>(sources).data()), ...);
      alignas(64) R values[kLanes];
      for (int lane = 0; lane < kLanes; ++lane) values[lane] = F{}(std::get<I>(sources)[lane]...);
      if constexpr (std::is_same_v<R, _Float16>) refuse_overflow_mode(wave);
      if constexpr (!std::is_integral_v<R>) modify(in, values);
      if constexpr (std::is_integral_v<R>)
        if (in.clamp) throw Fault("clamping an integer is not modelled");
      write(wave, in, 0, values, kSources);
    }
  };
};

template <class R>
void modify(const Instruction& in, R* values) {
  if (in.output_scale) {
    R scale = static_cast<R>(in.output_scale == 1 ? 2.0f : in.output_scale == 2 ? 4.0f : 0.5f);
    for (int lane = 0; lane < kLanes; ++lane) values[lane] *= scale;
  }
  if (in.clamp)  // a NaN becomes 0, since DX10_CLAMP is set by default
    for (int lane = 0; lane < kLanes; ++lane)
      values[lane] = values[lane] > R(0) ? (values[lane] < R(1) ? values[lane] : R(1)) : R(0);
}

template <class F>
void vector(Registry& registry, const std::string& name, F) {
  registry[name] = Signature<F>::template Apply<VectorAlu<false>::template Of>::run;
}

// The same for a result that packs floats of 16 bits.
template <class F>
void narrowing(Registry& registry, const std::string& name, F) {
  registry[name] = [](Wave& wave, const Instruction& in) {
    refuse_overflow_mode(wave);
    Signature<F>::template Apply<VectorAlu<false>::template Of>::run(wave, in);
  };
}

template <class F>
void accumulating(Registry& registry, const std::string& name, F) {
  registry[name] = Signature<F>::template Apply<VectorAlu<true>::template Of>::run;
}

}  // namespace gfx9
