# SPDX-License-Identifier: Apache-2.0
"""Train, in stock PyTorch, models that do not fit."""

from torch_sm3 import pipeline
from torch_sm3._library import BUILD_INFO, PACKAGE

__version__: str = BUILD_INFO["version"]

#: For ``-DCMAKE_PREFIX_PATH=``, beside ``torch.utils.cmake_prefix_path``.
cmake_prefix_path = str(PACKAGE / "share" / "cmake")

__all__ = ["__version__", "cmake_prefix_path", "pipeline"]
