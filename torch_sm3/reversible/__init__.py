# SPDX-License-Identifier: Apache-2.0
"""Reversible blocks: activations are rebuilt in the backward pass, not stored."""

from torch_sm3.reversible._attention import SelfAttention
from torch_sm3.reversible._block import Block, inverse
from torch_sm3.reversible._check import BlockReport, Report, check_reversible
from torch_sm3.reversible._counter_dropout import CounterDropout
from torch_sm3.reversible._couplings import (
    AdditiveCoupling,
    AffineCoupling,
    GroupCoupling,
    HalfResidual,
    MomentumCoupling,
)
from torch_sm3.reversible._drift import Drift, DriftError, DriftMonitor
from torch_sm3.reversible._layer import LayerRun
from torch_sm3.reversible._lsh_attention import LSHSelfAttention
from torch_sm3.reversible._plan import PlanEntry
from torch_sm3.reversible._remember import remember
from torch_sm3.reversible._sequence import ReversibleSequence
from torch_sm3.reversible._utilities import (
    ConcatenatePair,
    PrintShape,
    Reshape,
    Select,
    Split,
    Swap,
)
from torch_sm3.reversible._world import is_recomputing

__all__ = [
    "AdditiveCoupling",
    "AffineCoupling",
    "Block",
    "BlockReport",
    "ConcatenatePair",
    "CounterDropout",
    "Drift",
    "DriftError",
    "DriftMonitor",
    "GroupCoupling",
    "HalfResidual",
    "LSHSelfAttention",
    "LayerRun",
    "MomentumCoupling",
    "PlanEntry",
    "PrintShape",
    "Report",
    "Reshape",
    "ReversibleSequence",
    "Select",
    "SelfAttention",
    "Split",
    "Swap",
    "check_reversible",
    "inverse",
    "is_recomputing",
    "remember",
]
