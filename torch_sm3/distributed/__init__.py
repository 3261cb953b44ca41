# SPDX-License-Identifier: Apache-2.0
r"""Adasum: combine the gradients of all ranks as DDP's communication hook.

Parallel gradients are averaged and orthogonal ones are added, layer by layer, for
any number of ranks, and every rank ends with the same bits. The method is that of
`Scaling Distributed Training with Adaptive Summation
<https://arxiv.org/abs/2006.02924>`_.
"""

from torch_sm3._groups import own_group
from torch_sm3.distributed._all_reduce import adasum_all_reduce
from torch_sm3.distributed._fsdp import adasum_fsdp_hook
from torch_sm3.distributed._hook import adasum_hook
from torch_sm3.distributed._metrics import AdasumMetrics, LayerMetrics
from torch_sm3.distributed._optimizer import AdasumOptimizer
from torch_sm3.distributed._state import AdasumState
from torch_sm3.optim._functional_optim import FunctionalSM3, register

__all__ = [
    "AdasumMetrics",
    "AdasumOptimizer",
    "AdasumState",
    "FunctionalSM3",
    "LayerMetrics",
    "adasum_all_reduce",
    "adasum_fsdp_hook",
    "adasum_hook",
    "own_group",
]

register()
