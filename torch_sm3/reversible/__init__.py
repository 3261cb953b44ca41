# SPDX-License-Identifier: Apache-2.0
"""Reversible blocks: activations are rebuilt in the backward pass, not stored."""

from torch_sm3.reversible._attention import SelfAttention
from torch_sm3.reversible._block import Block, inverse
from torch_sm3.reversible._counter_dropout import CounterDropout
from torch_sm3.reversible._couplings import AdditiveCoupling, HalfResidual
from torch_sm3.reversible._lsh_attention import LSHSelfAttention
from torch_sm3.reversible._sequence import ReversibleSequence
from torch_sm3.reversible._utilities import Select, Swap

__all__ = [
    "AdditiveCoupling",
    "Block",
    "CounterDropout",
    "HalfResidual",
    "LSHSelfAttention",
    "ReversibleSequence",
    "Select",
    "SelfAttention",
    "Swap",
    "inverse",
]
