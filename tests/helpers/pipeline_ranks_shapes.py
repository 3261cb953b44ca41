# SPDX-License-Identifier: Apache-2.0
"""What ranks do in the tests of shapes: values and losses of all sizes and strides."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from helpers.pipeline_chain import accumulate, differing, own_stages, runner_of
from torch import Tensor, nn

from torch_sm3.pipeline import PipelineError, plan

M = 3

#: What a stage makes of its result before it returns it; the next one may get
#: any of these, and the gradient of each comes back in whatever form autograd has.
FORMS: dict[str, Callable[[Tensor], Any]] = {
    "plain": lambda y: y,
    "0-dim": lambda y: y.sum(),
    "0-dim expanded": lambda y: y.sum().expand(2, 3),
    "one element, stride 0": lambda y: y.sum().expand(1, 1),
    "one element of many": lambda y: y.repeat(9, 9)[4:5, 4:5],
    "one column": lambda y: y[:, :1],
    "one row, expanded": lambda y: y[:1].expand(4, -1),
    "transposed": lambda y: y.t().contiguous().t(),
    "part of a larger storage": lambda y: y.repeat(1, 8)[:, : y.shape[1]],
    "end of a larger storage": lambda y: y.repeat(8, 1)[-y.shape[0] :],
    "strided": lambda y: y.repeat(2, 2)[::2, ::2],
    "diagonal": lambda y: (y.sum() * torch.ones(3, 3)).diagonal(),
    "as_strided": lambda y: y.repeat(2, 2).as_strided((1, 2), (0, 1), 1),
    "view of its input": lambda y: y.view(-1),
    "two views of one": lambda y: (y[:, :1], y[:, :1] * 1),
    "the same twice": lambda y: (y, y),
    "empty beside": lambda y: (y[:0], y),
    "real part": lambda y: torch.complex(y, y * 2).conj().imag,
    "conjugate": lambda y: torch.complex(y, y * 2).conj(),
    "many dimensions": lambda y: y.reshape(*[1] * 20, -1),
    "halved": lambda y: y.half(),
    "doubled": lambda y: y.double().expand(2, *y.shape),
}

#: Losses whose gradients are expanded, selected, masked, or whole.
LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "sum": lambda y, t: y.sum(),
    "mean": lambda y, t: y.mean(),
    "mse": lambda y, t: nn.functional.mse_loss(y, t.expand_as(y)),
    "one element": lambda y, t: y[0, 0],
    "one element squared": lambda y, t: y[-1:, -1:].square().squeeze(),
    "max": lambda y, t: y.max(),
    "prod": lambda y, t: y.tanh().prod(),
    "norm": lambda y, t: y.norm(),
    "masked": lambda y, t: y[y > 0].sum(),
    "no gradient": lambda y, t: (y * 0).sum().detach(),
}


class Shaped(nn.Module):
    """Scale what comes, in any shape, and return it in a certain form."""

    def __init__(self, index: int, form: Callable[[Tensor], Any] | None) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor([1.5 + index]))
        self.shift = nn.Parameter(torch.tensor(0.25))
        self.form = form

    def forward(self, *values: Tensor) -> Any:
        real = [v.abs() if v.is_complex() else v.float() for v in values]
        y = sum(v.sum() for v in real[1:]) + real[0] * self.scale + self.shift
        if self.form is None:
            return y.reshape(-1, y.shape[-1] if y.dim() else 1)
        # Two rows and two columns or more, whatever came.
        return self.form(y.sum() * torch.tensor([[1.0, 2.0], [3.0, 4.0]]))


class Affine(nn.Module):
    """Scale and shift a tensor of any shape."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor([1.5 + index]))
        self.shift = nn.Parameter(torch.tensor(0.25))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale + self.shift


def _spread(module: Any) -> Callable[[Any], Any]:
    return lambda value: module(*(value if isinstance(value, tuple) else (value,)))


def forms(rank: int, ranks: int, kind: str) -> list[str]:
    """Send values of every form; return what differs from one process."""
    wrong = []
    schedule = plan(kind, ranks, M)
    for name, form in FORMS.items():
        last = schedule.stages - 1
        mine, whole = (
            [Shaped(s, form if s < last else None) for s in range(last + 1)]
            for _ in range(2)
        )
        items = [torch.full((2, 2), 0.5 + i) for i in range(M)]
        targets = [torch.zeros(2, 1)] * M
        runner = runner_of(mine, schedule, rank, loss_fn=LOSSES["sum"])
        result = runner.step(microbatches=items, targets=targets)
        again = runner.eval(microbatches=items, targets=targets)
        runner.close()
        losses = accumulate(
            [_spread(stage) for stage in whole],  # type: ignore[misc]
            items,
            targets,
            [1 / M] * M,
            LOSSES["sum"],
        )
        own = own_stages(schedule, rank)
        bad = differing(mine, whole, own)
        if name == "transposed":
            # Rows travel as rows: a sum takes them in another order than columns.
            bad = [] if _close(mine, whole, own) else ["gradients"]
        if not torch.equal(result.losses, torch.stack(losses)):
            bad.append("losses")
        if not torch.equal(result.losses, again.losses):
            bad.append("eval")
        wrong += [f"{kind}, {name}: {what}" for what in bad]
    return wrong


def _close(mine: list[Any], whole: list[Any], own: list[int]) -> bool:
    pairs = [(mine[s].parameters(), whole[s].parameters()) for s in own]
    return all(
        torch.allclose(a.grad, b.grad, rtol=1e-6)
        for first, second in pairs
        for a, b in zip(first, second, strict=True)
    )


def sizes(rank: int, ranks: int, kinds: list[str]) -> list[str]:
    """Step on batches of all small sizes with all losses; return what differs."""
    wrong = []
    for kind in kinds:
        schedule = plan(kind, ranks, M)
        mine = [Affine(s) for s in range(schedule.stages)]
        for name, loss in LOSSES.items():
            runner = runner_of(mine, schedule, rank, loss_fn=loss)
            for rows, width in ((1, 1), (1, 4), (2, 1), (2, 4)):
                whole = [Affine(s) for s in range(schedule.stages)]
                # Without a gradient autograd has nothing to do in one process.
                generator = torch.Generator().manual_seed(rows + width)
                items = torch.randn(M * rows, width, generator=generator)
                targets = torch.ones(M * rows, 1)
                result = runner.step(items, target=targets)
                losses = _accumulate(whole, items, targets, loss)
                bad = differing(mine, whole, own_stages(schedule, rank))
                if not torch.equal(result.losses, torch.stack(losses)):
                    bad.append("losses")
                wrong += [f"{kind}, {name}, {rows} x {width}: {what}" for what in bad]
                runner.zero_grad()
            runner.close()
    return wrong


def _accumulate(whole: list[Any], items: Tensor, targets: Tensor, loss: Any) -> Any:
    cut = items.chunk(M), targets.chunk(M)
    if loss is not LOSSES["no gradient"]:
        return accumulate(whole, *cut, [1 / M] * M, loss)
    return [loss(item, target) for item, target in zip(*cut, strict=True)]


class Endless(nn.Module):
    """Return, if armed, a tensor of more bytes than any machine has."""

    armed = False

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: Tensor) -> Tensor:
        y = self.module(x)
        return y.sum().expand(1 << 50) if self.armed else y


def without_memory(rank: int, ranks: int) -> list[Any]:
    """Run out of memory where a message is made; the link must not count as lost."""
    schedule = plan("1f1b", ranks, M)
    mine: list[Any] = [Endless(Affine(s)) for s in range(ranks)]
    whole: list[Any] = [Affine(s) for s in range(ranks)]
    runner = runner_of(mine, schedule, rank)
    items, targets = torch.ones(M, 2), torch.zeros(M, 2)
    mine[0].armed = True
    try:
        runner.step(items, target=targets)
        raise AssertionError("the step must fail")
    except PipelineError as error:
        seen = [error.rank, error.action, error.error_type, "memory" in error.message]
    mine[0].armed = False
    runner.step(items, target=targets)
    runner.close()
    accumulate(whole, items.chunk(M), targets.chunk(M), [1 / M] * M)
    plain = [stage.module for stage in mine]
    return [*seen, differing(plain, whole, [rank])]
