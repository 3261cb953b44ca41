# SPDX-License-Identifier: Apache-2.0
"""Check and load ``libtorch_sm3.so``, the one owner of every registration."""

from __future__ import annotations

from typing import Any

import torch

from torch_sm3._build_info import (
    LIBRARY,
    check_torch,
    read_build_info,
    reinstall_line,
)


def load() -> dict[str, Any]:
    """Load the library once and return its build information.

    Raises:
        ImportError: if the library is missing, was built by another torch, or the
            dynamic loader refuses it.
    """
    info = read_build_info()
    check_torch(info, torch.__version__, torch.version.cuda)
    try:
        torch.ops.load_library(str(LIBRARY))
    except OSError as error:
        raise ImportError(
            f"torch_sm3: expected to load {LIBRARY}, but the loader said: {error}; "
            "the installed torch may have changed since the build; type: "
            f"{reinstall_line()}"
        ) from error
    return info


BUILD_INFO = load()
