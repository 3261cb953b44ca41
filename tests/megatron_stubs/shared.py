# SPDX-License-Identifier: Apache-2.0
"""What all modules of a stand-in share: arguments, timers, writer, microbatches."""

from __future__ import annotations

import torch.distributed as dist


class ConstantNumMicroBatches:
    """How many microbatches a step has."""

    def __init__(self, args):
        self.num_micro_batches = args.microbatches
        self.current_global_batch_size = args.global_batch_size

    def get(self):
        return self.num_micro_batches

    def get_current_global_batch_size(self):
        return self.current_global_batch_size

    def update(self, consumed_samples, consistency_check):
        pass


class Signals:
    """Whether each rank was told to end."""

    received = False

    def signals_received(self):
        return [self.received]


_ARGS = _CALCULATOR = _WRITER = _TIMERS = None


def get_args():
    return _ARGS


def get_num_microbatches():
    return _CALCULATOR.get()


def get_current_global_batch_size():
    return _CALCULATOR.get_current_global_batch_size()


def update_num_microbatches(consumed_samples, consistency_check=True):
    _CALCULATOR.update(consumed_samples, consistency_check)


def get_tensorboard_writer():
    return _WRITER


def get_adlr_autoresume():
    return None


def get_signal_handler():
    return Signals()


def get_timers():
    return _TIMERS


def set_global_variables(args, writer, timers):
    global _ARGS, _CALCULATOR, _WRITER, _TIMERS
    _ARGS, _CALCULATOR = args, ConstantNumMicroBatches(args)
    _WRITER, _TIMERS = writer, timers


def print_rank_0(message):
    if dist.get_rank() == 0:
        print(message, flush=True)


def is_last_rank():
    return dist.get_rank() == dist.get_world_size() - 1


def print_rank_last(message):
    if is_last_rank():
        print(message, flush=True)
