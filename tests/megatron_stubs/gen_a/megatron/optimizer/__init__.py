# SPDX-License-Identifier: Apache-2.0
"""Adam, in fp32 or for a model in fp16."""

from megatron_stubs.precision import scaler_of, split_weights
from torch.optim import AdamW as Adam

from megatron import get_args

from .grad_scaler import ConstantGradScaler, DynamicGradScaler
from .optimizer import FP16OptimizerWithFP16Params, FP32Optimizer


def get_megatron_optimizer(model):
    args = get_args()
    optimizer = Adam(
        split_weights([model]),
        lr=args.lr,
        weight_decay=args.weight_decay,
        betas=(args.adam_beta1, args.adam_beta2),
        eps=args.adam_eps,
    )
    if args.fp16:
        return FP16OptimizerWithFP16Params(optimizer, scaler_of(args), args.clip_grad)
    return FP32Optimizer(optimizer, args.clip_grad)
