# SPDX-License-Identifier: Apache-2.0
"""What a call is made in: transforms of functions, sharded parameters."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

from torch_sm3.reversible._inventory import is_sharded


def check_surroundings(items: Iterable[Any]) -> None:
    """Refuse transforms that would not see the recompute.

    Args:
        items: everything that could carry a tangent.

    Raises:
        RuntimeError: under ``vmap``, ``torch.func`` and forward-mode differentiation.
    """
    if torch._C._functorch.peek_interpreter_stack() is not None:
        raise RuntimeError(
            "ReversibleSequence: expected a call outside vmap and torch.func, but got "
            "one inside, where streams cannot be rebuilt (they work with plan='store')"
        )
    if forward_ad._current_level < 0:
        return
    for item in items:
        if (
            isinstance(item, Tensor)
            and forward_ad.unpack_dual(item).tangent is not None
        ):
            raise RuntimeError(
                "ReversibleSequence: expected no tangents, but got forward-mode "
                "differentiation, which would not see the recompute (it works with "
                "plan='store')"
            )


def needs_graph(block: nn.Module) -> bool:
    """Tell whether a block has sharded parameters, so that F must be in the graph."""
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")
    managed = getattr(fsdp, "FSDPModule", ())
    if managed and any(isinstance(module, managed) for module in block.modules()):
        return True
    return any(map(is_sharded, block.parameters()))
