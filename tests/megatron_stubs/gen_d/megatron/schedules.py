# SPDX-License-Identifier: Apache-2.0
"""Forwards and backwards of a step."""

import sys

from megatron_stubs import runs
from torch.nn.parallel.distributed import DistributedDataParallel as torchDDP

from megatron import get_args, get_num_microbatches, p2p_communication
from megatron.core import mpu
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


def forward_step(
    forward_step_func,
    data_iterator,
    model,
    input_tensor,
    forward_data_store,
    timers,
    collect_non_loss_data=False,
):
    if timers is not None:
        timers("forward-compute", log_level=2).start()
    alone = not isinstance(input_tensor, list)
    inputs = [input_tensor] if alone else input_tensor
    unwrapped = unwrap_model(model, (torchDDP, LocalDDP, Float16Module))
    unwrapped.set_input_tensor(inputs)
    output_tensor, loss_func = forward_step_func(data_iterator, model)
    if mpu.is_pipeline_last_stage() and collect_non_loss_data:
        forward_data_store.append(loss_func(output_tensor, non_loss_data=True))
    elif mpu.is_pipeline_last_stage():
        loss, loss_reduced = loss_func(output_tensor)
        output_tensor = loss / get_num_microbatches()
        forward_data_store.append(loss_reduced)
    if timers is not None:
        timers("forward-compute").stop()
    # A decoder's rank hands the encoder's state on.
    both = unwrapped.model_type == ModelType.encoder_and_decoder
    if both and mpu.is_pipeline_stage_after_split():
        return [output_tensor, inputs[-1]]
    return output_tensor if alone else [output_tensor]


def backward_step(optimizer, input_tensor, output_tensor, output_tensor_grad, timers):
    if timers is not None:
        timers("backward-compute", log_level=2).start()
    tensors = input_tensor, output_tensor, output_tensor_grad
    found = runs.backward_step(optimizer.scale_loss, *tensors)
    if timers is not None:
        timers("backward-compute").stop()
    return found


def forward_backward_no_pipelining(
    forward_step_func,
    data_iterator,
    model,
    optimizer,
    timers,
    forward_only,
    collect_non_loss_data=False,
):
    return _run(dict(locals()), "none")


def forward_backward_pipelining_with_interleaving(
    forward_step_func,
    data_iterator,
    model,
    optimizer,
    timers,
    forward_only,
    collect_non_loss_data=False,
):
    return _run(dict(locals()), "interleaved")


def forward_backward_pipelining_without_interleaving(
    forward_step_func,
    data_iterator,
    model,
    optimizer,
    timers,
    forward_only,
    collect_non_loss_data=False,
):
    return _run(dict(locals()), "1f1b")


def _run(given, kind):
    timers, collect = given["timers"], given["collect_non_loss_data"]
    home = sys.modules[__name__]
    more = (timers, collect), (timers,)
    return runs.scheduled(home, given, kind, False, *more)
