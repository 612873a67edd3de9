#include "kernels/sparse/reduce.h"

#include <limits>

#include "kernels/cuda/element.cuh"
#include "kernels/cuda/launch.h"
#include "kernels/cuda/ptx.cuh"
#include "kernels/decode/softmax.h"

namespace mla {
namespace {

constexpr int kColumns = 4;  // a thread: 16 bytes of a partial
constexpr int kThreads = kLatent / kColumns;

// A CTA merges one row. Threads read the same few lse's, and one partial's columns each.
template <class Element>
__global__ void __launch_bounds__(kThreads) sparse_reduce_kernel(const __grid_constant__ SparseDecodeParams p) {
  ptx::wait_for_previous_kernel();
  const int64_t row = blockIdx.x, rows = int64_t{p.tokens} * p.heads;
  const int column = threadIdx.x * kColumns;
  float highest = -INFINITY;  // of those that are numbers
  for (int32_t i = 0; i < p.splits; ++i) highest = fmaxf(highest, __ldcg(p.partial_lse + i * rows + row));
  float total = 0;
  float4 sum{};
#pragma unroll 4
  for (int32_t i = 0; i < p.splits; ++i) {
    const int64_t partial = i * rows + row;
    const float lse = __ldcg(p.partial_lse + partial);
    const float4 values = __ldcg(reinterpret_cast<const float4*>(p.partial_out + partial * kLatent + column));
    if (lse == -INFINITY) continue;  // saw no token; a NaN shows
    const float weight = exp2f((lse - highest) * kLog2E);
    total += weight;
    sum.x += weight * values.x;
    sum.y += weight * values.y;
    sum.z += weight * values.z;
    sum.w += weight * values.w;
  }
  const bool empty = total == 0;
  if (threadIdx.x == 0) p.lse[row] = empty ? -INFINITY : highest + logf(total);
  if (!empty && p.sink != nullptr) total += exp2f((p.sink[row % p.heads] - highest) * kLog2E);
  const float factor = empty ? 0 : 1 / total;
  const uint2 packed{pack<Element>(sum.x * factor, sum.y * factor), pack<Element>(sum.z * factor, sum.w * factor)};
  *reinterpret_cast<uint2*>(static_cast<Element*>(p.out) + row * kLatent + column) = packed;
}

}  // namespace

Error sparse_reduce(const SparseDecodeParams& params, const Device& device, bool dependent) {
  const int64_t rows = int64_t{params.tokens} * params.heads;
  if (rows > std::numeric_limits<int32_t>::max()) {
    return "jax_mla: mla_sparse_decode has " + std::to_string(rows) + " (token, head) rows, more than a grid";
  }
  LaunchShape shape;
  shape.grid = dim3(static_cast<unsigned>(rows));
  shape.block = dim3(kThreads);
  shape.dependent = dependent;
  const char* const name = "the reduction of mla_sparse_decode";
  if (params.out_dtype == DType::kBF16) {
    return launch(name, sparse_reduce_kernel<__nv_bfloat16>, shape, device, params);
  }
  return launch(name, sparse_reduce_kernel<__half>, shape, device, params);
}

}  // namespace mla
