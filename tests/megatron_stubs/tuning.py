# SPDX-License-Identifier: Apache-2.0
"""Parts of fine-tuning that are the same in all generations.

``home`` is the stand-in's module of fine-tuning; see :mod:`megatron_stubs.loop`.
"""

from __future__ import annotations

import sys

import torch
from megatron_stubs.loop import log_step, start_timer
from megatron_stubs.shared import get_args
from megatron_stubs.tools import build_loaders


def fine_tuned(home, providers, kind, step, train):
    """Set up and run a fine-tuning.

    Args:
        home: the module of the fine-tuning.
        providers: of data sets, of the model, and of a callback or None.
        kind: of model, in a tuple, where generations know several.
        step: the user's.
        train: the function that goes through the epochs.
    """
    args = get_args()
    data, model, callback = providers
    loaders = build_loaders(*data(), args)
    callback = None if callback is None else callback()
    state = home.setup_model_and_optimizer(model, *kind)
    if args.iteration == 0 and args.pretrained_checkpoint is not None:
        before, args.load = args.load, args.pretrained_checkpoint
        home.load_checkpoint(state[0], None, None)
        args.load = before
        state[1].reload_model_params()
    train(*state, step, *loaders, callback)


def fine_tune(home, state, step, loaders, callback, timer="interval-time", more=()):
    """Go through the epochs of a fine-tuning.

    Args:
        home: the module of the fine-tuning.
        state: model, optimizer and scheduler.
        step: the user's.
        loaders: of training and validation.
        callback: at the end of each epoch, or None.
        timer: of the time between log lines.
        more: arguments of an evaluation, in front of the last one.
    """
    args, total = get_args(), {}
    model, optimizer, _ = state
    loader, valid = loaders
    for chunk in model if isinstance(model, list) else [model]:
        chunk.train()
    start_timer(timer)
    iteration = args.iteration
    start_epoch, skip = divmod(iteration, args.train_iters_per_epoch)
    for epoch in range(start_epoch, args.epochs):
        home.print_rank_0(f"working on epoch {epoch + 1} ...")
        loader.sampler.set_epoch(args.seed + epoch)
        for number, batch in enumerate(loader):
            if number < skip:
                continue
            skip = 0
            iteration += 1
            result = home.train_step(step, batch, *state)
            log_step(home, total, False, model, optimizer, iteration, result)
            if args.save and args.save_interval and iteration % args.save_interval == 0:
                home.save_checkpoint(iteration, *state)
            if args.eval_interval and iteration % args.eval_interval == 0:
                asked = f"iteration {iteration}", step, valid, model, iteration
                home.evaluate_and_print_results(*asked, *more, False)
            if args.exit_interval and iteration % args.exit_interval == 0:
                torch.distributed.barrier()
                sys.exit()
        if args.save:
            home.save_checkpoint(iteration, *state)
        if callback is not None:
            callback(state[0], epoch)
