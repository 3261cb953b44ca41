# SPDX-License-Identifier: Apache-2.0
"""Parameters of 1001 steps of SM3 in float64 NumPy, for the C++ optimizer's test.

``python tests/reference/sm3_cpp_values.py`` prints ``tests/cpp/sm3_values.h``: the
network of torch's own optimizer tests, sampled every 100 steps. Written from the
formulas; shares nothing with the product.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

STEPS = 1001
SAMPLE_EVERY = 100
EPS = 1e-30


@dataclass(frozen=True)
class Case:
    """One run."""

    name: str
    lr: float = 0.1
    momentum: float = 0.0
    beta2: float = 1.0
    weight_decay: float = 0.0
    first: bool = False  # variant I


CASES = [
    Case("kSM3"),
    Case("kSM3WithMomentum", momentum=0.9),
    Case("kSM3WithWeightDecay", weight_decay=1e-2),
    Case("kSM3WithWeightDecayAndMomentum", weight_decay=1e-2, momentum=0.9),
    Case("kSM3WithBeta2", lr=0.01, beta2=0.9),
    Case("kSM3I", first=True),
    Case("kSM3IWithBeta2AndMomentum", lr=0.01, beta2=0.9, momentum=0.9, first=True),
]


class Parameter:
    """A parameter with its state; axes says which axes each accumulator keeps."""

    def __init__(self, value: list[float], shape: tuple[int, ...]) -> None:
        self.w = np.array(value, dtype=np.float64).reshape(shape)
        self.m = np.zeros_like(self.w)
        # A matrix has rows and columns; with a size-1 axis only one of them counts.
        matrix = len(shape) == 2 and 1 not in shape
        self.axes = [(0,), (1,)] if matrix else [tuple(range(len(shape)))]
        self.mu = [np.zeros(self._kept(a)) for a in self.axes]

    def _kept(self, axes: tuple[int, ...]) -> list[int]:
        return [n if d in axes else 1 for d, n in enumerate(self.w.shape)]

    def _maxima(self, x: np.ndarray, axes: tuple[int, ...]) -> np.ndarray:
        others = tuple(d for d in range(x.ndim) if d not in axes)
        return x.max(axis=others, keepdims=True)

    def _least(self) -> np.ndarray:
        least = np.full(self.w.shape, np.inf)
        for mu in self.mu:
            least = np.minimum(least, mu)
        return least

    def step(self, g: np.ndarray, case: Case) -> None:
        """Do one step."""
        keep = case.beta2
        add = 1.0 if case.beta2 == 1.0 else 1.0 - case.beta2
        if case.first:
            for i, axes in enumerate(self.axes):
                self.mu[i] = keep * self.mu[i] + add * self._maxima(g**2, axes)
            nu = self._least()
        else:
            nu = keep * self._least() + add * g**2
            for i, axes in enumerate(self.axes):
                self.mu[i] = self._maxima(nu, axes)
        u = g / np.sqrt(nu + EPS)
        self.m = case.momentum * self.m + (1 - case.momentum) * u
        self.w = (1 - case.lr * case.weight_decay) * self.w - case.lr * self.m


def sigmoid(x: np.ndarray) -> np.ndarray:
    """Return 1 / (1 + exp(-x))."""
    return 1 / (1 + np.exp(-x))


def run(case: Case) -> list[list[float]]:
    """Return all parameters, flat, after steps 1, 101, 201, ..."""
    weight1 = Parameter([-0.2109, -0.4976, -0.1413, -0.3420, -0.2524, 0.6976], (3, 2))
    bias1 = Parameter([-0.1085, -0.2979, 0.6892], (3,))
    weight2 = Parameter([-0.0508, -0.3941, -0.2843], (1, 3))
    bias2 = Parameter([-0.0711], (1,))
    parameters = [weight1, bias1, weight2, bias2]
    x = np.array([[0.1, 0.2], [0.3, 0.4], [0.5, 0.6]])
    samples = []
    for i in range(STEPS):
        hidden = sigmoid(x @ weight1.w.T + bias1.w)
        out = sigmoid(hidden @ weight2.w.T + bias2.w)
        # The loss is the sum of the outputs.
        d_out = out * (1 - out)
        d_hidden = (d_out @ weight2.w) * hidden * (1 - hidden)
        grads = [
            d_hidden.T @ x,
            d_hidden.sum(axis=0),
            d_out.T @ hidden,
            d_out.sum(axis=0),
        ]
        for parameter, grad in zip(parameters, grads, strict=True):
            parameter.step(grad, case)
        if i % SAMPLE_EVERY == 0:
            samples.append([float(v) for p in parameters for v in p.w.ravel()])
    return samples


def main() -> None:
    """Print the header."""
    print("// SPDX-License-Identifier: Apache-2.0")
    print("// Made by tests/reference/sm3_cpp_values.py; do not edit.")
    print("#pragma once\n\n#include <array>\n")
    print("// clang-format off\nnamespace torch_sm3::expected {\n")
    print("// The 13 numbers of the four parameters after a step.")
    print("using Samples = std::array<std::array<double, 13>, 11>;\n")
    for case in CASES:
        print(f"inline constexpr Samples {case.name} = {{{{")
        for sample in run(case):
            numbers = [f"{value:.15g}" for value in sample]
            lines = [", ".join(numbers[k : k + 4]) for k in range(0, 13, 4)]
            print("  {{" + ",\n    ".join(lines) + "}},")
        print("}};\n")
    print("} // namespace torch_sm3::expected")


if __name__ == "__main__":
    main()
