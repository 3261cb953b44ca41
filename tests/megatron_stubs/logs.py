# SPDX-License-Identifier: Apache-2.0
"""The log line and the scalars of the old training loops."""

from __future__ import annotations

import torch
from megatron_stubs import shared

ADVANCED, SKIPPED, NAN = "advanced iterations", "skipped iterations", "nan iterations"


def count(loss_dict, total, skipped_iter):
    """Add a step to the sums since the last line, NaN in skipped steps only."""
    for key, more in ((ADVANCED, int(not skipped_iter)), (SKIPPED, skipped_iter)):
        total[key] = total.get(key, 0) + more
    bad = False
    for key, value in loss_dict.items():
        if skipped_iter:
            bad = bad or not bool(value.float().sum().isfinite())
        else:
            total[key] = total.get(key, torch.zeros(1)) + value
    total[NAN] = total.get(NAN, 0) + int(bad)


def line(head, total, loss_scale, norms=()):
    """Return a line and begin anew.

    Args:
        head: iteration, iterations, samples, milliseconds, learning rate, batch size.
        total: the sums.
        loss_scale: at the end.
        norms: names, forms and values of what is there besides.
    """
    text = (
        " iteration {:8d}/{:8d} | consumed samples: {:12d} |"
        " elapsed time per iteration (ms): {:.1f} | learning rate: {:.3E} |"
        " global batch size: {:5d} |"
    ).format(*head)
    for key in total:
        if key in (ADVANCED, SKIPPED, NAN):
            continue
        average = total[key].item() / max(1, total[ADVANCED])
        # Megatron leaves out what is not positive, NaN too.
        if average > 0.0:
            text += f" {key}: {average:.6E} |"
        total[key] = torch.zeros(1)
    text += f" loss scale: {loss_scale:.1f} |"
    for name, form, value in norms:
        if value is not None:
            text += f" {name}: {value:{form}} |"
    text += f" number of skipped iterations: {total[SKIPPED]:3d} |"
    text += f" number of nan iterations: {total[NAN]:3d} |"
    total[ADVANCED] = total[SKIPPED] = total[NAN] = 0
    return text


def scalar(writer, name, value, iteration, samples):
    """Write a value against iterations and samples."""
    writer.add_scalar(name, value, iteration)
    writer.add_scalar(name + " vs samples", value, samples)


def write(home, given, old=False, levels=False, names=()):
    """Log a step as Megatron's ``training_log`` does; whether memory is to be reported.

    Args:
        home: the module of the training loop.
        given: the arguments of its function.
        old: whether it is that of v2.0.
        levels: whether timers have levels.
        names: of timers.
    """
    args, timers = shared.get_args(), shared.get_timers()
    total, iteration = given["total_loss_dict"], given["iteration"]
    count(given["loss_dict"], total, given["skipped_iter"])
    batch = args.micro_batch_size * args.data_parallel_size
    batch *= shared.get_num_microbatches()
    steps = total[ADVANCED] + total[SKIPPED]
    if not levels:
        names = [name for name in names if name in timers.timers]
    writer = home.get_tensorboard_writer()
    if not old and iteration % args.tensorboard_log_interval:
        writer = None
    times = old or args.log_timers_to_tensorboard
    if times and levels:
        timers.write(names, writer, iteration, normalizer=steps)
    if writer and (levels or home.is_last_rank()):
        for name, value in _scalars(args, given, batch, old):
            scalar(writer, name, value, iteration, args.consumed_train_samples)
        if times and not levels:
            timers.write(names, writer, iteration, normalizer=steps)
    if iteration % args.log_interval:
        return given["report_memory_flag"]
    seconds = timers("interval time" if old else "interval-time").elapsed() / steps
    writer = home.get_tensorboard_writer()
    if writer and (torch.distributed.get_rank() == 0 if old else times):
        writer.add_scalar("iteration-time", seconds, iteration)
    head = (iteration, args.train_iters, args.consumed_train_samples, seconds * 1000)
    head += given["learning_rate"], batch
    norms = [
        (name, form, given.get(key))
        for name, form, key in (
            ("grad norm", ".3f", "grad_norm"),
            ("num zeros", ".1f", "num_zeros_in_grad"),
            ("params norm", ".3f", "params_norm"),
        )
    ]
    home.print_rank_last(line(head, total, given["loss_scale"], norms))
    report = given["report_memory_flag"]
    if report and given["learning_rate"] > 0.0:
        home.report_memory(f"(after {iteration} iterations)")
        report = False
    timers.log(names, normalizer=args.log_interval)
    return report


def _scalars(args, given, batch, old):
    """Yield names and values that are written if they are asked for."""
    rate = old or args.log_learning_rate_to_tensorboard
    if rate:
        yield "learning-rate", given["learning_rate"]
    if old or args.log_batch_size_to_tensorboard:
        yield "batch-size", batch
    yield from given["loss_dict"].items()
    if old or args.log_loss_scale_to_tensorboard:
        yield "loss-scale", given["loss_scale"]
    if getattr(args, "log_world_size_to_tensorboard", False):
        yield "world-size", args.world_size
    for name in ("grad-norm", "num-zeros", "params-norm"):
        key = name.replace("-", "_") + ("_in_grad" if name == "num-zeros" else "")
        if given.get(key) is not None:
            yield name, given[key]
