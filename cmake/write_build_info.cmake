# SPDX-License-Identifier: Apache-2.0
# cmake -P script of TorchSM3BuildInfo.cmake.
set(COMMIT "unknown")
execute_process(COMMAND git -C "${SOURCE}" rev-parse --short=12 HEAD
  OUTPUT_VARIABLE _commit OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET RESULT_VARIABLE _failed)
if(NOT _failed)
  set(COMMIT "${_commit}")
  execute_process(COMMAND git -C "${SOURCE}" diff --quiet HEAD ERROR_QUIET RESULT_VARIABLE _dirty)
  if(_dirty)
    string(APPEND COMMIT "-dirty")
  endif()
endif()
if(WITH_CUDA)
  set(WITH_CUDA true)
else()
  set(WITH_CUDA false)
endif()
configure_file("${INPUT}" "${OUTPUT}" @ONLY)
