# SPDX-License-Identifier: Apache-2.0
# Compile and link options shared by the library and its tests.
include_guard(GLOBAL)

add_library(torch_sm3_options INTERFACE)
# Every rounding of the specifications is one IEEE operation: nothing may fuse a product and a sum.
set(_cxx -ffp-contract=off -fno-math-errno -fno-trapping-math -Wall -Wextra)
if(TORCH_SM3_WERROR)
  list(APPEND _cxx -Werror)
endif()
target_compile_options(torch_sm3_options INTERFACE
  "$<$<COMPILE_LANGUAGE:CXX>:${_cxx}>"
  "$<$<COMPILE_LANGUAGE:CUDA>:--fmad=false;--expt-relaxed-constexpr;-Xcompiler=-ffp-contract=off;-diag-suppress=20012>")
# One header per operator instead of one header of all of them: seconds less for every file.
target_compile_definitions(torch_sm3_options INTERFACE AT_PER_OPERATOR_HEADERS)
if(TORCH_SM3_SANITIZE)
  set(_sanitize -fsanitize=${TORCH_SM3_SANITIZE} -fno-omit-frame-pointer -fno-sanitize=vptr)
  target_compile_options(torch_sm3_options INTERFACE "$<$<COMPILE_LANGUAGE:CXX>:${_sanitize};-g1>")
  target_link_options(torch_sm3_options INTERFACE ${_sanitize})
  if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
    # What the sanitizers' own code makes GCC see in torch's headers: a fence, and guards that are not set where not used.
    target_compile_options(torch_sm3_options INTERFACE "$<$<COMPILE_LANGUAGE:CXX>:-Wno-tsan;-Wno-maybe-uninitialized>")
  endif()
endif()
if(TORCH_SM3_WITH_CUDA)
  target_compile_definitions(torch_sm3_options INTERFACE TORCH_SM3_WITH_CUDA)
endif()

target_link_libraries(torch_sm3 PRIVATE $<BUILD_INTERFACE:torch_sm3_options> PUBLIC torch_sm3_libtorch)
target_compile_definitions(torch_sm3 PRIVATE TORCH_SM3_BUILD)
set_target_properties(torch_sm3 PROPERTIES CUDA_RUNTIME_LIBRARY None)
# A consumer that only links us must not lose the operators to the linker's --as-needed (see export.h for the anchor).
target_link_options(torch_sm3 INTERFACE "LINKER:--no-as-needed")

if(TORCH_SM3_WITH_CUDA)
  find_package(CUDAToolkit REQUIRED)
  target_link_libraries(torch_sm3 PRIVATE
    "${TORCH_SM3_TORCH_ROOT}/lib/libc10_cuda.so" "${TORCH_SM3_TORCH_ROOT}/lib/libtorch_cuda.so" CUDA::cudart)
endif()

# torch_sm3_sources(FILES...): private sources of one component; .cu and *_cuda.cpp files only where CUDA is built.
function(torch_sm3_sources)
  foreach(_file IN LISTS ARGN)
    if(NOT _file MATCHES "(\\.cu|_cuda\\.cpp)$" OR TORCH_SM3_WITH_CUDA)
      target_sources(torch_sm3 PRIVATE "${CMAKE_CURRENT_SOURCE_DIR}/${_file}")
    endif()
  endforeach()
endfunction()

# torch_sm3_threaded_sources(FILES...): those that call at::parallel_for, which without OpenMP is a plain loop. Only
# compiled so and not linked: OpenMP's functions are then those of the library that torch brings, whose threads are the
# ones that torch.set_num_threads counts; another library would bring its own.
function(torch_sm3_threaded_sources)
  set_source_files_properties(${ARGN} TARGET_DIRECTORY torch_sm3 PROPERTIES COMPILE_OPTIONS "-fopenmp")
endfunction()

# torch_sm3_headers(BASE FILES...): public headers below BASE, installed as include/torch_sm3/...
function(torch_sm3_headers base)
  string(MAKE_C_IDENTIFIER "headers_${CMAKE_CURRENT_SOURCE_DIR}" _set)
  target_sources(torch_sm3 PUBLIC FILE_SET ${_set} TYPE HEADERS
    BASE_DIRS "${CMAKE_CURRENT_SOURCE_DIR}/${base}" FILES ${ARGN})
  set_property(GLOBAL APPEND PROPERTY TORCH_SM3_HEADER_SETS ${_set})
endfunction()

# torch_sm3_simd_sources(STEM): STEM_scalar.cpp, STEM_avx2.cpp and STEM_avx512.cpp, each with the flags of its instruction
# set. Only these files may be compiled so; the choice between them is made at run time.
function(torch_sm3_simd_sources stem)
  torch_sm3_sources(${stem}_scalar.cpp)
  set_source_files_properties(${stem}_scalar.cpp TARGET_DIRECTORY torch_sm3 PROPERTIES COMPILE_OPTIONS "-O3")
  if(CMAKE_SYSTEM_PROCESSOR MATCHES "x86_64|AMD64")
    torch_sm3_sources(${stem}_avx2.cpp ${stem}_avx512.cpp)
    set_source_files_properties(${stem}_avx2.cpp TARGET_DIRECTORY torch_sm3 PROPERTIES
      COMPILE_OPTIONS "-O3;-mavx2;-mf16c")
    set_source_files_properties(${stem}_avx512.cpp TARGET_DIRECTORY torch_sm3 PROPERTIES
      COMPILE_OPTIONS "-O3;-mavx2;-mf16c;-mavx512f;-mavx512bw;-mavx512dq;-mavx512vl;-mprefer-vector-width=512")
  endif()
endfunction()
