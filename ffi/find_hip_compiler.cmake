# Finds a compiler of HIP kernels and what it can build: sets JAX_MLA_HIP_COMPILER and JAX_MLA_ROCM_BUILDS in the
# caller; an empty list: there is none.
#
# JAX_MLA_HIP_COMPILER where it is set; else ROCm's own (of ROCM_PATH, /opt/rocm, PATH), then any clang++ from 20 on, the
# newest first. The first that knows all wanted architectures is taken, else the one that knows most of them. What it
# knows is tried out, with the flags of kernels/rocm.cmake, since a compiler may lack its linker.
function(jax_mla_find_hip_compiler wanted)
  set(candidates "${JAX_MLA_HIP_COMPILER}")
  if(NOT candidates)
    foreach(folder "$ENV{ROCM_PATH}" /opt/rocm)
      if(folder)
        list(APPEND candidates "${folder}/bin/amdclang++" "${folder}/llvm/bin/clang++" "${folder}/bin/hipcc")
      endif()
    endforeach()
    list(APPEND candidates amdclang++ hipcc)
    foreach(version RANGE 30 20 -1)
      list(APPEND candidates clang++-${version})
    endforeach()
    list(APPEND candidates clang++)
  endif()

  set(probe "${CMAKE_CURRENT_BINARY_DIR}/hip_probe")
  file(WRITE "${probe}.hip" "extern \"C\" __attribute__((global)) void probe(int* p) { *p = 1; }\n")
  set(best "")
  set(best_builds "")
  foreach(candidate ${candidates})
    unset(program)
    find_program(program "${candidate}" NO_CACHE)
    if(NOT program)
      continue()
    endif()
    set(builds "")
    foreach(architecture ${wanted})
      execute_process(
        COMMAND "${program}" -x hip --cuda-device-only --no-gpu-bundle-output -nogpuinc -nogpulib
                -mcode-object-version=5 --offload-arch=${architecture} "${probe}.hip" -o "${probe}.co"
        RESULT_VARIABLE failed OUTPUT_QUIET ERROR_QUIET)
      if(NOT failed)
        list(APPEND builds ${architecture})
      endif()
    endforeach()
    list(LENGTH builds count)
    list(LENGTH best_builds best_count)
    if(count GREATER best_count)
      set(best "${program}")
      set(best_builds "${builds}")
    endif()
    if("${builds}" STREQUAL "${wanted}")
      break()
    endif()
  endforeach()
  set(JAX_MLA_HIP_COMPILER "${best}" PARENT_SCOPE)
  set(JAX_MLA_ROCM_BUILDS "${best_builds}" PARENT_SCOPE)
endfunction()
