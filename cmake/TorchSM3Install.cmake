# SPDX-License-Identifier: Apache-2.0
# lib/, include/ and share/cmake/torch_sm3/: the same layout inside the wheel and under a prefix of `cmake --install`.
include_guard(GLOBAL)
include(CMakePackageConfigHelpers)

get_property(_sets GLOBAL PROPERTY TORCH_SM3_HEADER_SETS)
set(_file_sets "")
foreach(_set IN LISTS _sets)
  list(APPEND _file_sets FILE_SET ${_set} DESTINATION include)
endforeach()
install(TARGETS torch_sm3 EXPORT torch_sm3Targets LIBRARY DESTINATION lib ${_file_sets})
set(_package share/cmake/torch_sm3)
install(EXPORT torch_sm3Targets NAMESPACE torch_sm3:: DESTINATION ${_package})
configure_package_config_file(cmake/torch_sm3Config.cmake.in torch_sm3Config.cmake INSTALL_DESTINATION ${_package})
write_basic_package_version_file(torch_sm3ConfigVersion.cmake COMPATIBILITY SameMinorVersion)
install(FILES
  "${CMAKE_CURRENT_BINARY_DIR}/torch_sm3Config.cmake" "${CMAKE_CURRENT_BINARY_DIR}/torch_sm3ConfigVersion.cmake"
  cmake/TorchSM3Libtorch.cmake
  DESTINATION ${_package})
