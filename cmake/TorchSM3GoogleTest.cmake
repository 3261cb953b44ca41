# SPDX-License-Identifier: Apache-2.0
# GTest::gtest_main: the system's, else Debian's package unpacked into the build folder without root, else FetchContent.
include_guard(GLOBAL)

# Debian's package of sources, below the build folder; nothing where there is no apt or no package list.
function(_torch_sm3_unpack_debian folder)
  find_program(TORCH_SM3_APT apt-get)
  find_program(TORCH_SM3_DPKG dpkg-deb)
  if(NOT TORCH_SM3_APT OR NOT TORCH_SM3_DPKG)
    return()
  endif()
  file(MAKE_DIRECTORY "${folder}")
  execute_process(COMMAND "${TORCH_SM3_APT}" download -qq googletest
    WORKING_DIRECTORY "${folder}" ERROR_QUIET OUTPUT_QUIET TIMEOUT 120)
  file(GLOB _package "${folder}/googletest_*.deb")
  if(_package)
    execute_process(COMMAND "${TORCH_SM3_DPKG}" -x "${_package}" "${folder}")
  endif()
endfunction()

find_package(GTest CONFIG QUIET)
set(_from "the system")
if(NOT TARGET GTest::gtest_main)
  set(BUILD_GMOCK OFF)
  set(INSTALL_GTEST OFF)
  set(_debian "${CMAKE_BINARY_DIR}/debian-googletest")
  if(NOT EXISTS "${_debian}/usr/src/googletest/CMakeLists.txt")
    _torch_sm3_unpack_debian("${_debian}")
  endif()
  if(EXISTS "${_debian}/usr/src/googletest/CMakeLists.txt")
    set(_from "Debian's package, unpacked into the build folder")
    # Its CMake files are older than what CMake 4 still reads without a word.
    set(CMAKE_POLICY_VERSION_MINIMUM 3.10)
    add_subdirectory("${_debian}/usr/src/googletest" "${CMAKE_BINARY_DIR}/googletest" EXCLUDE_FROM_ALL SYSTEM)
    unset(CMAKE_POLICY_VERSION_MINIMUM)
  else()
    set(_from "its repository")
    set(_archive "${CMAKE_BINARY_DIR}/googletest-1.15.2.tar.gz")
    if(NOT FETCHCONTENT_SOURCE_DIR_GOOGLETEST AND NOT EXISTS "${_archive}")
      # Downloaded here, because FetchContent would end with a page of its own about git and curl.
      file(DOWNLOAD https://github.com/google/googletest/releases/download/v1.15.2/googletest-1.15.2.tar.gz
        "${_archive}.part" STATUS _status INACTIVITY_TIMEOUT 30)
      list(GET _status 0 _code)
      if(_code)
        list(GET _status 1 _why)
        message(FATAL_ERROR "torch_sm3: expected GoogleTest for the C++ tests, but found none: not on this system, no "
          "Debian package 'googletest' to download, and its repository said: ${_why}. Type: apt-get install "
          "libgtest-dev, or give its sources by -DFETCHCONTENT_SOURCE_DIR_GOOGLETEST=FOLDER")
      endif()
      file(RENAME "${_archive}.part" "${_archive}")
    endif()
    include(FetchContent)
    FetchContent_Declare(googletest SYSTEM URL "${_archive}" DOWNLOAD_EXTRACT_TIMESTAMP ON
      URL_HASH SHA256=7b42b4d6ed48810c5362c265a17faebe90dc2373c885e5216439d37927f02926)
    FetchContent_MakeAvailable(googletest)
  endif()
  # Warnings in code that is not ours help nobody here.
  target_compile_options(gtest PRIVATE -w)
  if(NOT TARGET GTest::gtest_main)
    add_library(GTest::gtest_main ALIAS gtest_main)
  endif()
endif()
message(STATUS "torch_sm3: GoogleTest from ${_from}")
