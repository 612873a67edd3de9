# The CPU's kernels as objects, and a driver that tests them without XLA and Python. GCC 12 or clang 14 on.
#
# A file that is compiled for one instruction set has its flags here and its inline functions in a namespace of its own
# (kernels/cpu/vector.h): no instruction of a wider set reaches code that every machine runs.
option(JAX_MLA_EMULATE_AMX "Run AMX tile instructions as plain loops, to test the AMX kernels on any x86-64 machine" OFF)

get_filename_component(mla_root "${CMAKE_CURRENT_LIST_DIR}/.." ABSOLUTE)

set(mla_cpu_sources
  kernels/cpu/capability.cc
  kernels/cpu/copy.cc
  kernels/cpu/isa.cc
  kernels/cpu/rows.cc
  kernels/cpu/rows_portable.cc
  kernels/cache/cpu/update_cache.cc
  kernels/context/cpu/gather.cc
  kernels/decode/cpu/attention.cc
  kernels/decode/cpu/attention_portable.cc
  kernels/decode/cpu/decode.cc
  kernels/decode/cpu/partials.cc
  kernels/decode/cpu/plan.cc
  kernels/decode/cpu/reduce.cc
  kernels/merge/cpu/merge_states.cc
  kernels/pack/cpu/pack_kv.cc
  kernels/prefill/cpu/attention_portable.cc
  kernels/prefill/cpu/prefill.cc
  kernels/sparse/cpu/sparse.cc)

function(mla_isa_source source)
  set_source_files_properties("${mla_root}/${source}" TARGET_DIRECTORY mla_cpu_kernels PROPERTIES COMPILE_OPTIONS "${ARGN}")
endfunction()

set(mla_avx2 -mavx2 -mfma -mf16c)
# GCC 12 takes the undefined operand of its own AVX-512 intrinsics for a mistake of ours.
set(mla_avx512 ${mla_avx2} -mavx512f -mavx512bw -mavx512dq -mavx512vl
    $<$<CXX_COMPILER_ID:GNU>:-Wno-maybe-uninitialized>)
if(CMAKE_SYSTEM_PROCESSOR MATCHES "^(x86_64|AMD64|amd64)$")
  list(APPEND mla_cpu_sources
    kernels/cpu/rows_avx2.cc
    kernels/decode/cpu/attention_avx2.cc
    kernels/decode/cpu/attention_avx512.cc
    kernels/decode/cpu/attention_avx512_bf16.cc
    kernels/decode/cpu/attention_amx.cc
    kernels/prefill/cpu/attention_avx2.cc
    kernels/prefill/cpu/attention_avx512.cc
    kernels/prefill/cpu/attention_avx512_bf16.cc
    kernels/prefill/cpu/attention_amx.cc)
endif()
list(TRANSFORM mla_cpu_sources PREPEND "${mla_root}/")

add_library(mla_cpu_kernels OBJECT ${mla_cpu_sources})
target_include_directories(mla_cpu_kernels PUBLIC "${mla_root}")
target_compile_features(mla_cpu_kernels PUBLIC cxx_std_17)
target_compile_options(mla_cpu_kernels PRIVATE -Wall -Wextra -ffp-contract=fast)
set_target_properties(mla_cpu_kernels PROPERTIES
  POSITION_INDEPENDENT_CODE ON CXX_VISIBILITY_PRESET hidden VISIBILITY_INLINES_HIDDEN ON)
if(JAX_MLA_EMULATE_AMX)
  target_compile_definitions(mla_cpu_kernels PRIVATE JAX_MLA_EMULATE_AMX)
endif()
if(CMAKE_SYSTEM_PROCESSOR MATCHES "^(x86_64|AMD64|amd64)$")
  mla_isa_source(kernels/cpu/rows_avx2.cc ${mla_avx2})
  foreach(operation decode prefill)
    mla_isa_source(kernels/${operation}/cpu/attention_avx2.cc ${mla_avx2})
    mla_isa_source(kernels/${operation}/cpu/attention_avx512.cc ${mla_avx512})
    mla_isa_source(kernels/${operation}/cpu/attention_avx512_bf16.cc ${mla_avx512} -mavx512bf16)
    mla_isa_source(kernels/${operation}/cpu/attention_amx.cc ${mla_avx512} -mavx512bf16)
  endforeach()
endif()

find_package(Threads REQUIRED)
add_executable(mla_cpu_driver EXCLUDE_FROM_ALL "${mla_root}/tests/native/cpu_driver.cc")
target_link_libraries(mla_cpu_driver PRIVATE mla_cpu_kernels Threads::Threads)
target_compile_options(mla_cpu_driver PRIVATE -Wall -Wextra)
