# SPDX-License-Identifier: Apache-2.0
"""SM3, an adaptive optimizer whose state is rows + columns."""

from torch_sm3.optim._cover import Cover
from torch_sm3.optim._functional import sm3
from torch_sm3.optim._import import import_state_dict
from torch_sm3.optim._multi import multi_tensor_sm3 as _multi_tensor_sm3
from torch_sm3.optim._schedule import WarmupConstantLR
from torch_sm3.optim._single import single_tensor_sm3 as _single_tensor_sm3
from torch_sm3.optim._sm3 import SM3

__all__ = [
    "SM3",
    "Cover",
    "WarmupConstantLR",
    "_multi_tensor_sm3",
    "_single_tensor_sm3",
    "import_state_dict",
    "sm3",
]
