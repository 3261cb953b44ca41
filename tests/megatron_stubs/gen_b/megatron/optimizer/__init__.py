# SPDX-License-Identifier: Apache-2.0
"""Optimizers by the options."""

from megatron_stubs.precision import scaler_of, split_weights
from torch.optim import SGD
from torch.optim import AdamW as Adam

from megatron import get_args

from .grad_scaler import ConstantGradScaler, DynamicGradScaler
from .optimizer import Float16OptimizerWithFloat16Params, FP32Optimizer


def get_megatron_optimizer(model):
    args = get_args()
    groups = split_weights(model)
    options = {"lr": args.lr, "weight_decay": args.weight_decay}
    if args.optimizer == "adam":
        betas = (args.adam_beta1, args.adam_beta2)
        optimizer = Adam(groups, betas=betas, eps=args.adam_eps, **options)
    else:
        optimizer = SGD(groups, momentum=args.sgd_momentum, **options)
    common = (
        args.clip_grad,
        args.log_num_zeros_in_grad,
        args.DDP_impl == "local",
    )
    if args.fp16 or args.bf16:
        return Float16OptimizerWithFloat16Params(
            optimizer, *common, args.bf16, scaler_of(args)
        )
    return FP32Optimizer(optimizer, *common)
