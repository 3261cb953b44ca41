# SPDX-License-Identifier: Apache-2.0
"""Train, in stock PyTorch, models that do not fit."""

import importlib as _importlib
import sys as _sys
from typing import TYPE_CHECKING as _TYPE_CHECKING

from torch_sm3._build_info import PACKAGE

try:
    from torch_sm3._library import BUILD_INFO
except ImportError as _error:
    # The report is asked for just when the library does not load.
    from torch_sm3 import info

    if not info.asked_for():
        raise
    _sys.exit(info.main(error=_error))

from torch_sm3 import pipeline, reversible
from torch_sm3.optim import (
    SM3,
    Cover,
    SM3InBackward,
    WarmupConstantLR,
    import_state_dict,
    sm3,
)

if _TYPE_CHECKING:
    from torch_sm3.distributed import (
        AdasumOptimizer,
        AdasumState,
        adasum_all_reduce,
        adasum_fsdp_hook,
        adasum_hook,
    )

__version__: str = BUILD_INFO["version"]

#: For ``-DCMAKE_PREFIX_PATH=``, beside ``torch.utils.cmake_prefix_path``.
cmake_prefix_path = str(PACKAGE / "share" / "cmake")

__all__ = [
    "SM3",
    "AdasumOptimizer",
    "AdasumState",
    "Cover",
    "SM3InBackward",
    "WarmupConstantLR",
    "__version__",
    "adasum_all_reduce",
    "adasum_fsdp_hook",
    "adasum_hook",
    "cmake_prefix_path",
    "import_state_dict",
    "pipeline",
    "reversible",
    "sm3",
]


def __getattr__(name: str) -> object:
    # Imported at first use: torch.distributed.optim, where SM3 is registered, takes
    # half a second.
    if name == "trainer":
        return _importlib.import_module("torch_sm3.trainer")
    if name != "distributed" and not name.lower().startswith("adasum"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = _importlib.import_module("torch_sm3.distributed")
    return module if name == "distributed" else getattr(module, name)
