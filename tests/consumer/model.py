# SPDX-License-Identifier: Apache-2.0
"""The model of the consumer: made, trained and compared in Python.

``model.py make MODEL`` writes a TorchScript model with its data; ``--exact grid`` and
``--depth 8`` change it.
``model.py make-trainer TRAINER`` writes one that trains itself, with its optimizer.
``model.py compare MODEL STEPS TRAINED < LOSSES`` trains MODEL, or lets TRAINER train
itself, in Python and fails unless it meets the very bits that the C++ program printed
and saved.
"""

import argparse
import sys
import warnings

import torch
from torch import Tensor, nn

import torch_sm3

warnings.filterwarnings("ignore", message=r".*torch\.jit.*")


class MLP(nn.Module):
    """One residual function."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Return what is added to the other stream."""
        return self.down(torch.tanh(self.up(self.norm(x))))


class Regression(nn.Module):
    """Reversible blocks and a mean squared error, with their data."""

    inputs: Tensor
    targets: Tensor

    def __init__(self, depth: int = 4, width: int = 24, exact: str = "none") -> None:
        super().__init__()
        self.options: str = f'{{"exact": "{exact}"}}'
        self.fs = nn.ModuleList([MLP(width) for _ in range(depth)])
        self.gs = nn.ModuleList([MLP(width) for _ in range(depth)])
        self.head = nn.Linear(width, 8)
        self.inputs = torch.randn(32, width)
        self.targets = torch.randn(32, 8)

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Return the loss."""
        a, b = inputs, inputs
        call = torch.ops.torch_sm3.reversible_begin([a, b], self.options)
        for f, g in zip(self.fs, self.gs):  # noqa: B905  # TorchScript has no strict=
            a = torch.ops.torch_sm3.reversible_half_residual(call, f, a, [b], [])
            b = torch.ops.torch_sm3.reversible_half_residual(call, g, b, [a], [])
        y = torch.ops.torch_sm3.reversible_end(call, [a, b])
        return (self.head(y[0] + y[1]) - targets).square().mean()


class Trainer(nn.Module):
    """A regression that trains itself; the file holds the optimizer's state too."""

    inputs: Tensor
    targets: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.model = Regression(depth=1)
        self.inputs, self.targets = self.model.inputs, self.model.targets
        self.params = list(self.model.parameters())
        self.optimizer = torch.classes.torch_sm3.SM3(lr=0.01, momentum=0.9)

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Do one step and return the loss before it."""
        loss = self.model(inputs, targets)
        loss.backward()
        grads: list[Tensor | None] = [p.grad for p in self.params]
        self.optimizer.step(self.params, grads)
        for grad in grads:
            if grad is not None:
                grad.zero_()
        return loss.detach()


def train(model: torch.jit.ScriptModule, steps: int) -> list[float]:
    """Train with SM3, or let a trainer do it, and return the losses."""
    if hasattr(model, "optimizer"):
        return [model(model.inputs, model.targets).item() for _ in range(steps)]
    optimizer = torch_sm3.SM3(model.parameters(), lr=0.01)
    losses = []
    for _ in range(steps):
        loss = model(model.inputs, model.targets)
        optimizer.zero_grad()
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
    return losses


def write(arguments: argparse.Namespace) -> None:
    """Write the model that the command line asks for."""
    model = Regression(arguments.depth, exact=arguments.exact)
    torch.jit.script(model).save(arguments.model)


def compare(arguments: argparse.Namespace) -> None:
    """Train in Python and fail unless C++ got the same bits."""
    model = torch.jit.load(arguments.model)
    expected = train(model, arguments.steps)
    got = [float.fromhex(line) for line in sys.stdin]
    if got != expected or not expected[-1] < expected[0]:
        sys.exit(f"expected the losses {expected}, but C++ got {got}")
    trained = torch.jit.load(arguments.trained)
    theirs = dict(trained.named_parameters())
    for name, parameter in model.named_parameters():
        if not torch.equal(parameter, theirs[name]):
            sys.exit(f"expected equal parameters, but {name} differs")
    # And on from there: what C++ saved is a model that Python trains.
    again = train(trained, arguments.steps)
    assert again[-1] < expected[-1], (again, expected)
    print(f"equal bits in Python and C++: {expected[0]:.4f} -> {expected[-1]:.4f}")


def main() -> None:
    """Read the command line and do what it says."""
    parser = argparse.ArgumentParser(description=__doc__)
    verbs = parser.add_subparsers(required=True)
    make = verbs.add_parser("make")
    make.add_argument("model")
    make.add_argument("--depth", type=int, default=4)
    make.add_argument("--exact", default="none")
    make.set_defaults(run=write)
    make_trainer = verbs.add_parser("make-trainer")
    make_trainer.add_argument("model")
    make_trainer.set_defaults(run=lambda a: torch.jit.script(Trainer()).save(a.model))
    check = verbs.add_parser("compare")
    check.add_argument("model")
    check.add_argument("steps", type=int)
    check.add_argument("trained")
    check.set_defaults(run=compare)
    torch.manual_seed(0)
    torch.set_num_threads(1)
    arguments = parser.parse_args()
    arguments.run(arguments)


if __name__ == "__main__":
    main()
