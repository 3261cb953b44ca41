# SPDX-License-Identifier: Apache-2.0
"""Trainers: update each layer in the backward pass, so that little is there at once."""

from torch_sm3.trainer._extract import extract_reversible_blocks
from torch_sm3.trainer._init import init_reversible_blocks
from torch_sm3.trainer._loss import CrossEntropy, WeightedMean
from torch_sm3.trainer._reversible_trainer import ReversibleTrainer
from torch_sm3.trainer._trainer import Trainer

__all__ = [
    "CrossEntropy",
    "ReversibleTrainer",
    "Trainer",
    "WeightedMean",
    "extract_reversible_blocks",
    "init_reversible_blocks",
]
