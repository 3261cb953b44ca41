# SPDX-License-Identifier: Apache-2.0
"""The training loop."""

import sys
import time

from megatron_stubs import logs, loop
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
from megatron.model import Float16Module
from megatron.optimizer import get_megatron_optimizer
from megatron.schedules import get_forward_backward_func
from megatron.utils import (
    calc_params_l2_norm,
    check_adlr_autoresume_termination,
    report_memory,
    unwrap_model,
)

_TRAIN_START_TIME = time.time()
_WRAPPERS = (torchDDP, LocalDDP, Float16Module)
_TIMERS = ("forward-compute", "backward-compute", "optimizer", "batch-generator")


def get_model(model_provider_func):
    args, chunks = get_args(), loop.build_chunks(model_provider_func)
    half = Float16Module if args.fp16 or args.bf16 else None
    in_fp32 = args.accumulate_allreduce_grads_in_fp32
    buffers = args.use_contiguous_buffers_in_ddp
    return loop.wrapped(args, chunks, half, LocalDDP, in_fp32, buffers)


def setup_model_and_optimizer(model_provider_func):
    def adam(model):
        return get_megatron_optimizer(unwrap_model(model, _WRAPPERS))

    home = sys.modules[__name__]
    return loop.setup(home, model_provider_func, (), adam, AnnealingLR)


def train_step(forward_step_func, data_iterator, model, optimizer, lr_scheduler):
    args, timers = get_args(), get_timers()
    if args.DDP_impl == "local" and args.use_contiguous_buffers_in_ddp:
        for chunk in model:
            chunk.zero_grad_buffer()
    else:
        optimizer.zero_grad()
    losses_reduced = get_forward_backward_func()(
        forward_step_func, data_iterator, model, optimizer, timers, forward_only=False
    )
    if args.DDP_impl == "local":
        for chunk in model:
            chunk.allreduce_gradients()
    loop.reduce_embeddings(args, model)
    timers("optimizer").start()
    successful, grad_norm, num_zeros_in_grad = optimizer.step()
    timers("optimizer").stop()
    if successful:
        lr_scheduler.step(increment=loop.increment())
    losses = loop.averaged(losses_reduced)
    return losses, int(not successful), grad_norm, num_zeros_in_grad


def training_log(
    loss_dict,
    total_loss_dict,
    learning_rate,
    iteration,
    loss_scale,
    report_memory_flag,
    skipped_iter,
    grad_norm,
    params_norm,
    num_zeros_in_grad,
):
    return logs.write(sys.modules[__name__], dict(locals()), names=_TIMERS)


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
    return loop.train(sys.modules[__name__], dict(locals()))


def evaluate(forward_step_func, data_iterator, model, verbose=False):
    def forward():
        return get_forward_backward_func()(
            forward_step_func, data_iterator, model, None, None, forward_only=True
        )

    return loop.evaluated(sys.modules[__name__], forward, model, verbose)


def evaluate_and_print_results(
    prefix, forward_step_func, data_iterator, model, iteration, verbose=False
):
    total = evaluate(forward_step_func, data_iterator, model, verbose)
    loop.print_results(sys.modules[__name__], prefix, total, iteration)
