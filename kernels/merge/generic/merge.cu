// merge_states: the attention over two disjoint sets of keys, from the attention over each.
#include "kernels/cuda/launch.h"
#include "kernels/merge/merge_rows.h"

namespace mla {
namespace {

constexpr int kThreads = 256;

template <class Element, int kCount>
__global__ void __launch_bounds__(kThreads) merge_kernel(const __grid_constant__ MergeStatesParams p) {
  merge_rows<Element, kCount>(p);
}

template <class Element, int kCount>
Error launch_groups(const MergeStatesParams& params, const Device& device) {
  const int32_t groups = params.width / kCount;
  const int32_t across = groups < 1 ? 1 : groups < kThreads ? groups : kThreads;
  const int32_t rows = kThreads / across;
  LaunchShape shape;
  shape.grid = dim3(static_cast<unsigned>((params.rows + rows - 1) / rows));
  shape.block = dim3(across, rows);
  return launch("merge_states", merge_kernel<Element, kCount>, shape, device, params);
}

template <class Element>
Error launch_merge(const MergeStatesParams& params, const Device& device) {
  constexpr int kCount = 16 / sizeof(Element);
  return params.width % kCount == 0 ? launch_groups<Element, kCount>(params, device)
                                    : launch_groups<Element, 1>(params, device);
}

}  // namespace

Error merge_states(const MergeStatesParams& params, const Device& device) {
  if (params.rows == 0) return {};
  switch (params.dtype) {
    case DType::kF32: return launch_merge<float>(params, device);
    case DType::kBF16: return launch_merge<__nv_bfloat16>(params, device);
    case DType::kF16: return launch_merge<__half>(params, device);
    default: return std::string("jax_mla: merge_states on CUDA cannot merge ") + name_of(params.dtype);
  }
}

}  // namespace mla
