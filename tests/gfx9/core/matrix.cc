// Matrix instructions. mfma.py gives where each lane's elements lie (MatrixLayout); here they are multiplied.
//
// What is modelled: every product is exact, all products of one instruction and C are summed in double precision, and
// the sum is rounded once to the result, to nearest even. Hardware sums in an order of its own and rounds in between,
// so that results differ in the last bits; no kernel may depend on them. As the guides say: subnormal inputs and
// results are kept and EXEC is ignored; with FP16_OVFL set a sum that overflows becomes the largest number, else
// infinity.
#include <algorithm>
#include <array>
#include <vector>

#include "floats.h"
#include "machine.h"
#include "registry.h"

namespace gfx9 {
namespace {

constexpr double kLargest = std::numeric_limits<float>::max();

enum Format : int32_t { kF32, kF16, kBf16, kFp8, kBf8, kI8 };

constexpr int format_bits(int32_t format) { return format == kF32 ? 32 : format == kF16 || format == kBf16 ? 16 : 8; }

template <int32_t kFormat>
double element(uint32_t bits, const std::array<float, 256>& fp8) {
  switch (kFormat) {
    case kF32: return std::bit_cast<float>(bits);
    case kF16: return static_cast<float>(std::bit_cast<Half>(static_cast<uint16_t>(bits)));
    case kBf16: return bf16_to_float(static_cast<uint16_t>(bits));
    case kI8: return static_cast<int8_t>(bits);
    default: return fp8[bits & 0xff];
  }
}

// The elements of all lanes, register by register, to their places.
template <int32_t kFormat>
void unpack(const Wave& wave, int first, int elements, const uint16_t* index, double* dense) {
  constexpr int kBits = format_bits(kFormat), kEach = 32 / kBits;
  const auto& fp8 = fp8_values(wave.group->architecture, kFormat == kBf8);
  for (int e = 0; e < elements; ++e) {
    const uint32_t* bits = wave.v[first + e / kEach];
    int shift = kBits * (e % kEach);
    double values[kLanes];
    for (int lane = 0; lane < kLanes; ++lane) values[lane] = element<kFormat>(bits[lane] >> shift, fp8);
    for (int lane = 0; lane < kLanes; ++lane) dense[index[lane * elements + e]] = values[lane];
  }
}

void gather(const Wave& wave, const Operand& operand, int32_t format, int elements, const uint16_t* index,
            double* dense) {
  if (operand.kind != Kind::vector) throw Fault("a matrix operand is expected in vector registers");
  check_vector(wave, operand.first, operand.count);
  static constexpr decltype(&unpack<kF32>) kUnpack[] = {unpack<kF32>, unpack<kF16>, unpack<kBf16>,
                                                        unpack<kFp8>, unpack<kBf8>, unpack<kI8>};
  kUnpack[format](wave, operand.first, elements, index, dense);
}

// D [row][column] += A [row][k] * B [k][column]. A product is exact in double precision, so that it makes no difference
// whether it is fused with the sum.
template <int kColumns>
void accumulate(const MatrixLayout& m, const double* a, const double* b, double* d) {
#pragma clang fp contract(fast)
  for (int i = 0; i < m.rows; ++i) {
    double sum[kColumns];
    std::copy_n(d + i * kColumns, kColumns, sum);
    for (int k = 0; k < m.depth; ++k)
      for (int j = 0; j < kColumns; ++j) sum[j] += a[i * m.depth + k] * b[k * kColumns + j];
    std::copy_n(sum, kColumns, d + i * kColumns);
  }
}

// One scale, a power of two (E8M0), for every 32 elements of a row: lane i + rows * block has that of row i.
void scale_rows(const Wave& wave, const Instruction& in, int operand, int k, int rows, int depth, bool k_major,
                double* dense) {
  alignas(64) uint32_t bits[kLanes];
  read_raw(wave, in.operand[operand], 0, bits);
  int shift = 8 * (in.op_sel[k] + 2 * in.op_sel_hi[k]);
  for (int block = 0; block < depth / 32; ++block)
    for (int row = 0; row < rows; ++row) {
      int code = bits[row + rows * block] >> shift & 0xff;
      double scale = code == 0xff ? std::numeric_limits<double>::quiet_NaN() : std::ldexp(1.0, code - 127);
      for (int i = 32 * block; i < 32 * block + 32; ++i) dense[k_major ? i * rows + row : row * depth + i] *= scale;
    }
}

template <bool kInteger>
void multiply(Wave& wave, const Instruction& in) {
  const MatrixLayout& m = *in.matrix;
  static thread_local std::vector<double> a, b, d;
  a.resize(m.blocks * m.rows * m.depth);
  b.resize(m.blocks * m.depth * m.columns);
  d.resize(m.blocks * m.rows * m.columns);
  gather(wave, in.operand[1], m.a_format, m.elements, m.a, a.data());
  gather(wave, in.operand[2], m.b_format, m.elements, m.b, b.data());
  if (m.scaled) {
    scale_rows(wave, in, 4, 0, m.rows, m.depth, false, a.data());
    scale_rows(wave, in, 5, 1, m.columns, m.depth, true, b.data());
  }
  for (int r = 0; r < m.results; ++r) {  // C
    alignas(64) uint32_t bits[kLanes];
    read_raw(wave, in.operand[3], in.operand[3].kind == Kind::vector ? r : 0, bits);
    for (int lane = 0; lane < kLanes; ++lane)
      d[m.d[lane * m.results + r]] =
          kInteger ? static_cast<int32_t>(bits[lane]) : static_cast<double>(std::bit_cast<float>(bits[lane]));
  }
  auto* one_block = m.columns == 32 ? accumulate<32> : m.columns == 16 ? accumulate<16> : accumulate<4>;
  for (int block = 0; block < m.blocks; ++block)
    one_block(m, &a[block * m.rows * m.depth], &b[block * m.depth * m.columns], &d[block * m.rows * m.columns]);
  check_vector(wave, in.operand[0].first, m.results);
  for (int r = 0; r < m.results; ++r)
    for (int lane = 0; lane < kLanes; ++lane) {
      double value = d[m.d[lane * m.results + r]];
      if (!kInteger && wave.mode & kModeFp16Overflow && std::isfinite(value))
        value = std::clamp(value, -kLargest, kLargest);
      wave.v[in.operand[0].first + r][lane] = kInteger ? static_cast<uint32_t>(static_cast<int64_t>(value))
                                                       : std::bit_cast<uint32_t>(static_cast<float>(value));
    }
}

}  // namespace

void define_matrix(Registry& registry) {
  registry["v_mfma_f32"] = multiply<false>;
  registry["v_mfma_i32"] = multiply<true>;
}

}  // namespace gfx9
