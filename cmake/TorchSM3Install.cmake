# SPDX-License-Identifier: Apache-2.0
# lib/, include/ and share/cmake/torch_sm3/: the same layout inside the wheel and under a prefix of `cmake --install`.
include_guard(GLOBAL)
include(CMakePackageConfigHelpers)

# Where a program that is not Python finds torch and the CUDA runtime: beside the package, as in a wheel's site-packages;
# and, for an editable install or a prefix of its own, where they were at build time.
set(_beside "$ORIGIN/../../torch/lib")
set(_built_with "${TORCH_SM3_TORCH_ROOT}/lib")
if(TORCH_SM3_WITH_CUDA)
  cmake_path(GET TORCH_SM3_TORCH_ROOT PARENT_PATH _site)
  foreach(_folder "cu${CUDAToolkit_VERSION_MAJOR}" cuda_runtime)
    list(APPEND _beside "$ORIGIN/../../nvidia/${_folder}/lib")
    if(EXISTS "${_site}/nvidia/${_folder}/lib")
      list(APPEND _built_with "${_site}/nvidia/${_folder}/lib")
    endif()
  endforeach()
  list(APPEND _built_with "${CUDAToolkit_LIBRARY_DIR}")
endif()
set_target_properties(torch_sm3 PROPERTIES INSTALL_RPATH "${_beside};${_built_with}")

get_property(_sets GLOBAL PROPERTY TORCH_SM3_HEADER_SETS)
set(_file_sets "")
foreach(_set IN LISTS _sets)
  list(APPEND _file_sets FILE_SET ${_set} DESTINATION include)
endforeach()
install(TARGETS torch_sm3 EXPORT torch_sm3Targets LIBRARY DESTINATION lib ${_file_sets})
# A wheel goes to machines where the folders of this one mean nothing, or something else.
list(JOIN _beside ":" _relative)
list(JOIN _built_with ":" _absolute)
string(REPLACE "$" "\\$" _relative "${_relative}")
install(CODE "
  if(DEFINED ENV{TORCH_SM3_WHEEL})
    file(RPATH_CHANGE FILE \"\$ENV{DESTDIR}\${CMAKE_INSTALL_PREFIX}/lib/$<TARGET_FILE_NAME:torch_sm3>\"
      OLD_RPATH \"${_relative}:${_absolute}\" NEW_RPATH \"${_relative}\")
  endif()")
set(_package share/cmake/torch_sm3)
install(EXPORT torch_sm3Targets NAMESPACE torch_sm3:: DESTINATION ${_package})
configure_package_config_file(cmake/torch_sm3Config.cmake.in torch_sm3Config.cmake INSTALL_DESTINATION ${_package})
write_basic_package_version_file(torch_sm3ConfigVersion.cmake COMPATIBILITY SameMinorVersion)
install(FILES
  "${CMAKE_CURRENT_BINARY_DIR}/torch_sm3Config.cmake" "${CMAKE_CURRENT_BINARY_DIR}/torch_sm3ConfigVersion.cmake"
  cmake/TorchSM3Libtorch.cmake
  DESTINATION ${_package})
