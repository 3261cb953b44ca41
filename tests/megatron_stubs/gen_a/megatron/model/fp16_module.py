# SPDX-License-Identifier: Apache-2.0
"""Models in half precision."""

import torch
from megatron_stubs.models import HalfBase


class FP16Module(HalfBase):
    def __init__(self, module):
        super().__init__(module, torch.half)
