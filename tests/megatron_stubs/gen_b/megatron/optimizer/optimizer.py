# SPDX-License-Identifier: Apache-2.0
"""Wrappers around an optimizer."""

import torch
from megatron_stubs.precision import HalfOptimizerBase, OptimizerBase


class Float16OptimizerWithFloat16Params(HalfOptimizerBase):
    def __init__(
        self,
        optimizer,
        clip_grad,
        log_num_zeros_in_grad,
        params_have_main_grad,
        bf16,
        grad_scaler,
    ):
        super().__init__(optimizer, clip_grad, log_num_zeros_in_grad)
        assert bf16 or grad_scaler is not None, "fp16 expects a grad scaler."
        self.copy_parameters(grad_scaler)

    def step(self):
        done = self.step_copies()
        return (False, None, None) if done is None else (True, *done)


class FP32Optimizer(OptimizerBase):
    def __init__(
        self,
        optimizer,
        clip_grad,
        log_num_zeros_in_grad,
        params_have_main_grad,
    ):
        super().__init__(optimizer, clip_grad, log_num_zeros_in_grad)
        self.params_have_main_grad = params_have_main_grad

    @torch.no_grad()
    def step(self):
        if self.params_have_main_grad:
            self.take_main_grads(keep=True)
        return True, *self.finish()
