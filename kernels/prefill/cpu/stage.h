// Operands brought into the form that the products read.
#pragma once

#include "kernels/cpu/transpose.h"
#include "kernels/prefill/cpu/workspace.h"

namespace mla::MLA_ISA::prefill {

using cpu::PrefillItem;

// Queries as [unit][row], those past the last zeros.
template <typename A, typename Tile>
inline void stage_queries(const PrefillItem& item, const Tile& tile) {
  for (int32_t row = 0; row < tile.rows; row += kLanes) {
    const char* source[kLanes];
    for (int32_t lane = 0; lane < kLanes; ++lane) {
      const int64_t r = tile.first + row + lane;
      source[lane] =
          row + lane < tile.rows ? static_cast<const char*>(item.q) + r * item.q_stride * A::kBytes : nullptr;
    }
    for (int64_t unit = 0; unit < kHeadDim / A::kPack; unit += kLanes) {
      Int units[kLanes];
      for (int32_t lane = 0; lane < kLanes; ++lane) {
        units[lane] = source[lane] == nullptr ? Int{} : A::units(source[lane], unit);
      }
      transpose(units);
      for (int i = 0; i < kLanes; ++i) memcpy(tile.queries + (unit + i) * kStride + row, &units[i], sizeof(Int));
    }
  }
}

// Where a block's keys or values lie; null past the last, and where nobody may see it.
struct Sources {
  const char* nope[kBlockKeys];
  const char* rope[kBlockKeys];
  const char* value[kBlockKeys];
};

template <typename A, typename W>
inline void locate(const PrefillItem& item, int64_t first, W& w, Sources& sources) {
  w.whole = w.count % kKeyStep == 0;
  for (int32_t j = 0; j < kBlockKeys; ++j) {
    bool seen = j < w.count;
    if (seen && item.key_mask != nullptr) {
      const int64_t bit = item.first_key + first + j;
      seen = (item.key_mask[bit / 32] >> bit % 32 & 1) != 0;
      w.whole &= seen;
    }
    const auto row = [&](const void* rows, int64_t stride) {
      return seen ? static_cast<const char*>(rows) + (first + j) * stride * A::kBytes : nullptr;
    };
    sources.nope[j] = row(item.nope, item.nope_stride);
    sources.rope[j] = row(item.rope, item.rope_stride);
    sources.value[j] = row(item.v, item.v_stride);
    w.position[j] = seen ? j : INT32_MAX;
  }
}

// Keys as [key][unit].
template <typename A, typename W>
inline void stage_keys(const Sources& sources, const W& w) {
  constexpr int64_t kNopeUnits = kNope / A::kPack;
  const auto stage = [](const char* row, int64_t count, typename A::Unit* target) {
    for (int64_t unit = 0; unit < count; unit += kLanes) {
      const Int units = row == nullptr ? Int{} : A::units(row, unit);
      memcpy(target + unit, &units, sizeof(units));
    }
  };
  for (int32_t j = 0; j < steps_end(w.count); ++j) {
    typename A::Unit* const target = w.keys + j * W::kKeyUnits;
    stage(sources.nope[j], kNopeUnits, target);
    stage(sources.rope[j], W::kKeyUnits - kNopeUnits, target + kNopeUnits);
  }
}

// Values as [column][unit along the keys]. Returns whether all of them are finite.
template <typename A, typename W>
inline bool stage_values(const Sources& sources, const W& w) {
  Int not_finite = {};
  for (int32_t first = 0; first < steps_end(w.count) / A::kPack; first += kLanes) {
    for (int64_t column = 0; column < kNope; column += kLanes) {
      Int units[kLanes];
      for (int32_t i = 0; i < kLanes; ++i) {
        units[i] = A::value_units(sources.value + (first + i) * A::kPack, column);
        not_finite |= A::not_finite(units[i]);
      }
      transpose(units);
      for (int i = 0; i < kLanes; ++i) {
        memcpy(w.values + (column + i) * W::kValueStride + first, &units[i], sizeof(Int));
      }
    }
  }
  for (int lane = 0; lane < kLanes; ++lane) {
    if (not_finite[lane] != 0) return false;
  }
  return true;
}

// Lists the keys whose values are not all finite, and takes those values away: times 0 they would be NaN in every row.
template <typename A, typename W>
inline void take_out_unusable(Sources& sources, W& w) {
  for (int32_t j = 0; j < w.count; ++j) {
    if (sources.value[j] == nullptr) continue;
    const char* alone[A::kPack] = {sources.value[j]};
    Int not_finite = {};
    for (int64_t column = 0; column < kNope; column += kLanes)
      not_finite |= A::not_finite(A::value_units(alone, column));
    bool finite = true;
    for (int lane = 0; lane < kLanes; ++lane) finite &= not_finite[lane] == 0;
    if (finite) continue;
    sources.value[j] = nullptr;
    w.unusable[w.unusable_count++] = j;
  }
  stage_values<A>(sources, w);
}

template <typename A, typename W>
inline void stage_block(const PrefillItem& item, int64_t first, int32_t count, W& w) {
  Sources sources;
  w.count = count;
  w.unusable_count = 0;
  locate<A>(item, first, w, sources);
  stage_keys<A>(sources, w);
  if (!stage_values<A>(sources, w)) take_out_unusable<A>(sources, w);
}

}  // namespace mla::MLA_ISA::prefill
