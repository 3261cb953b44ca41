# SPDX-License-Identifier: Apache-2.0
"""Parts of the training loops that are the same in all generations.

``home`` is the stand-in's training module, whose functions are looked up by name at
each call, as in Megatron itself.
"""

from __future__ import annotations

import datetime
import math
import sys
import time

import torch
from megatron_stubs import groups as mpu
from megatron_stubs.shared import (
    get_args,
    get_num_microbatches,
    get_tensorboard_writer,
    get_timers,
    print_rank_0,
)
from torch.nn.parallel.distributed import DistributedDataParallel as torchDDP


def print_datetime(string):
    torch.distributed.barrier()
    print_rank_0(f"[{string}] datetime: {datetime.datetime.now()}")


def setup(home, provider, kind, make_optimizer, make_scheduler):
    """Return model, optimizer and scheduler, from a checkpoint if there is one.

    Args:
        home: the training module.
        provider: builds a chunk.
        kind: of model, in a tuple, where generations know several.
        make_optimizer: from the model.
        make_scheduler: from optimizer, highest and lowest rate, and samples.
    """
    args = get_args()
    model = home.get_model(provider, *kind)
    optimizer = make_optimizer(model)
    steps = args.lr_decay_iters * args.global_batch_size
    scheduler = make_scheduler(optimizer, args.lr, args.min_lr, steps)
    args.iteration = 0
    if args.load is not None:
        args.iteration = home.load_checkpoint(model, optimizer, scheduler)
    return model, optimizer, scheduler


def wrapped(args, chunks, half, local, in_fp32, buffers):
    """Return chunks in half precision if asked for, and with data parallelism."""
    if half is not None:
        chunks = [half(chunk, args) for chunk in chunks]
    if args.DDP_impl == "torch":
        group = mpu.get_data_parallel_group()
        return [torchDDP(chunk, process_group=group) for chunk in chunks]
    return [local(chunk, in_fp32, buffers) for chunk in chunks]


def build_chunks(provider, *kind):
    """Return this rank's chunks, built by a user's function.

    Args:
        provider: the function.
        *kind: of model, where generations know several.
    """
    args = get_args()
    chunks = []
    stages = mpu.get_pipeline_model_parallel_world_size()
    virtual = args.virtual_pipeline_model_parallel_size if stages > 1 else None
    both = bool(kind) and kind[0].name == "encoder_and_decoder"
    assert not (both and virtual), "no interleaving with an encoder and a decoder"
    for chunk in range(virtual or 1):
        if virtual is not None:
            mpu.set_virtual_pipeline_model_parallel_rank(chunk)
        first, last = mpu.is_pipeline_first_stage(), mpu.is_pipeline_last_stage()
        options = {}
        if both:
            rank = mpu.get_pipeline_model_parallel_rank()
            split = args.pipeline_model_parallel_split_rank
            first, last = first or rank == split, last or rank + 1 == split
            options["add_encoder"] = mpu.is_pipeline_stage_before_split()
            options["add_decoder"] = mpu.is_pipeline_stage_after_split()
        model = provider(pre_process=first, post_process=last, **options)
        for model_type in kind:
            model.model_type = model_type
        chunks.append(model)
    return chunks


def _inner(model):
    while hasattr(model, "module"):
        model = model.module
    return model


def reduce_embeddings(args, models):
    """Sum the gradients of tied embeddings over the stages that have them."""
    if mpu.get_pipeline_model_parallel_world_size() == 1:
        return
    if mpu.is_rank_in_embedding_group(ignore_virtual=True):
        last = mpu.is_pipeline_last_stage(ignore_virtual=True)
        model = _inner(models[-1] if last else models[0])
        if model.share_word_embeddings:
            weight = model.word_embeddings_weight()
            gradient = weight.main_grad if hasattr(weight, "main_grad") else weight.grad
            torch.distributed.all_reduce(gradient, group=mpu.get_embedding_group())
    split = args.pipeline_model_parallel_split_rank
    if split is not None and mpu.is_rank_in_position_embedding_group():
        embedding = _inner(models[0]).language_model.embedding
        torch.distributed.all_reduce(
            embedding.position_embeddings.weight.main_grad,
            group=mpu.get_position_embedding_group(),
        )


def averaged(losses_reduced):
    """Average by the keys of the first microbatch; nothing before the last stage."""
    if not mpu.is_pipeline_last_stage(ignore_virtual=True):
        return {}
    number = len(losses_reduced)
    return {
        key: sum(losses[key] for losses in losses_reduced) / number
        for key in losses_reduced[0]
    }


def increment():
    args = get_args()
    return get_num_microbatches() * args.micro_batch_size * args.data_parallel_size


def evaluated(home, forward, chunks, verbose):
    """Return average losses of some iterations.

    Args:
        home: the training module.
        forward: runs all microbatches; returns what the last stage reported.
        chunks: of this rank.
        verbose: whether to tell how far it is.
    """
    args = get_args()
    total = {}
    for chunk in chunks:
        chunk.eval()
    with torch.no_grad():
        for iteration in range(1, args.eval_iters + 1):
            if verbose and iteration % args.log_interval == 0:
                home.print_rank_0(f"Evaluating iter {iteration}/{args.eval_iters}")
            for losses in forward():
                for key, loss in losses.items():
                    total[key] = total.get(key, torch.zeros(1)) + loss
            args.consumed_valid_samples += increment()
    for chunk in chunks:
        chunk.train()
    for key in total:
        total[key] /= args.eval_iters * get_num_microbatches()
    return total


def print_results(home, prefix, total, iteration):
    """Print losses of an evaluation."""
    text = f" validation loss at {prefix} | "
    writer = get_tensorboard_writer()
    for key, loss in total.items():
        value = loss.item()
        text += f"{key} value: {value:.6E} | "
        text += f"{key} PPL: {math.exp(min(20, value)):.6E} | "
        if writer and home.is_last_rank():
            writer.add_scalar(f"{key} value-validation", value, iteration)
    for part in ("-" * (len(text) + 1), text, "-" * (len(text) + 1)):
        home.print_rank_last(part)


def after(home, iteration, state, asked):
    """Resume, evaluate, save and end, each where it is due.

    Args:
        home: the training module.
        iteration: that has been done.
        state: model, optimizer and scheduler.
        asked: arguments of an evaluation.
    """
    args = get_args()

    def due(interval):
        return bool(interval) and iteration % interval == 0

    if args.adlr_autoresume and due(args.adlr_autoresume_interval):
        home.check_adlr_autoresume_termination(iteration, *state)
    if due(args.eval_interval) and args.do_valid:
        home.evaluate_and_print_results(*asked)
    signals = getattr(args, "exit_signal_handler", False)
    if signals and any(home.get_signal_handler().signals_received()):
        home.save_checkpoint_and_time(iteration, *state)
        home.print_datetime("exiting program after receiving SIGTERM.")
        sys.exit()
    saved = bool(args.save) and due(args.save_interval)
    if saved:
        home.save_checkpoint_and_time(iteration, *state)
    if args.exit_duration_in_mins:
        minutes = (time.time() - home._TRAIN_START_TIME) / 60.0
        done = torch.tensor([minutes > args.exit_duration_in_mins], dtype=torch.int)
        torch.distributed.all_reduce(done, op=torch.distributed.ReduceOp.MAX)
        if done.item():
            if not saved:
                home.save_checkpoint_and_time(iteration, *state)
            home.print_datetime(f"exiting program after {minutes} minutes")
            sys.exit()
    if due(args.exit_interval):
        if args.save and not saved:
            home.save_checkpoint_and_time(iteration, *state)
        torch.distributed.barrier()
        home.print_datetime(f"exiting program at iteration {iteration}")
        sys.exit()


def start_timer(name):
    timers = get_timers()
    if hasattr(timers, "_log_level"):
        timers(name, log_level=0).start(barrier=True)
    else:
        timers(name).start()


def log_step(home, total, report, model, optimizer, iteration, result):
    """Log a step; return whether memory is still to be reported."""
    losses, skipped, *norms = result
    if norms:
        wanted = get_args().log_params_norm
        norms.insert(1, home.calc_params_l2_norm(model) if wanted else None)
    rate = optimizer.param_groups[0]["lr"]
    scale = optimizer.get_loss_scale().item()
    return home.training_log(
        losses, total, rate, iteration, scale, report, skipped, *norms
    )


def train(home, given, timer="interval-time", more=()):
    """Train until an end is reached; return the number of iterations.

    Args:
        home: the training module.
        given: arguments of its ``train``.
        timer: of the time between log lines.
        more: arguments of an evaluation, in front of the last one.
    """
    args = get_args()
    step, model = given["forward_step_func"], given["model"]
    optimizer = given["optimizer"]
    scheduler = given.get("lr_scheduler") or given["opt_param_scheduler"]
    home.write_args_to_tensorboard()
    for chunk in model if isinstance(model, list) else [model]:
        chunk.train()
    total, report, iteration = {}, True, args.iteration
    start_timer(timer)
    home.print_datetime("before the start of training step")
    while iteration < args.train_iters:
        home.update_num_microbatches(args.consumed_train_samples)
        data = given["train_data_iterator"]
        result = home.train_step(step, data, model, optimizer, scheduler)
        iteration += 1
        args.consumed_train_samples += increment()
        report = log_step(home, total, report, model, optimizer, iteration, result)
        valid = given["valid_data_iterator"]
        asked = f"iteration {iteration}", step, valid, model, iteration, *more, False
        state = model, optimizer, scheduler
        after(home, iteration, state, asked)
    return iteration
