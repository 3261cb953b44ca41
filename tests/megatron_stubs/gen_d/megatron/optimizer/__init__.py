# SPDX-License-Identifier: Apache-2.0
"""Optimizers by the options."""

from megatron_stubs.precision import get_param_groups, scaler_of
from torch.optim import SGD
from torch.optim import AdamW as Adam

from megatron import get_args

from .grad_scaler import ConstantGradScaler, DynamicGradScaler
from .optimizer import Float16OptimizerWithFloat16Params, FP32Optimizer


def get_megatron_optimizer(
    model, no_weight_decay_cond=None, scale_lr_cond=None, lr_mult=1.0
):
    args = get_args()
    conditions = no_weight_decay_cond, scale_lr_cond, lr_mult
    groups = get_param_groups(model, *conditions)
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
        args.use_contiguous_buffers_in_local_ddp,
    )
    if args.fp16 or args.bf16:
        kind = args.fp16, args.bf16, args.params_dtype
        return Float16OptimizerWithFloat16Params(
            optimizer, *common, *kind, scaler_of(args), model
        )
    return FP32Optimizer(optimizer, *common, model)
