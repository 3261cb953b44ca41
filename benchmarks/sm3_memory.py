# SPDX-License-Identifier: Apache-2.0
"""State bytes and peak bytes of one step: SM3, AdamW, Adafactor on real layers.

Each pair of optimizer and layer runs in a process of its own. The peak is what the
step adds to the resident memory of the process, weights and gradients not counted:
the state of the first step and the temporaries of all.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from _meter import resident_peak

import torch_sm3

Shapes = list[tuple[int, ...]]

LAYERS: dict[str, Shapes] = {
    "Linear 11008 x 4096 (Llama-2-7B, MLP)": [(11008, 4096)],
    "Linear 4096 x 4096 (Llama-2-7B, attention)": [(4096, 4096)],
    "Embedding 32000 x 4096 (Llama-2-7B)": [(32000, 4096)],
    "Embedding 50257 x 768 (GPT-2)": [(50257, 768)],
    "block of GPT-2": [
        *((2304, 768), (2304,), (768, 768), (768,), (3072, 768), (3072,)),
        *((768, 3072), (768,), (768,), (768,), (768,), (768,)),
    ],
    "Conv2d 512 x 512 x 3 x 3 (ResNet-50)": [(512, 512, 3, 3)],
    "Conv2d 64 x 3 x 7 x 7 (ResNet-50)": [(64, 3, 7, 7)],
    "LayerNorm 4096": [(4096,), (4096,)],
}

Make = Callable[[list[torch.Tensor]], torch.optim.Optimizer]

OPTIMIZERS: dict[str, Make] = {
    "SM3": lambda params: torch_sm3.SM3(params),
    "SM3 momentum bfloat16": lambda params: torch_sm3.SM3(
        params, momentum=0.9, momentum_dtype=torch.bfloat16
    ),
    "SM3 momentum int8": lambda params: torch_sm3.SM3(
        params, momentum=0.9, momentum_dtype=torch.int8
    ),
    "AdamW": lambda params: torch.optim.AdamW(params, fused=True),
    "Adafactor": lambda params: torch.optim.Adafactor(params),
}


def state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Return the bytes of all tensors that an optimizer keeps."""
    return sum(
        value.numel() * value.element_size()
        for state in optimizer.state.values()
        for value in state.values()
        if isinstance(value, torch.Tensor)
    )


def measure(optimizer: str, layer: str) -> dict[str, int]:
    """Return bytes of weights, state, first and later step; for a fresh process."""
    # A step of everything that runs later, so that threads and caches exist.
    small = torch.ones(64, 64, requires_grad=True)
    small.grad = torch.ones(64, 64)
    warm = OPTIMIZERS[optimizer]([small])
    warm.step()
    warm.step()
    params = [torch.ones(shape, requires_grad=True) for shape in LAYERS[layer]]
    for param in params:
        param.grad = torch.ones_like(param)
    made = OPTIMIZERS[optimizer](params)
    first = resident_peak(made.step)
    return {
        "weights": sum(4 * param.numel() for param in params),
        "state": state_bytes(made),
        "first_step": first,
        "later_step": resident_peak(made.step),
    }


def in_process(optimizer: str, layer: str) -> dict[str, int]:
    """Run ``measure`` in a process of its own."""
    done = subprocess.run(
        [sys.executable, __file__, "--one", optimizer, layer],
        check=True,
        capture_output=True,
        text=True,
    )
    return json.loads(done.stdout)


TITLES = {
    "state": "state",
    "first_step": "peak of the first step",
    "later_step": "of later ones",
}


def share(ours: int, adamw: int) -> str:
    """Return a ratio to AdamW, where it is more than pages that come and go."""
    return f"= {ours / adamw:7.4f} x AdamW" if adamw >= 2**16 else ""


def main() -> None:
    """Parse the command line, measure, print a table and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--one", nargs=2, metavar=("OPTIMIZER", "LAYER"))
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    options = parser.parse_args()
    if options.one:
        print(json.dumps(measure(*options.one)))
        return
    rows = []
    for layer in LAYERS:
        print(layer)
        found = {name: in_process(name, layer) for name in OPTIMIZERS}
        adamw = found["AdamW"]
        for name, bytes_of in found.items():
            rows.append({"layer": layer, "optimizer": name, **bytes_of})
            parts = [
                f"{title} {bytes_of[key]:13,} B {share(bytes_of[key], adamw[key])}"
                for key, title in TITLES.items()
            ]
            print(f"  {name:22} " + ", ".join(parts), flush=True)
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
