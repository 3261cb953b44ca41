# SPDX-License-Identifier: Apache-2.0
"""What each part of the backward holds and lets go of, to the byte."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from helpers.memory_meter import memory_meter
from helpers.pipeline_backward import backward
from helpers.pipeline_layers import Apply, Checkpointed, Reversible
from torch import Tensor, nn

N, D = 64, 16
UNIT = 4 * N * D


@pytest.fixture(autouse=True)
def _no_garbage() -> None:
    gc.collect()


class Steps:
    """Bytes that each part of one microbatch adds, and its peak, in units."""

    def __init__(self, stage: Any, requires_grad: bool = True) -> None:
        x, gradient = torch.rand(N, D), torch.rand(N, D)
        one = backward()
        with memory_meter() as self.forward:
            one.leave([stage(*one.enter([x], [requires_grad]))])
        with memory_meter() as self.input:
            found = one.input([gradient])
        with memory_meter() as self.weight:
            one.weight()
        with memory_meter() as self.end:
            del found, one

    def live(self) -> list[float]:
        parts = self.forward, self.input, self.weight, self.end
        return [part.live / UNIT for part in parts]


def steps(stage: Any, **options: Any) -> Steps:
    """Run two microbatches: the second finds the gradients where they stay."""
    for _ in range(2):
        result = Steps(stage, **options)
    return result


def test_a_chain_of_layers() -> None:
    module = nn.Sequential(nn.Linear(D, D), nn.GELU(), nn.Linear(D, D))
    # GELU saved its input and the last layer its own. The first goes, the gradient
    # that enters the first layer and the result come; that which enters the last
    # layer is the caller's. Then both layers have run, and the result goes.
    assert steps(module).live() == [2, 1, -2, -1]


def test_input_lets_go_while_it_runs() -> None:
    depth = 10
    module = nn.Sequential(nn.Linear(D, D), *[nn.GELU()] * depth, nn.Linear(D, D))
    one = steps(module)
    assert one.live() == [depth + 1, 2 - depth, -2, -1]
    # At most: the gradients before and after one GELU, and one more for a moment.
    assert one.input.peak <= 3 * UNIT


def test_elementwise_weights_and_norms_keep_no_activation() -> None:
    module = nn.Sequential(nn.LayerNorm(D), nn.Linear(D, D), nn.LayerNorm(D))
    one = steps(module)
    statistics = 4 * N * 2 / UNIT
    small = 2 * 2 * 4 * D / UNIT
    forward, inputs, weight, end = one.live()
    # The inputs of the linear layer and of the second norm, and both's statistics.
    assert forward == 2 + 2 * statistics
    # Held: the linear layer's input, the gradient that entered it, those of the
    # norms' weights; and the result.
    assert forward + inputs == 3 + small
    assert forward + inputs + weight == 1
    assert end == -1


def test_nothing_can_be_split() -> None:
    module = nn.Sequential(nn.LayerNorm(D), nn.GELU())
    forward, inputs, weight, end = steps(module).live()
    assert forward + inputs == 1 and weight == 0 and end == -1


def test_first_stage_is_split_as_any_other() -> None:
    module = nn.Sequential(nn.Linear(D, D), nn.GELU(), nn.Linear(D, D))
    assert steps(module, requires_grad=False).live() == [2, 0, -2, 0]


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_region_leaves_nothing_to_weight(reentrant: bool) -> None:
    region = nn.Sequential(nn.Linear(D, D), nn.GELU(), nn.Linear(D, D))
    module = nn.Sequential(Checkpointed(region, reentrant), nn.Linear(D, D))
    forward, inputs, weight, end = steps(module).live()
    state = torch.get_rng_state().nbytes / UNIT
    assert forward == 1 + state  # the last layer's input
    # That, and the result. The reentrant node keeps its RNG state until it goes, and
    # the last layer's input leads back to it.
    kept = state if reentrant else 0
    assert forward + inputs == 2 + kept
    assert weight == -1 - kept and end == -1


def test_what_a_layer_saved_keeps_nothing_below_it() -> None:
    class Heavy(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.ballast = torch.zeros(5 * N, D)
            return x * 2

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return grad * 2

    module = Apply(
        lambda m, x: m.b(nn.functional.gelu(m.a(Heavy.apply(x)))),
        a=nn.Linear(D, D),
        b=nn.Sequential(nn.Linear(D, D)),
    )
    for _ in range(2):
        gc.collect()
        one = Steps(module)
    # The ballast goes when the layer that read Heavy's result does.
    forward, inputs, weight, end = one.live()
    assert forward == 5 + 1 + 2 and forward + inputs + weight + end == 0
    deep = Apply(
        lambda m, x: m.b(nn.functional.gelu(Heavy.apply(x) + 1)), b=nn.Linear(D, D)
    )
    for _ in range(2):
        gc.collect()
        one = Steps(deep)
    forward, inputs, weight, end = one.live()
    assert forward == 5 + 2 and inputs == -5 and weight == -1 and end == -1


def test_last_pair_of_a_reversible_block_goes_with_input() -> None:
    torch.manual_seed(0)
    pair = Reversible().blocks
    module = Apply(
        lambda m, x: torch.cat(m.a(*m.b(x)[:, :6].chunk(2, -1)), -1) @ m.c,
        a=pair,
        b=nn.Linear(D, D),
        c=torch.rand(6, D),
    )
    for _ in range(2):
        one = Steps(module)
    held = one.forward.live + one.input.live
    # The inputs of two products are kept, one of them given, and the gradient that
    # entered each, one of them given; and the result.
    assert held == 4 * N * 6 + UNIT + UNIT
    assert held + one.weight.live == UNIT


def test_an_error_lets_go_of_everything() -> None:
    module = nn.Sequential(nn.Linear(D, D), nn.GELU(), nn.Linear(D, D))
    steps(module)
    gradient = torch.rand(N, D)
    gc.collect()

    def fail(_: Tensor) -> None:
        raise ValueError("of mine")

    with memory_meter() as read:
        one = backward()
        (x,) = one.enter([torch.rand(N, D)], [True])
        h = module[0](x)
        h.register_hook(fail)
        one.leave([module[2](module[1](h))])
        del h, x
        with pytest.raises(ValueError, match="of mine"):
            one.input([gradient])
        gc.collect()
    assert read.live == 0
