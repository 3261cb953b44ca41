# SPDX-License-Identifier: Apache-2.0
"""One typed function per operator of ``libtorch_sm3.so``.

The C++ ``Meta`` kernels are the fake kernels, so nothing is registered here.
"""

from __future__ import annotations

from typing import Any

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


def pipeline_schedule_class() -> Any:
    """Return the class ``(kind, ranks, chunks, microbatches)`` of schedules."""
    return torch.classes.torch_sm3.PipelineSchedule


def pipeline_transport_class() -> Any:
    """Return the class ``(group, timeout, max_pending, hub, first_stage)`` of links."""
    return torch.classes.torch_sm3.PipelineTransport
