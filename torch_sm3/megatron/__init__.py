# SPDX-License-Identifier: Apache-2.0
r"""Put pipeline schedules, SM3, Adasum and reversible layers into Megatron-LM.

``install()`` rebinds functions of an imported Megatron-LM, megatron-core or fork, from
v2.0 of January 2021 on, whose signatures it knows; ``restore()`` puts the old ones
back. Nothing of Megatron is imported before that.
"""

from torch_sm3.megatron.detect import MegatronSignatureError, detect
from torch_sm3.megatron.entries import (
    evaluate,
    finetune,
    get_forward_backward_func,
    train,
    train_step,
    training_log,
)
from torch_sm3.megatron.install import Installation, install, installed, restore

__all__ = [
    "Installation",
    "MegatronSignatureError",
    "detect",
    "evaluate",
    "finetune",
    "get_forward_backward_func",
    "install",
    "installed",
    "restore",
    "train",
    "train_step",
    "training_log",
]
