# SPDX-License-Identifier: Apache-2.0
"""Train, in stock PyTorch, models that do not fit."""

from torch_sm3._library import BUILD_INFO, PACKAGE
from torch_sm3.distributed import AdasumState, adasum_all_reduce, adasum_hook

__version__: str = BUILD_INFO["version"]

#: For ``-DCMAKE_PREFIX_PATH=``, beside ``torch.utils.cmake_prefix_path``.
cmake_prefix_path = str(PACKAGE / "share" / "cmake")

__all__ = [
    "AdasumState",
    "__version__",
    "adasum_all_reduce",
    "adasum_hook",
    "cmake_prefix_path",
]
