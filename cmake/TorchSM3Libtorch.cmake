# SPDX-License-Identifier: Apache-2.0
# Finds the installed torch and wraps it in the target torch_sm3_libtorch. Used by our own build and by our installed package.
#
# Why not find_package(Torch): on a CUDA build of torch it demands a complete toolkit (cuBLAS, NVRTC, ...) through the old
# FindCUDA even from a program that touches no CUDA. Headers, libraries and the ABI flag are all that is needed here, and
# the flag is still read from torch's own file, never set by hand.
include_guard(GLOBAL)

find_file(TORCH_SM3_TORCH_CONFIG TorchConfig.cmake
  HINTS "${Torch_DIR}" ENV Torch_DIR
  PATH_SUFFIXES Torch share/cmake/Torch cmake/Torch
  DOC "TorchConfig.cmake of the torch to build against")
if(NOT TORCH_SM3_TORCH_CONFIG)
  message(FATAL_ERROR
    "torch_sm3: expected an installed torch, but found none; add to the command line "
    "-DCMAKE_PREFIX_PATH=$(python -c 'import torch; print(torch.utils.cmake_prefix_path)')")
endif()

cmake_path(GET TORCH_SM3_TORCH_CONFIG PARENT_PATH _torch_sm3_dir)
get_filename_component(TORCH_SM3_TORCH_ROOT "${_torch_sm3_dir}/../../.." ABSOLUTE)

file(STRINGS "${_torch_sm3_dir}/TorchConfigVersion.cmake" _torch_sm3_line REGEX "set\\(PACKAGE_VERSION")
string(REGEX MATCH "[0-9]+\\.[0-9]+\\.[0-9]+" TORCH_SM3_TORCH_VERSION "${_torch_sm3_line}")
if(TORCH_SM3_TORCH_VERSION VERSION_LESS 2.11)
  message(FATAL_ERROR "torch_sm3: expected torch >= 2.11, but got ${TORCH_SM3_TORCH_VERSION} in ${TORCH_SM3_TORCH_ROOT}")
endif()

file(STRINGS "${TORCH_SM3_TORCH_CONFIG}" _torch_sm3_line REGEX "_GLIBCXX_USE_CXX11_ABI=[01]")
string(REGEX MATCH "_GLIBCXX_USE_CXX11_ABI=[01]" TORCH_SM3_TORCH_ABI "${_torch_sm3_line}")

# Empty for a CPU build of torch.
set(TORCH_SM3_TORCH_CUDA "")
if(EXISTS "${TORCH_SM3_TORCH_ROOT}/version.py")
  file(STRINGS "${TORCH_SM3_TORCH_ROOT}/version.py" _torch_sm3_line REGEX "^cuda.*=.*'[0-9.]+'")
  string(REGEX MATCH "[0-9]+\\.[0-9]+" TORCH_SM3_TORCH_CUDA "${_torch_sm3_line}")
endif()

if(NOT TARGET torch_sm3_libtorch)
  add_library(torch_sm3_libtorch INTERFACE IMPORTED)
  set_target_properties(torch_sm3_libtorch PROPERTIES
    INTERFACE_INCLUDE_DIRECTORIES
      "${TORCH_SM3_TORCH_ROOT}/include;${TORCH_SM3_TORCH_ROOT}/include/torch/csrc/api/include"
    INTERFACE_COMPILE_DEFINITIONS "${TORCH_SM3_TORCH_ABI}"
    INTERFACE_COMPILE_FEATURES cxx_std_20)
  # Full paths, so that CMake adds the folder to the run path of programs in the build tree.
  foreach(_torch_sm3_name torch torch_cpu c10)
    set_property(TARGET torch_sm3_libtorch APPEND PROPERTY INTERFACE_LINK_LIBRARIES
      "${TORCH_SM3_TORCH_ROOT}/lib/lib${_torch_sm3_name}.so")
  endforeach()
  # libtorch.so of a CUDA build needs libraries of other wheels; the loader finds them, the linker need not.
  set_property(TARGET torch_sm3_libtorch APPEND PROPERTY INTERFACE_LINK_OPTIONS
    "LINKER:--allow-shlib-undefined" "LINKER:-rpath-link,${TORCH_SM3_TORCH_ROOT}/lib")
endif()
