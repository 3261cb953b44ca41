# SPDX-License-Identifier: Apache-2.0
"""The training loop."""

import sys
import time

from megatron_stubs import logs, loop
from megatron_stubs.loop import print_datetime

from megatron import (
    get_args,
    get_num_microbatches,
    get_signal_handler,
    get_tensorboard_writer,
    get_timers,
    is_last_rank,
    print_rank_0,
    print_rank_last,
    update_num_microbatches,
)
from megatron.checkpointing import load_checkpoint, save_checkpoint
from megatron.core import mpu
from megatron.initialize import write_args_to_tensorboard
from megatron.model import DistributedDataParallel as LocalDDP
from megatron.model import Float16Module, ModelType
from megatron.optimizer import get_megatron_optimizer
from megatron.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.schedules import get_forward_backward_func
from megatron.utils import (
    calc_params_l2_norm,
    check_adlr_autoresume_termination,
    report_memory,
    unwrap_model,
)

_TRAIN_START_TIME = time.time()
_TIMERS = ("forward-backward", "forward-compute", "grads-all-reduce", "optimizer")


def get_model(model_provider_func, model_type=ModelType.encoder_or_decoder):
    args, chunks = get_args(), loop.build_chunks(model_provider_func, model_type)
    half = Float16Module if args.fp16 or args.bf16 else None
    in_fp32 = args.accumulate_allreduce_grads_in_fp32
    buffers = args.use_contiguous_buffers_in_local_ddp
    return loop.wrapped(args, chunks, half, LocalDDP, in_fp32, buffers)


def setup_model_and_optimizer(
    model_provider_func,
    model_type,
    no_wd_decay_cond=None,
    scale_lr_cond=None,
    lr_mult=1.0,
):
    def adam(model):
        conditions = no_wd_decay_cond, scale_lr_cond, lr_mult
        return get_megatron_optimizer(model, *conditions)

    provider = model_provider_func
    kind, home = (model_type,), sys.modules[__name__]
    return loop.setup(home, provider, kind, adam, OptimizerParamScheduler)


def train_step(forward_step_func, data_iterator, model, optimizer, opt_param_scheduler):
    args, timers = get_args(), get_timers()
    if args.DDP_impl == "local" and args.use_contiguous_buffers_in_local_ddp:
        for chunk in model:
            chunk.zero_grad_buffer()
    optimizer.zero_grad()
    wait = args.barrier_with_L1_time
    timers("forward-backward", log_level=1).start(barrier=wait)
    inner = timers if args.timing_log_level > 1 else None
    losses_reduced = get_forward_backward_func()(
        forward_step_func, data_iterator, model, optimizer, inner, forward_only=False
    )
    timers("forward-backward").stop()
    optimizer.reduce_model_grads(args, timers)
    timers("optimizer", log_level=1).start(barrier=wait)
    successful, grad_norm, num_zeros_in_grad = optimizer.step(args, timers)
    timers("optimizer").stop()
    if successful:
        optimizer.gather_model_params(args, timers)
        opt_param_scheduler.step(increment=loop.increment())
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
    return logs.write(sys.modules[__name__], dict(locals()), levels=True, names=_TIMERS)


def save_checkpoint_and_time(iteration, model, optimizer, opt_param_scheduler):
    save_checkpoint(iteration, model, optimizer, opt_param_scheduler)


def train(
    forward_step_func,
    model,
    optimizer,
    opt_param_scheduler,
    train_data_iterator,
    valid_data_iterator,
    process_non_loss_data_func,
):
    more = (process_non_loss_data_func,)
    return loop.train(sys.modules[__name__], dict(locals()), more=more)


def evaluate(
    forward_step_func,
    data_iterator,
    model,
    process_non_loss_data_func,
    verbose=False,
):
    def forward(**more):
        return get_forward_backward_func()(
            *(forward_step_func, data_iterator, model), None, None, True, **more
        )

    total, collected = (
        loop.evaluated(sys.modules[__name__], forward, model, verbose),
        None,
    )
    if process_non_loss_data_func is not None:
        collected = forward(collect_non_loss_data=True)
    return total, collected


def evaluate_and_print_results(
    prefix,
    forward_step_func,
    data_iterator,
    model,
    iteration,
    process_non_loss_data_func,
    verbose=False,
):
    process = process_non_loss_data_func
    total, data = evaluate(forward_step_func, data_iterator, model, process, verbose)
    writer = get_tensorboard_writer()
    if process is not None and writer and is_last_rank():
        process(data, iteration, writer)
    loop.print_results(sys.modules[__name__], prefix, total, iteration)
