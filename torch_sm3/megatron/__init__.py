# SPDX-License-Identifier: Apache-2.0
"""The plug into Megatron-LM and its forks."""

from torch_sm3.megatron.detect import MegatronSignatureError, detect
from torch_sm3.megatron.install import Installation, install, installed, restore

__all__ = [
    "Installation",
    "MegatronSignatureError",
    "detect",
    "install",
    "installed",
    "restore",
]
