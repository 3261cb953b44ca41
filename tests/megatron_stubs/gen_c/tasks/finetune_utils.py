# SPDX-License-Identifier: Apache-2.0
"""Fine-tuning by epochs."""

import sys

from megatron import get_num_microbatches, print_rank_0
from megatron.checkpointing import load_checkpoint, save_checkpoint
from megatron.model import ModelType
from megatron.training import (
    evaluate_and_print_results,
    setup_model_and_optimizer,
    train_step,
    training_log,
)
from megatron.utils import calc_params_l2_norm
from megatron_stubs import tuning


def _train(
    model,
    optimizer,
    lr_scheduler,
    forward_step,
    train_dataloader,
    valid_dataloader,
    end_of_epoch_callback,
):
    assert get_num_microbatches() == 1, (
        "finetuning with gradient accumulation doesn't currently work"
    )
    state, loaders = (
        (model, optimizer, lr_scheduler),
        (train_dataloader, valid_dataloader),
    )
    home = sys.modules[__name__]
    tuning.fine_tune(home, state, forward_step, loaders, end_of_epoch_callback)


def finetune(
    train_valid_datasets_provider,
    model_provider,
    model_type=ModelType.encoder_or_decoder,
    forward_step=None,
    end_of_epoch_callback_provider=None,
    task_collate_fn=None,
):
    data, callback = train_valid_datasets_provider, end_of_epoch_callback_provider
    providers = data, model_provider, callback
    home = sys.modules[__name__]
    tuning.fine_tuned(home, providers, (model_type,), forward_step, _train)
