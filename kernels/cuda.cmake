# The kernels of the CUDA module, and a driver that tests them without Python. The caller has enabled CUDA, chosen
# CMAKE_CUDA_ARCHITECTURES and put the repository's root on the include path.
set(JAX_MLA_CUDA_SOURCES
    cuda/capability.cu
    cuda/copy.cu
    decode/plan.cu
    decode/reduce.cu
    decode/decode.cu
    decode/generic/decode.cu
    decode/generic/bf16.cu
    decode/generic/f16.cu
    decode/generic/e4m3fn.cu
    decode/generic/ds_mla.cu
    prefill/prefill.cu
    prefill/generic/prefill.cu
    prefill/generic/bf16.cu
    prefill/generic/f16.cu
    cache/generic/update.cu
    context/generic/gather.cu
    merge/generic/merge.cu
    pack/generic/pack.cu
    sparse/sparse.cu
    sparse/reduce.cu
    sparse/generic/bf16.cu
    sparse/generic/f16.cu
    sparse/generic/e4m3fn.cu
    sparse/generic/ds_mla.cu)
list(TRANSFORM JAX_MLA_CUDA_SOURCES PREPEND "${CMAKE_CURRENT_LIST_DIR}/")

add_library(mla_cuda_kernels OBJECT ${JAX_MLA_CUDA_SOURCES})
target_compile_definitions(mla_cuda_kernels PRIVATE JAX_MLA_CUDA)
set_target_properties(mla_cuda_kernels PROPERTIES
    POSITION_INDEPENDENT_CODE ON
    CUDA_STANDARD 17
    CUDA_STANDARD_REQUIRED ON
    CUDA_VISIBILITY_PRESET hidden
    VISIBILITY_INLINES_HIDDEN ON)

# Hopper's kernels, for sm_90a alone, where that is among the architectures. The capability table follows.
set(JAX_MLA_SM90_OBJECTS "")
if(CMAKE_CUDA_ARCHITECTURES MATCHES "(^|;)90a")
    file(GLOB JAX_MLA_SM90_SOURCES CONFIGURE_DEPENDS
         "${CMAKE_CURRENT_LIST_DIR}/decode/sm90/instances/*.cu"
         "${CMAKE_CURRENT_LIST_DIR}/decode/sm90/fp8/instances/*.cu"
         "${CMAKE_CURRENT_LIST_DIR}/prefill/sm90/instances/*.cu"
         "${CMAKE_CURRENT_LIST_DIR}/sparse/sm90/instances/*.cu"
         "${CMAKE_CURRENT_LIST_DIR}/sparse/sm90/fp8/instances/*.cu")
    add_library(mla_cuda_sm90_kernels OBJECT
        ${JAX_MLA_SM90_SOURCES}
        "${CMAKE_CURRENT_LIST_DIR}/decode/sm90/decode.cu"
        "${CMAKE_CURRENT_LIST_DIR}/decode/sm90/fp8/decode.cu"
        "${CMAKE_CURRENT_LIST_DIR}/prefill/sm90/prefill.cu"
        "${CMAKE_CURRENT_LIST_DIR}/sparse/sm90/sparse.cu"
        "${CMAKE_CURRENT_LIST_DIR}/cuda/tensor_map.cu")
    target_compile_definitions(mla_cuda_sm90_kernels PRIVATE JAX_MLA_CUDA)
    target_compile_definitions(mla_cuda_kernels PRIVATE JAX_MLA_SM90)
    set_target_properties(mla_cuda_sm90_kernels PROPERTIES
        CUDA_ARCHITECTURES 90a-real
        POSITION_INDEPENDENT_CODE ON
        CUDA_STANDARD 17
        CUDA_STANDARD_REQUIRED ON
        CUDA_VISIBILITY_PRESET hidden
        VISIBILITY_INLINES_HIDDEN ON)
    set(JAX_MLA_SM90_OBJECTS $<TARGET_OBJECTS:mla_cuda_sm90_kernels>)
endif()

add_executable(mla_cuda_driver EXCLUDE_FROM_ALL
               "${CMAKE_CURRENT_LIST_DIR}/../tests/native/cuda_driver.cu"
               $<TARGET_OBJECTS:mla_cuda_kernels> ${JAX_MLA_SM90_OBJECTS})
target_compile_definitions(mla_cuda_driver PRIVATE JAX_MLA_CUDA)
set_target_properties(mla_cuda_driver PROPERTIES CUDA_STANDARD 17 CUDA_STANDARD_REQUIRED ON)

# Kernels' sources on the host, over an emulated CTA: their logic is tested where there is no GPU.
foreach(emulator mla_sm90_emulator:main mla_sm90_fp8_emulator:fp8 mla_sm90_prefill_emulator:prefill
                 mla_generic_prefill_emulator:generic_prefill mla_generic_decode_emulator:generic_decode
                 mla_generic_sparse_emulator:generic_sparse
                 mla_sm90_sparse_emulator:sparse mla_helpers_emulator:helpers)
    string(REGEX REPLACE ":.*" "" target ${emulator})
    string(REGEX REPLACE ".*:" "" source ${emulator})
    add_executable(${target} EXCLUDE_FROM_ALL "${CMAKE_CURRENT_LIST_DIR}/../tests/native/sm90_emulator/${source}.cc")
    target_include_directories(${target} BEFORE PRIVATE "${CMAKE_CURRENT_LIST_DIR}/../tests/native/sm90_emulator")
    target_include_directories(${target} SYSTEM PRIVATE ${CMAKE_CUDA_TOOLKIT_INCLUDE_DIRECTORIES})
    target_compile_options(${target} PRIVATE -O2 -fno-strict-aliasing -Wall -Wextra -Wno-unknown-pragmas
                                             -Wno-unused-variable -Wno-psabi)
    target_link_libraries(${target} PRIVATE mla_cpu_kernels Threads::Threads)
endforeach()
