# SPDX-License-Identifier: Apache-2.0
"""What the stand-ins' ``utils`` and ``initialize`` have in common."""

from __future__ import annotations

import torch
from megatron_stubs import groups as mpu
from megatron_stubs import shared, support


def initialize(args, writer, timers):
    """Set up arguments and groups."""
    shared.set_global_variables(args, writer, timers)
    mpu.destroy_model_parallel()
    mpu.initialize_model_parallel(
        1,
        args.pipeline_model_parallel_size,
        args.virtual_pipeline_model_parallel_size,
        args.pipeline_model_parallel_split_rank,
    )


def write_args_to_tensorboard():
    writer, args = shared.get_tensorboard_writer(), shared.get_args()
    if writer:
        for name in vars(args):
            writer.add_text(name, str(getattr(args, name)))


def unwrap_model(model, module_instances):
    """Return models without wrappers of some classes."""
    if isinstance(model, list):
        return [unwrap_model(part, module_instances) for part in model]
    while isinstance(model, module_instances):
        model = model.module
    return model


def calc_params_l2_norm(model):
    total = torch.zeros(1)
    for chunk in model:
        for parameter in chunk.parameters():
            if not getattr(parameter, "shared", False):
                total += parameter.detach().float().norm() ** 2
    torch.distributed.all_reduce(total, group=mpu.get_model_parallel_group())
    return total.item() ** 0.5


def average_losses_across_data_parallel_group(losses):
    average = torch.cat([loss.clone().detach().view(1) for loss in losses])
    torch.distributed.all_reduce(average, group=mpu.get_data_parallel_group())
    return average / mpu.get_data_parallel_world_size()


def report_memory(name):
    """Say nothing: there is no device whose memory could be asked for."""


def check_adlr_autoresume_termination(iteration, model, optimizer, lr_scheduler):
    assert shared.get_adlr_autoresume() is None


def save_checkpoint(iteration, model, optimizer, scheduler):
    chunks = model if isinstance(model, list) else [model]
    support.save(shared.get_args(), iteration, chunks, optimizer, scheduler)


def load_checkpoint(model, optimizer, scheduler, load_arg="load", strict=True):
    chunks = model if isinstance(model, list) else [model]
    return support.load(shared.get_args(), chunks, optimizer, scheduler)


def build_loader(dataset, args):
    """Return batches of this replica's share of a data set."""
    sampler = torch.utils.data.distributed.DistributedSampler(
        dataset, mpu.get_data_parallel_world_size(), mpu.get_data_parallel_rank()
    )
    return torch.utils.data.DataLoader(
        dataset, args.micro_batch_size, sampler=sampler, drop_last=not args.keep_last
    )


def build_loaders(train_dataset, valid_dataset, args):
    """Return both loaders, that of validation without end; count iterations."""
    train = build_loader(train_dataset, args)
    args.train_iters_per_epoch = len(train)
    args.train_iters = args.epochs * len(train)
    valid = build_loader(valid_dataset, args)

    def forever():
        while True:
            yield from valid

    return train, forever()
