# SPDX-License-Identifier: Apache-2.0
"""Wrappers around an optimizer."""

import torch
from megatron_stubs import loop
from megatron_stubs.precision import HalfOptimizerBase, OptimizerBase


class _Reduces:
    """What is done around a step."""

    def reduce_model_grads(self, args, timers):
        timers("grads-all-reduce", log_level=1).start(barrier=args.barrier_with_L1_time)
        for model in self.models if args.DDP_impl == "local" else []:
            model.allreduce_gradients()
        timers("grads-all-reduce").stop()
        loop.reduce_embeddings(args, self.models)

    def gather_model_params(self, args, timers):
        pass


class Float16OptimizerWithFloat16Params(_Reduces, HalfOptimizerBase):
    def __init__(
        self,
        optimizer,
        clip_grad,
        log_num_zeros_in_grad,
        params_have_main_grad,
        use_contiguous_buffers_in_local_ddp,
        fp16,
        bf16,
        params_dtype,
        grad_scaler,
        models,
    ):
        super().__init__(optimizer, clip_grad, log_num_zeros_in_grad)
        assert bf16 or grad_scaler is not None, "fp16 expects a grad scaler."
        self.copy_parameters(grad_scaler)
        self.models = models

    def step(self, args, timers):
        done = self.step_copies()
        return (False, None, None) if done is None else (True, *done)


class FP32Optimizer(_Reduces, OptimizerBase):
    def __init__(
        self,
        optimizer,
        clip_grad,
        log_num_zeros_in_grad,
        params_have_main_grad,
        use_contiguous_buffers_in_local_ddp,
        models,
    ):
        super().__init__(optimizer, clip_grad, log_num_zeros_in_grad)
        self.params_have_main_grad = params_have_main_grad
        self.models = models
        self._keep = use_contiguous_buffers_in_local_ddp

    @torch.no_grad()
    def step(self, args, timers):
        if self.params_have_main_grad:
            self.take_main_grads(self._keep)
        return True, *self.finish()
