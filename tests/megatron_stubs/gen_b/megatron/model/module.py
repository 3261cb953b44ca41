# SPDX-License-Identifier: Apache-2.0
"""Models in half precision."""

import torch
from megatron_stubs.models import HalfBase


class Float16Module(HalfBase):
    def __init__(self, module, args):
        super().__init__(module, torch.half if args.fp16 else torch.bfloat16)
