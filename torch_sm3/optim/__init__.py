# SPDX-License-Identifier: Apache-2.0
"""SM3, an adaptive optimizer whose state is rows + columns."""

from torch_sm3.optim._cover import Cover
from torch_sm3.optim._functional import sm3
from torch_sm3.optim._import import import_state_dict
from torch_sm3.optim._in_backward import SM3InBackward
from torch_sm3.optim._schedule import WarmupConstantLR
from torch_sm3.optim._sm3 import SM3

__all__ = [
    "SM3",
    "Cover",
    "SM3InBackward",
    "WarmupConstantLR",
    "import_state_dict",
    "sm3",
]
