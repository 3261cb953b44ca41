# SPDX-License-Identifier: Apache-2.0
"""One typed function per operator of ``libtorch_sm3.so``.

The C++ ``Meta`` kernels are the fake kernels, so nothing is registered here.
"""

from __future__ import annotations

import torch

from torch_sm3 import _library

assert _library.BUILD_INFO, "the library is loaded before any operator is looked up"
_ops = torch.ops.torch_sm3

# --- library ---------------------------------------------------------------


def build_info() -> str:
    """Return the build information of the loaded library as JSON."""
    return _ops.build_info()


def cpu_capability() -> str:
    """Return the instruction set of the CPU kernels: scalar, avx2 or avx512."""
    return _ops.cpu_capability()


# --- SM3 -------------------------------------------------------------------


# --- Adasum ----------------------------------------------------------------


# --- reversible ------------------------------------------------------------


# --- pipeline --------------------------------------------------------------
