# The kernels of the ROCm module: code objects for the architectures in JAX_MLA_ROCM_BUILDS, made by
# JAX_MLA_HIP_COMPILER, and the host code that holds them and launches them, which is plain C++.
#
# A kernel's source is kernels/OPERATION/gfx9/NAME.hip; it becomes one code object an architecture. What lies in a folder
# gfx950 instead is for that one alone. The entry functions are the .cc files beside them.
file(GLOB_RECURSE JAX_MLA_HIP_SOURCES CONFIGURE_DEPENDS RELATIVE "${CMAKE_CURRENT_LIST_DIR}"
     "${CMAKE_CURRENT_LIST_DIR}/*/gfx9/*.hip" "${CMAKE_CURRENT_LIST_DIR}/*/gfx950/*.hip")
file(GLOB_RECURSE JAX_MLA_ROCM_SOURCES CONFIGURE_DEPENDS
     "${CMAKE_CURRENT_LIST_DIR}/rocm/*.cc" "${CMAKE_CURRENT_LIST_DIR}/*/gfx9/*.cc")

option(JAX_MLA_ROCM_REDUCE_24 "The reduction of decode takes 24 heads; OFF: such calls are padded to 32" ON)

# No HIP headers and no device libraries: kernels/rocm/device.h has what they would give.
set(JAX_MLA_HIP_FLAGS -x hip --cuda-device-only --no-gpu-bundle-output -nogpuinc -nogpulib -mcode-object-version=5
    -std=c++17 -O3 -Wall -Wextra "-I${JAX_MLA_ROOT}")

set(objects "")
set(symbols "")
set(table "")
set(images "")
set(number 0)
foreach(source ${JAX_MLA_HIP_SOURCES})
  string(REGEX REPLACE "\\.hip$" "" name "${source}")
  foreach(architecture ${JAX_MLA_ROCM_BUILDS})
    if(source MATCHES "/gfx950/" AND NOT architecture STREQUAL "gfx950")
      continue()
    endif()
    set(object "${CMAKE_CURRENT_BINARY_DIR}/code_objects/${name}.${architecture}.co")
    get_filename_component(folder "${object}" DIRECTORY)
    file(MAKE_DIRECTORY "${folder}")
    add_custom_command(
      OUTPUT "${object}"
      COMMAND "${JAX_MLA_HIP_COMPILER}" ${JAX_MLA_HIP_FLAGS} --offload-arch=${architecture}
              -Xclang -dependency-file -Xclang "${object}.d" -Xclang -MT -Xclang "${object}"
              "${CMAKE_CURRENT_LIST_DIR}/${source}" -o "${object}"
      DEPENDS "${CMAKE_CURRENT_LIST_DIR}/${source}"
      DEPFILE "${object}.d"
      COMMENT "Compiling ${source} for ${architecture}"
      VERBATIM)
    list(APPEND objects "${object}")
    # 4096: as the loader maps segments.
    string(APPEND images "    .balign 4096\n    mla_code_${number}: .incbin \"${object}\"\n    mla_code_${number}_end:\n")
    string(APPEND table "    {\"${name}\", \"${architecture}\", mla_code_${number}, "
                        "static_cast<size_t>(mla_code_${number}_end - mla_code_${number})},\n")
    string(APPEND symbols "extern const char mla_code_${number}[], mla_code_${number}_end[];\n")
    math(EXPR number "${number} + 1")
  endforeach()
endforeach()

set(JAX_MLA_CODE_OBJECTS "${CMAKE_CURRENT_BINARY_DIR}/code_objects.cc")
file(CONFIGURE OUTPUT "${JAX_MLA_CODE_OBJECTS}" @ONLY CONTENT [[
// Written by kernels/rocm.cmake.
#include "kernels/rocm/code_objects.h"

asm(R"(
    .section .rodata
@images@    .previous
)");

extern "C" {
#pragma GCC visibility push(hidden)
@symbols@#pragma GCC visibility pop
}

namespace mla {

const CodeObject kCodeObjects[] = {
@table@};
const size_t kCodeObjectCount = sizeof(kCodeObjects) / sizeof(kCodeObjects[0]);

}  // namespace mla
]])
set_source_files_properties("${JAX_MLA_CODE_OBJECTS}" PROPERTIES OBJECT_DEPENDS "${objects}")

add_custom_target(mla_rocm_code_objects DEPENDS ${objects})
add_library(mla_rocm_kernels OBJECT ${JAX_MLA_ROCM_SOURCES} "${JAX_MLA_CODE_OBJECTS}")
add_dependencies(mla_rocm_kernels mla_rocm_code_objects)
target_compile_definitions(mla_rocm_kernels PRIVATE JAX_MLA_ROCM
                           $<$<NOT:$<BOOL:${JAX_MLA_ROCM_REDUCE_24}>>:JAX_MLA_ROCM_WITHOUT_REDUCE_24>)
target_compile_options(mla_rocm_kernels PRIVATE -Wall -Wextra)
target_link_libraries(mla_rocm_kernels PUBLIC ${CMAKE_DL_LIBS})

# For tests/test_rocm.py: the native cases over these kernels, as a library that Python loads, and a HIP runtime that
# hands launches to Python.
add_library(mla_rocm_driver SHARED EXCLUDE_FROM_ALL "${JAX_MLA_ROOT}/tests/native/rocm_driver.cc"
            $<TARGET_OBJECTS:mla_rocm_kernels>)
target_compile_definitions(mla_rocm_driver PRIVATE JAX_MLA_ROCM)
target_compile_options(mla_rocm_driver PRIVATE -Wall -Wextra)
target_link_libraries(mla_rocm_driver PRIVATE ${CMAKE_DL_LIBS})
add_library(mla_hip_standin SHARED EXCLUDE_FROM_ALL "${JAX_MLA_ROOT}/tests/native/hip_standin.cc")
target_compile_options(mla_hip_standin PRIVATE -Wall -Wextra)
set_target_properties(mla_hip_standin PROPERTIES OUTPUT_NAME amdhip64 VERSION 7 SOVERSION 7)
