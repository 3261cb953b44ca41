# SPDX-License-Identifier: Apache-2.0
"""Forwards and backwards of a step."""

import torch
from megatron_stubs import runs
from torch.nn.parallel.distributed import DistributedDataParallel as torchDDP

from megatron import get_args, get_num_microbatches, get_timers, mpu, p2p_communication
from megatron.model import DistributedDataParallel as LocalDDP
from megatron.model import Float16Module, ModelType
from megatron.utils import unwrap_model


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
    alone = not isinstance(input_tensor, list)
    inputs = [input_tensor] if alone else input_tensor
    unwrapped = unwrap_model(model, (torchDDP, LocalDDP, Float16Module))
    unwrapped.set_input_tensor(inputs)
    output_tensor, loss_func = forward_step_func(data_iterator, model)
    if mpu.is_pipeline_last_stage():
        loss, loss_reduced = loss_func(output_tensor)
        output_tensor = loss / get_num_microbatches()
        losses_reduced.append(loss_reduced)
    timers("forward-compute").stop()
    # A decoder's rank hands the encoder's state on.
    both = unwrapped.model_type == ModelType.encoder_and_decoder
    if both and mpu.is_pipeline_stage_after_split():
        return [output_tensor, inputs[-1]]
    return output_tensor if alone else [output_tensor]


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
    assert len(model) == 1
    model = model[0]
    losses_reduced = []

    def forward():
        data = data_iterator, model, None, losses_reduced
        return forward_step(forward_step_func, *data)

    def backward(*tensors):
        return backward_step(optimizer, *tensors)

    runs.alone(forward, backward, model, forward_only)
    return losses_reduced


def _pipelining(
    forward_step_func, iterators, model, optimizer, timers, forward_only, interleaved
):
    losses_reduced = []

    def forward(chunk, received):
        data, part = iterators[chunk], model[chunk]
        return forward_step(forward_step_func, data, part, received, losses_reduced)

    def backward(*tensors):
        return backward_step(optimizer, *tensors)

    tensors = None
    if not interleaved:
        unwrapped = unwrap_model(model[0], (torchDDP, LocalDDP, Float16Module))
        both = unwrapped.model_type == ModelType.encoder_and_decoder
        tensors = runs.wanted(both, True, timers)
    flags = interleaved, forward_only
    runs.pipelining(p2p_communication, forward, backward, len(model), flags, tensors)
    return losses_reduced


def forward_backward_pipelining_with_interleaving(
    forward_step_func, data_iterator, model, optimizer, timers, forward_only
):
    given = forward_step_func, data_iterator, model, optimizer, timers, forward_only
    return _pipelining(*given, True)


def forward_backward_pipelining_without_interleaving(
    forward_step_func, data_iterator, model, optimizer, timers, forward_only
):
    given = forward_step_func, [data_iterator], model, optimizer, timers, forward_only
    return _pipelining(*given, False)
