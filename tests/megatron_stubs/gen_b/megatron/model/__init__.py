# SPDX-License-Identifier: Apache-2.0
"""Models and their wrappers."""

from .distributed import DistributedDataParallel
from .gpt_model import GPTModel
from .module import Float16Module
