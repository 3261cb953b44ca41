# SPDX-License-Identifier: Apache-2.0
"""Wrappers around an optimizer."""

import torch
from megatron_stubs.precision import HalfOptimizerBase, OptimizerBase


class FP16OptimizerWithFP16Params(HalfOptimizerBase):
    def __init__(self, optimizer, grad_scaler, clip_grad):
        super().__init__(optimizer, clip_grad)
        self.copy_parameters(grad_scaler)

    def step(self):
        return self.step_copies() is not None


class FP32Optimizer(OptimizerBase):
    def __init__(self, optimizer, clip_grad):
        super().__init__(optimizer, clip_grad)

    @torch.no_grad()
    def step(self):
        self.finish()
        return True
