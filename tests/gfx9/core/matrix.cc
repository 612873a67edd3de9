// Matrix instructions. mfma.py gives where each lane's elements lie (MatrixLayout); here they are multiplied.
//
// What is modelled: every product is exact, all products of one instruction and C are summed in double precision, and
// the sum is rounded once to the result, to nearest even. Hardware sums in an order of its own and rounds in between,
// so that results differ in the last bits; no kernel may depend on them. As the guides say: subnormal inputs and
// results are kept and EXEC is ignored; with FP16_OVFL set a sum that overflows becomes the largest number, else
// infinity.
#include <algorithm>
#include <vector>

#include "floats.h"
#include "machine.h"
#include "registry.h"

namespace gfx9 {
namespace {

constexpr double kLargest = std::numeric_limits<float>::max();

enum Format : int32_t { kF32, kF16, kBf16, kFp8, kBf8, kI8 };

int format_bits(int32_t format) { return format == kF32 ? 32 : format == kF16 || format == kBf16 ? 16 : 8; }

// The elements of one lane, from `registers` registers on.
void unpack(const Wave& wave, int first, int lane, int32_t format, int elements, double* out) {
  int each = 32 / format_bits(format);
  for (int e = 0; e < elements; ++e) {
    uint32_t bits = wave.v[first + e / each][lane] >> format_bits(format) * (e % each);
    switch (format) {
      case kF32: out[e] = std::bit_cast<float>(bits); break;
      case kF16: out[e] = static_cast<float>(std::bit_cast<Half>(static_cast<uint16_t>(bits))); break;
      case kBf16: out[e] = bf16_to_float(static_cast<uint16_t>(bits)); break;
      case kFp8: out[e] = fp8_values(wave.group->architecture, false)[bits & 0xff]; break;
      case kBf8: out[e] = fp8_values(wave.group->architecture, true)[bits & 0xff]; break;
      default: out[e] = static_cast<int8_t>(bits); break;
    }
  }
}

void gather(const Wave& wave, const Operand& operand, int32_t format, int elements, const uint16_t* index,
            double* dense) {
  if (operand.kind != Kind::vector) throw Fault("a matrix operand is expected in vector registers");
  check_vector(wave, operand.first, operand.count);
  double values[32];
  for (int lane = 0; lane < kLanes; ++lane) {
    unpack(wave, operand.first, lane, format, elements, values);
    for (int e = 0; e < elements; ++e) dense[index[lane * elements + e]] = values[e];
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
  for (int block = 0; block < m.blocks; ++block)
    for (int i = 0; i < m.rows; ++i) {
      double* row = &d[(block * m.rows + i) * m.columns];
      for (int k = 0; k < m.depth; ++k) {
        double factor = a[(block * m.rows + i) * m.depth + k];
        const double* other = &b[(block * m.depth + k) * m.columns];
        for (int j = 0; j < m.columns; ++j) row[j] += factor * other[j];
      }
    }
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
