# SPDX-License-Identifier: Apache-2.0
"""Every kind over Gloo against one process with plain autograd, bit for bit."""

from __future__ import annotations

import pytest
import torch
from helpers.processes import run_ranks
from reference.pipeline_models import (
    loss_fn,
    make_batch,
    make_stages,
    single_process,
)
from torch import nn

from torch_sm3.pipeline import PipelineRunner, Stage, plan

MICROBATCHES = (1, 2, 3, 5, 8)


def check_all_kinds(rank: int, ranks: int) -> list[str]:
    """Compare all kinds and sizes with one process; return what differs."""
    wrong = []
    for kind in ("none",) if ranks == 1 else ("gpipe", "1f1b"):
        for m in MICROBATCHES:
            tokens, target = make_batch(8)
            parts, whole = make_stages(ranks), make_stages(ranks)
            runner = PipelineRunner(
                [Stage(parts[rank], rank)],
                plan(kind, ranks, m),
                loss_fn=loss_fn,
                timeout=20,
            )
            before = runner.eval(tokens, target=target)
            result = runner.step(tokens, target=target, return_outputs=True)
            after = runner.eval(tokens, target=target)
            expected, losses = single_process(whole, tokens, target, m)
            case = f"{kind} p={ranks} m={m} rank={rank}: "
            wrong += [
                case + name
                for name, same in {
                    "loss": torch.equal(result.loss, expected),
                    "losses": torch.equal(result.losses, torch.stack(losses)),
                    "eval": torch.equal(before.loss, expected),
                    "eval after step": torch.equal(after.loss, expected),
                    "outputs": (result.outputs is None) == (rank + 1 < ranks),
                    **equal_gradients(parts[rank], whole[rank]),
                }.items()
                if not same
            ]
            runner.close()
    return wrong


def equal_gradients(got: nn.Module, expected: nn.Module) -> dict[str, bool]:
    return {
        name: other.grad is not None and torch.equal(mine.grad, other.grad)
        for (name, mine), other in zip(
            got.named_parameters(), expected.parameters(), strict=True
        )
    }


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_gradients_and_losses_have_the_bits_of_one_process(ranks: int) -> None:
    assert run_ranks(ranks, check_all_kinds, timeout=150) == [[]] * ranks
