# SPDX-License-Identifier: Apache-2.0
"""Arguments, timers, learning rates and files, as far as they are no contract."""

from __future__ import annotations

import os
import time
from argparse import Namespace

import torch
import torch.distributed as dist

# Options that all generations have.
ARGUMENTS = {
    "num_layers": 4,
    "hidden_size": 8,
    "seq_length": 4,
    "micro_batch_size": 2,
    "microbatches": 2,
    "rampup_batch_size": None,
    "pipeline_model_parallel_size": 1,
    "virtual_pipeline_model_parallel_size": None,
    "pipeline_model_parallel_split_rank": None,
    "params_dtype": torch.float,
    "fp16": False,
    "fp32_residual_connection": False,
    "fp32_allreduce": False,
    "DDP_impl": "local",
    "optimizer": "adam",
    "lr": 0.01,
    "min_lr": 0.001,
    "lr_decay_iters": 8,
    "weight_decay": 0.01,
    "adam_beta1": 0.9,
    "adam_beta2": 0.999,
    "adam_eps": 1e-8,
    "clip_grad": 1.0,
    "loss_scale": None,
    "initial_loss_scale": 4096.0,
    "min_loss_scale": 1.0,
    "loss_scale_window": 1000,
    "hysteresis": 1,
    "train_iters": 3,
    "eval_iters": 2,
    "eval_interval": 1000,
    "log_interval": 1,
    "do_valid": False,
    "save": None,
    "load": None,
    "save_interval": None,
    "exit_interval": None,
    "exit_duration_in_mins": None,
    "adlr_autoresume": False,
    "adlr_autoresume_interval": 1000,
    "seed": 1234,
    "iteration": 0,
    "consumed_train_samples": 0,
    "consumed_valid_samples": 0,
    "pretrained_checkpoint": None,
    "epochs": 0,
    "keep_last": False,
    "encoder_num_layers": 2,
    "decoder_num_layers": 2,
    "decoder_seq_length": 3,
}
# What came with B.
LATER = {
    "bf16": False,
    "sgd_momentum": 0.9,
    "accumulate_allreduce_grads_in_fp32": False,
    "log_params_norm": True,
    "log_num_zeros_in_grad": True,
    "tensorboard_log_interval": 1,
    "log_timers_to_tensorboard": False,
    "log_memory_to_tensorboard": False,
    "log_learning_rate_to_tensorboard": True,
    "log_batch_size_to_tensorboard": True,
    "log_loss_scale_to_tensorboard": True,
    "log_validation_ppl_to_tensorboard": False,
}


def arguments(given, *known):
    """Return Megatron's arguments.

    Args:
        given: what a test wants.
        *known: options that there are, with their defaults.
    """
    values = {}
    for options in known:
        values.update(options)
    unknown = set(given) - set(values)
    assert not unknown, f"no such arguments: {unknown}"
    args = Namespace(**{**values, **given})
    args.world_size = dist.get_world_size()
    args.data_parallel_size = args.world_size // args.pipeline_model_parallel_size
    batch = args.microbatches * args.micro_batch_size
    args.global_batch_size = batch * args.data_parallel_size
    if args.fp16:
        args.params_dtype = torch.half
    if getattr(args, "bf16", False):
        args.params_dtype = torch.bfloat16
    return args


class Timer:
    """Seconds between start and stop; D's may wait for other ranks."""

    def __init__(self):
        self.elapsed_ = 0.0
        self.started_ = False

    def start(self, barrier=False):
        assert not self.started_, "timer has already been started"
        if barrier:
            dist.barrier()
        self.started_, self._since = True, time.time()

    def stop(self, barrier=False):
        assert self.started_, "timer is not started"
        if barrier:
            dist.barrier()
        self.elapsed_ += time.time() - self._since
        self.started_ = False

    def elapsed(self, reset=True, barrier=False):
        running = self.started_
        if running:
            self.stop(barrier)
        seconds = self.elapsed_
        if reset:
            self.elapsed_ = 0.0
        if running:
            self.start(barrier)
        return seconds


class Timers:
    """Timers by name, of the generations before D."""

    def __init__(self):
        self.timers = {}

    def __call__(self, name):
        return self.timers.setdefault(name, Timer())

    def write(self, names, writer, iteration, normalizer=1.0, reset=False):
        for name in names:
            value = self.timers[name].elapsed(reset=reset) / normalizer
            writer.add_scalar(name + "-time", value, iteration)

    def log(self, names, normalizer=1.0, reset=True):
        for name in names:
            self.timers[name].elapsed(reset=reset)


class Decay:
    """A learning rate that falls in a line with the samples seen."""

    def __init__(self, optimizer, max_lr, min_lr, decay_steps):
        self.optimizer, self.num_steps = optimizer, 0
        self.max_lr, self.min_lr, self.decay_steps = max_lr, min_lr, decay_steps
        self.step(0)

    def step(self, increment):
        self.num_steps += increment
        left = max(0.0, 1.0 - self.num_steps / self.decay_steps)
        for group in self.optimizer.param_groups:
            group["lr"] = self.min_lr + left * (self.max_lr - self.min_lr)

    def state_dict(self):
        return {"num_steps": self.num_steps}

    def load_state_dict(self, state_dict):
        self.num_steps = 0
        self.step(state_dict["num_steps"])


def save(args, iteration, chunks, optimizer, scheduler):
    """Write one file for each rank."""
    os.makedirs(args.save, exist_ok=True)
    state = {
        "iteration": iteration,
        "consumed_train_samples": args.consumed_train_samples,
        "model": [chunk.state_dict() for chunk in chunks],
        "optimizer": optimizer.state_dict(),
        "scheduler": scheduler.state_dict(),
    }
    torch.save(state, os.path.join(args.save, f"{dist.get_rank()}.pt"))


def load(args, chunks, optimizer, scheduler):
    """Read this rank's file; return the iteration, 0 without a file."""
    file = os.path.join(args.load, f"{dist.get_rank()}.pt")
    if not os.path.exists(file):
        return 0
    state = torch.load(file, weights_only=False)
    for chunk, values in zip(chunks, state["model"], strict=True):
        chunk.load_state_dict(values)
    if optimizer is None:
        return 0
    optimizer.load_state_dict(state["optimizer"])
    scheduler.load_state_dict(state["scheduler"])
    args.consumed_train_samples = state["consumed_train_samples"]
    return state["iteration"]
