# SPDX-License-Identifier: Apache-2.0
"""Models and their wrappers."""

from .distributed import DistributedDataParallel
from .fp16_module import FP16Module
from .gpt_model import GPTModel
