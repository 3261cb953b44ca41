# SPDX-License-Identifier: Apache-2.0
# Writes what this library was built from into the library itself; see torch_sm3/csrc/build_info.cpp.in.
include_guard(GLOBAL)

string(JOIN " " _archs ${TORCH_SM3_ARCH_LIST})
set(_generated "${CMAKE_CURRENT_BINARY_DIR}/build_info.cpp")
# At build time, because the commit changes without a new configure; the file is touched only when its text changes.
add_custom_target(torch_sm3_build_info
  COMMAND "${CMAKE_COMMAND}"
    "-DINPUT=${CMAKE_CURRENT_SOURCE_DIR}/torch_sm3/csrc/build_info.cpp.in" "-DOUTPUT=${_generated}"
    "-DSOURCE=${CMAKE_CURRENT_SOURCE_DIR}" "-DVERSION=${PROJECT_VERSION}" "-DTORCH=${TORCH_SM3_TORCH_VERSION}"
    "-DTORCH_CUDA=${TORCH_SM3_TORCH_CUDA}" "-DCUDA=${TORCH_SM3_CUDA_VERSION}"
    "-DWITH_CUDA=${TORCH_SM3_WITH_CUDA}" "-DREASON=${TORCH_SM3_CUDA_REASON}" "-DARCHS=${_archs}"
    "-DCOMPILER=${CMAKE_CXX_COMPILER_ID} ${CMAKE_CXX_COMPILER_VERSION}" "-DBUILD_TYPE=${CMAKE_BUILD_TYPE}"
    -P "${CMAKE_CURRENT_SOURCE_DIR}/cmake/write_build_info.cmake"
  BYPRODUCTS "${_generated}" COMMENT "Reading the commit" VERBATIM)
set_source_files_properties("${_generated}" PROPERTIES GENERATED TRUE)
target_sources(torch_sm3 PRIVATE "${_generated}")
add_dependencies(torch_sm3 torch_sm3_build_info)
