# SPDX-License-Identifier: Apache-2.0
"""The same additive couplings, run in every way that is compared."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from _reversible_peers import Coupled, Pair, Run, packages, schedules
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from torch_sm3.reversible import AdditiveCoupling, DriftMonitor, ReversibleSequence

# By its early stop, checkpoint does not compute a region's last matrix product again: a
# quarter of the second run of blocks of two MLPs. A reversible block needs that product
# to rebuild its input, so "full checkpoint" is equal work.
PLAIN, CHECKPOINT, FULL = "plain", "checkpoint", "full checkpoint"
INVERSE, NESTED = "inverse, then forward", "nested backward"

OURS: dict[str, dict[str, Any]] = {
    f"{engine}, {exact}": {"engine": engine, "exact": exact}
    for engine in ("node", "graph")
    for exact in ("none", "grid", "sidecar")
}
MONITOR = "node, none, monitor"


def mlp(width: int) -> nn.Module:
    """Return a pre-norm MLP of expansion 4."""
    return nn.Sequential(
        nn.LayerNorm(width),
        nn.Linear(width, 4 * width),
        nn.GELU(),
        nn.Linear(4 * width, width),
    )


@dataclass(frozen=True)
class Model:
    """Blocks and all ways to run them, on the same weights."""

    blocks: nn.ModuleList
    runs: dict[str, Run]

    def parameters(self) -> list[nn.Parameter]:
        """Return the weights."""
        return list(self.blocks.parameters())


def build(width: int, depth: int, device: str) -> list[Coupled]:
    """Return blocks, the same ones at every call."""
    torch.manual_seed(0)
    return [Coupled(mlp(width), mlp(width)).to(device) for _ in range(depth)]


def ours(blocks: Sequence[Coupled], **options: Any) -> Run:
    """Return a run by ``ReversibleSequence``."""
    couplings = [AdditiveCoupling(block.F, block.G) for block in blocks]
    sequence = ReversibleSequence(*couplings, plan="reversible", **options)
    return lambda x: sequence(x, x)


def plain(blocks: Sequence[Coupled]) -> Run:
    """Return a run by ordinary autograd."""

    def run(x: Tensor) -> Pair:
        pair = (x, x)
        for block in blocks:
            pair = block(*pair)
        return pair

    return run


def checkpointed(blocks: Sequence[Coupled], early_stop: bool) -> Run:
    """Return a run by non-reentrant checkpoints, one per block."""

    def run(x: Tensor) -> Pair:
        pair = (x, x)
        with set_checkpoint_early_stop(early_stop):
            for block in blocks:
                pair = checkpoint(block, *pair, use_reentrant=False)
        return pair

    return run


def model(width: int, depth: int, device: str, names: Sequence[str] = ()) -> Model:
    """Return blocks and all ways to run them, or those of the given names."""
    blocks = build(width, depth, device)
    runs: dict[str, Run] = {
        PLAIN: plain(blocks),
        CHECKPOINT: checkpointed(blocks, early_stop=True),
        FULL: checkpointed(blocks, early_stop=False),
        **schedules(blocks),
        **{name: ours(blocks, **options) for name, options in OURS.items()},
        MONITOR: ours(blocks, engine="node", monitor=DriftMonitor(on_report=None)),
        **packages(blocks),
    }
    unknown = set(names) - set(runs)
    if unknown:
        raise SystemExit(f"expected ways of {list(runs)}, but got {sorted(unknown)}")
    chosen = {name: run for name, run in runs.items() if not names or name in names}
    return Model(nn.ModuleList(blocks), chosen)


def inputs(tokens: int, width: int, device: str) -> Tensor:
    """Return an input that requires grad: some peers train no weights otherwise."""
    return torch.randn(tokens, width, device=device, requires_grad=True)


def backward(run: Run, x: Tensor) -> None:
    """Do a forward and a backward pass."""
    y1, y2 = run(x)
    (y1 + y2).square().mean().backward()


def verify(found: Model, x: Tensor) -> None:
    """Stop if a way computes other gradients than the plain one."""
    weights = found.parameters()

    def gradients(run: Run) -> list[Tensor]:
        for weight in weights:
            weight.grad = None
        backward(run, x)
        grads = [weight.grad for weight in weights]
        for weight in weights:
            weight.grad = None
        return [grad for grad in grads if grad is not None]

    expected = gradients(plain(list(found.blocks)))  # type: ignore[arg-type]
    for name, run in found.runs.items():
        got = gradients(run)
        if len(got) != len(expected):
            raise SystemExit(
                f"{name}: {len(expected) - len(got)} weights lack gradients"
            )
        for grad, want in zip(got, expected, strict=True):
            if (grad - want).norm() > 1e-3 * want.norm():
                raise SystemExit(
                    f"{name}: its gradients are not those of the plain run"
                )
