# SPDX-License-Identifier: Apache-2.0
"""Data parallelism."""

import torch

from megatron import mpu


class DistributedDataParallel(torch.nn.Module):
    def __init__(self, module):
        super().__init__()
        self.module = module
        self.needs_reduction = False

    def allreduce_params(self, reduce_after=True, no_scale=False, fp32_allreduce=False):
        """Average gradients over replicas."""
        if not self.needs_reduction:
            return
        self.needs_reduction = False
        group = mpu.get_data_parallel_group()
        size = torch.distributed.get_world_size(group)
        for parameter in self.module.parameters():
            if parameter.grad is None:
                continue
            gradient = parameter.grad.float() if fp32_allreduce else parameter.grad
            if not no_scale and not reduce_after:
                gradient /= size
            torch.distributed.all_reduce(gradient, group=group)
            if not no_scale and reduce_after:
                gradient /= size
            parameter.grad.copy_(gradient)

    def forward(self, *inputs, **kwargs):
        self.needs_reduction = True
        return self.module(*inputs, **kwargs)

    def state_dict(self, *args, **kwargs):
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, state_dict, strict=True):
        self.module.load_state_dict(state_dict, strict=strict)
