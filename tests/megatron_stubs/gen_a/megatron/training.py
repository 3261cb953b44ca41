# SPDX-License-Identifier: Apache-2.0
"""The training loop, with its schedules."""

import sys
import time

import torch
from megatron_stubs import logs, loop, runs
from megatron_stubs.loop import print_datetime
from torch.nn.parallel.distributed import DistributedDataParallel as torchDDP

from megatron import (
    get_args,
    get_num_microbatches,
    get_tensorboard_writer,
    get_timers,
    is_last_rank,
    mpu,
    print_rank_0,
    print_rank_last,
    update_num_microbatches,
)
from megatron.checkpointing import load_checkpoint, save_checkpoint
from megatron.initialize import write_args_to_tensorboard
from megatron.learning_rates import AnnealingLR
from megatron.model import DistributedDataParallel as LocalDDP
from megatron.model import FP16Module
from megatron.optimizer import get_megatron_optimizer
from megatron.utils import check_adlr_autoresume_termination, report_memory

_TRAIN_START_TIME = time.time()
_TIMERS = ("forward-compute", "backward-compute", "optimizer", "batch-generator")


def get_model(model_provider_func):
    args = get_args()
    model = model_provider_func(
        mpu.is_pipeline_first_stage(), mpu.is_pipeline_last_stage()
    )
    if args.fp16:
        model = FP16Module(model)
    if args.DDP_impl == "torch":
        return torchDDP(model, process_group=mpu.get_data_parallel_group())
    return LocalDDP(model)


def _unwrapped(model):
    while isinstance(model, (torchDDP, LocalDDP, FP16Module)):
        model = model.module
    return model


def setup_model_and_optimizer(model_provider_func):
    def adam(model):
        return get_megatron_optimizer(_unwrapped(model))

    home = sys.modules[__name__]
    return loop.setup(home, model_provider_func, (), adam, AnnealingLR)


def communicate(tensor_send_next, tensor_send_prev, recv_forward, recv_backward):
    timers = get_timers()
    if tensor_send_next is not None:
        runs.exchange(True, tensor_send_next, timers=timers)
    if tensor_send_prev is not None:
        runs.exchange(False, tensor_send_prev, timers=timers)
    from_prev = runs.exchange(True, timers=timers) if recv_forward else None
    from_next = runs.exchange(False, timers=timers) if recv_backward else None
    return from_prev, from_next


def backward_step(optimizer, model, input_tensor, output_tensor, output_tensor_grad):
    timers = get_timers()
    timers("backward-compute").start()
    tensors = input_tensor, output_tensor, output_tensor_grad
    found = runs.backward_step(optimizer.scale_loss, *tensors)
    timers("backward-compute").stop()
    return found


def _forward(forward_step_func, data_iterator, model, input_tensor, losses_reduced):
    timers = get_timers()
    timers("forward-compute").start()
    output_tensor = forward_step_func(data_iterator, model, input_tensor)
    timers("forward-compute").stop()
    if not mpu.is_pipeline_last_stage():
        return output_tensor
    loss, loss_reduced = output_tensor
    losses_reduced.append(loss_reduced)
    return loss / get_num_microbatches()


def forward_backward_no_pipelining(
    forward_step_func, data_iterator, model, optimizer, timers
):
    losses_reduced = []
    for _ in range(get_num_microbatches()):
        data = data_iterator, model, None, losses_reduced
        loss = _forward(forward_step_func, *data)
        backward_step(optimizer, model, None, loss, None)
    return losses_reduced


def forward_backward_pipelining(
    forward_step_func, data_iterator, model, optimizer, timers
):
    return _pipelining(forward_step_func, data_iterator, model, optimizer)


def _pipelining(forward_step_func, data_iterator, model, optimizer, forward_only=False):
    losses_reduced = []

    def forward(chunk):
        received, _ = communicate(None, None, True, False)
        data = data_iterator, model, received, losses_reduced
        output = _forward(forward_step_func, *data)
        communicate(output, None, False, False)
        return None if forward_only else (received, output)

    def backward(chunk, kept):
        _, gradient = communicate(None, None, False, True)
        found = backward_step(optimizer, model, *kept, gradient)
        communicate(None, found, False, False)

    rank = mpu.get_pipeline_model_parallel_rank()
    stages = mpu.get_pipeline_model_parallel_world_size()
    number = get_num_microbatches()
    runs.run(
        runs.order(rank, stages, number, 1, False, forward_only), forward, backward
    )
    return losses_reduced


def train_step(forward_step_func, data_iterator, model, optimizer, lr_scheduler):
    args, timers = get_args(), get_timers()
    optimizer.zero_grad()
    if mpu.get_pipeline_model_parallel_world_size() > 1:
        losses_reduced = forward_backward_pipelining(
            forward_step_func, data_iterator, model, optimizer, timers
        )
    else:
        losses_reduced = forward_backward_no_pipelining(
            forward_step_func, data_iterator, model, optimizer, timers
        )
    if args.DDP_impl == "local":
        model.allreduce_params(reduce_after=False, fp32_allreduce=args.fp32_allreduce)
    ends = mpu.is_pipeline_first_stage() or mpu.is_pipeline_last_stage()
    if ends and mpu.get_pipeline_model_parallel_world_size() > 1:
        unwrapped = _unwrapped(model)
        if unwrapped.share_word_embeddings:
            gradient = unwrapped.word_embeddings_weight().grad
            torch.distributed.all_reduce(gradient, group=mpu.get_embedding_group())
    timers("optimizer").start()
    successful = optimizer.step()
    timers("optimizer").stop()
    if successful:
        lr_scheduler.step(increment=loop.increment())
    return loop.averaged(losses_reduced), int(not successful)


def training_log(
    loss_dict,
    total_loss_dict,
    learning_rate,
    iteration,
    loss_scale,
    report_memory_flag,
    skipped_iter,
):
    return logs.write(sys.modules[__name__], dict(locals()), old=True, names=_TIMERS)


def save_checkpoint_and_time(iteration, model, optimizer, lr_scheduler):
    save_checkpoint(iteration, model, optimizer, lr_scheduler)


def train(
    forward_step_func,
    model,
    optimizer,
    lr_scheduler,
    train_data_iterator,
    valid_data_iterator,
):
    return loop.train(sys.modules[__name__], dict(locals()), timer="interval time")


def evaluate(forward_step_func, data_iterator, model, verbose=False):
    def forward():
        return _pipelining(forward_step_func, data_iterator, model, None, True)

    return loop.evaluated(sys.modules[__name__], forward, [model], verbose)


def evaluate_and_print_results(
    prefix, forward_step_func, data_iterator, model, iteration, verbose=False
):
    total = evaluate(forward_step_func, data_iterator, model, verbose)
    loop.print_results(sys.modules[__name__], prefix, total, iteration)
