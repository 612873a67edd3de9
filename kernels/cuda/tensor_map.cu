#include "kernels/cuda/tensor_map.h"

#include "kernels/cuda/launch.h"

namespace mla {
namespace {

using Encode = decltype(&cuTensorMapEncodeTiled);

struct Driver {
  Encode encode = nullptr;
  Error error;
};

// The driver's function, found by name, so that the module loads where there is no libcuda.
Driver find_driver() {
  constexpr const char* kName = "cuTensorMapEncodeTiled";
  void* entry = nullptr;
  cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSymbolNotFound;
#if CUDART_VERSION >= 12050
  const cudaError_t status = cudaGetDriverEntryPointByVersion(kName, &entry, 12000, cudaEnableDefault, &found);
#else
  const cudaError_t status = cudaGetDriverEntryPoint(kName, &entry, cudaEnableDefault, &found);
#endif
  if (status != cudaSuccess) return {nullptr, device_error(std::string("jax_mla: looking for ") + kName, status)};
  if (found != cudaDriverEntryPointSuccess || entry == nullptr) {
    return {nullptr, std::string("jax_mla: this driver has no ") + kName + " (query result " + std::to_string(found) +
                         "); Hopper's kernels need a driver of CUDA 12 or later"};
  }
  return {reinterpret_cast<Encode>(entry), {}};
}

CUtensorMapDataType data_type(DType dtype) {
  switch (dtype) {
    case DType::kF16: return CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
    case DType::kBF16: return CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
    default: return CU_TENSOR_MAP_DATA_TYPE_UINT8;
  }
}

int32_t size_of(DType dtype) { return dtype == DType::kE4M3FN ? 1 : 2; }

}  // namespace

Error encode_tensor_map(CUtensorMap* map, const char* name, const void* data, DType dtype,
                        std::initializer_list<TensorAxis> axes) {
  constexpr size_t kMaxAxes = 5;
  static const Driver kDriver = find_driver();
  if (kDriver.encode == nullptr) return kDriver.error;
  cuuint64_t sizes[kMaxAxes], strides[kMaxAxes];
  cuuint32_t boxes[kMaxAxes], steps[kMaxAxes];
  std::string text;
  cuuint32_t rank = 0;
  for (const TensorAxis& axis : axes) {
    sizes[rank] = static_cast<cuuint64_t>(axis.size);
    boxes[rank] = static_cast<cuuint32_t>(axis.box);
    steps[rank] = 1;
    if (rank > 0) strides[rank - 1] = static_cast<cuuint64_t>(axis.stride);
    text += (rank > 0 ? ", " : "") + std::to_string(axis.size);
    if (rank > 0) text += " every " + std::to_string(axis.stride) + " bytes";
    ++rank;
  }
  // A promotion to 256 bytes fetches neighbours of lines that do not start at a multiple of that, and throws them away:
  // 151 us instead of 139 for the keys of 128 x 4096 tokens, loads alone.
  const bool short_lines = boxes[0] * size_of(dtype) == 64;
  const CUresult result = kDriver.encode(map, data_type(dtype), rank, const_cast<void*>(data), sizes, strides, boxes,
                                         steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
                                         short_lines ? CU_TENSOR_MAP_SWIZZLE_64B : CU_TENSOR_MAP_SWIZZLE_128B,
                                         CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result == CUDA_SUCCESS) return {};
  return std::string("jax_mla: no tensor map for ") + name + " [" + text + "], the driver's error " +
         std::to_string(result);
}

}  // namespace mla
