# SPDX-License-Identifier: Apache-2.0
"""Forwards and backwards of a step."""

import sys

from megatron_stubs import runs
from torch.nn.parallel.distributed import DistributedDataParallel as torchDDP

from megatron import get_args, get_num_microbatches, get_timers, mpu, p2p_communication
from megatron.model import DistributedDataParallel as LocalDDP
from megatron.model import Float16Module
from megatron.utils import unwrap_model

_WRAPPERS = (torchDDP, LocalDDP, Float16Module)


def get_forward_backward_func():
    args = get_args()
    if mpu.get_pipeline_model_parallel_world_size() == 1:
        return forward_backward_no_pipelining
    if args.virtual_pipeline_model_parallel_size is None:
        return forward_backward_pipelining_without_interleaving
    assert get_num_microbatches() % args.pipeline_model_parallel_size == 0
    return forward_backward_pipelining_with_interleaving


def forward_step(forward_step_func, data_iterator, model, input_tensor, losses_reduced):
    timers = get_timers()
    timers("forward-compute").start()
    unwrap_model(model, _WRAPPERS).set_input_tensor(input_tensor)
    output_tensor, loss_func = forward_step_func(data_iterator, model)
    if mpu.is_pipeline_last_stage():
        loss, loss_reduced = loss_func(output_tensor)
        output_tensor = loss / get_num_microbatches()
        losses_reduced.append(loss_reduced)
    timers("forward-compute").stop()
    return output_tensor


def backward_step(optimizer, input_tensor, output_tensor, output_tensor_grad):
    timers = get_timers()
    timers("backward-compute").start()
    tensors = input_tensor, output_tensor, output_tensor_grad
    found = runs.backward_step(optimizer.scale_loss, *tensors)
    timers("backward-compute").stop()
    return found


def forward_backward_no_pipelining(
    forward_step_func, data_iterator, model, optimizer, timers, forward_only
):
    home = sys.modules[__name__]
    return runs.scheduled(home, dict(locals()), "none")


def forward_backward_pipelining_with_interleaving(
    forward_step_func, data_iterator, model, optimizer, timers, forward_only
):
    home = sys.modules[__name__]
    return runs.scheduled(home, dict(locals()), "interleaved")


def forward_backward_pipelining_without_interleaving(
    forward_step_func, data_iterator, model, optimizer, timers, forward_only
):
    home = sys.modules[__name__]
    return runs.scheduled(home, dict(locals()), "1f1b")
