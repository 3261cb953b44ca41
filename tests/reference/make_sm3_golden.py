# SPDX-License-Identifier: Apache-2.0
"""Write ``sm3_golden.json``: runs of the float64 oracle, one per preset and variant.

Run it from the root: ``PYTHONPATH=tests python tests/reference/make_sm3_golden.py``.
The file is checked in, so that a change of the oracle is seen too. Its runs of variant
II were compared once with optax 0.2.8 and pytorch_optimizer 4.1.0 ("enealor") in
float64: they agree within 1e-15. The sources of "google" and "trax" were read.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import numpy as np
from reference.sm3_oracle import NumpySM3, Options

PATH = Path(__file__).with_name("sm3_golden.json")
SHAPES = [(3, 4), (5,), (2, 3, 2), ()]
STEPS = 5


def runs() -> list[Options]:
    """Return the runs: each preset with both variants, and with an average."""
    result = []
    for compat in (None, "google", "optax", "trax", "enealor"):
        for variant in ("II", "I"):
            for beta2 in (None, 0.9):
                if compat == "trax" and beta2 is not None:
                    continue
                decay = 0.0 if variant == "II" else 0.1
                result.append(
                    Options(
                        compat=compat,
                        variant=variant,
                        beta2=beta2,
                        momentum=0.9,
                        weight_decay=decay,
                    )
                )
    return result


def inputs(shape: tuple[int, ...]) -> tuple[np.ndarray, list[np.ndarray]]:
    """Return the weight and gradients of all runs, exact in float32.

    They come from a formula, not from a generator that may change.
    """
    number = np.arange(int(np.prod(shape)), dtype=np.float64).reshape(shape)
    weight = np.asarray(np.round(np.cos(number) * 64) / 64)
    grads = []
    for step in range(STEPS):
        wave = np.round(np.sin(1 + number * 1.7 + step * 2.3) * 64) / 64
        grads.append(np.asarray(wave * 2.0 ** (3 * step - 6)))
    return weight, grads


def golden() -> list[dict[str, object]]:
    """Return all runs with their inputs left out and their results in full."""
    result = []
    for options in runs():
        for shape in SHAPES:
            weight, grads = inputs(shape)
            oracle = NumpySM3(weight, options)
            for grad in grads:
                oracle.step(grad)
            result.append(
                {
                    "options": asdict(options),
                    "shape": list(shape),
                    "param": oracle.w.ravel().tolist(),
                    "accumulators": [mu.ravel().tolist() for mu in oracle.mu],
                    "momentum": oracle.m.ravel().tolist(),
                }
            )
    return result


if __name__ == "__main__":
    lines = ",\n".join(json.dumps(run) for run in golden())
    PATH.write_text(f"[\n{lines}\n]\n")
