# SPDX-License-Identifier: Apache-2.0
"""Train a GPT that needs several times the memory there is.

Every run is a process of its own. Plain blocks with AdamW are first run without a cap,
to see what they need, and then under it, where they must run out of memory.
``ReversibleTrainer`` with SM3 runs under the cap. Its losses must fall, and they and
all weights must have the bits of the run that stores its activations, without a cap:
``Trainer.from_blocks`` with the same optimizer. Both round their streams to the grid
(``exact="grid"``). On CUDA, weights and optimizer state stay on the host, and the cap
is less than the weights.
"""

from __future__ import annotations

import argparse
import hashlib
import json
from typing import Any

import torch
from _cap import in_process, limit
from _gpt_ways import ADAMW, CONTEXT, VOCABULARY, WAYS, Way, model_of, trainer
from _meter import bytes_of
from _report import Figure, arguments, finish

from torch_sm3.trainer import ReversibleTrainer, Trainer

CAPPED, STORED = "ReversibleTrainer, SM3", "Trainer.from_blocks, SM3"


def way_of(name: str, device: str) -> Way:
    """Return a way to train by its name."""
    if name == ADAMW:
        way = WAYS[name]
        return Way(way.blocks, lambda model: way.step(model.to(device)))
    if name == STORED:
        return Way(
            "reversible",
            lambda model: trainer(model.to(device), Trainer.from_blocks, exact="grid"),
        )
    offload = "host" if torch.device(device).type == "cuda" else "none"
    return Way(
        "reversible",
        lambda model: trainer(
            model, ReversibleTrainer, exact="grid", offload=offload, device=device
        ),
    )


def train(
    name: str, width: int, depth: int, options: argparse.Namespace
) -> dict[str, Any]:
    """Make a model, train it on one batch, and return what came out."""
    way = way_of(name, options.device)
    found: dict[str, Any] = {"losses": []}

    def run() -> None:
        model = model_of(way, width, depth)
        found["weight_bytes"] = sum(p.nbytes for p in model.parameters())
        step = way.step(model)
        tokens = torch.randint(VOCABULARY, (options.batch, CONTEXT)).to(options.device)
        for _ in range(options.steps):
            found["losses"].append(step(tokens).item())
        digest = hashlib.sha256()
        for parameter in model.parameters():
            digest.update(parameter.detach().cpu().numpy().tobytes())
        found["digest"] = digest.hexdigest()

    return {"peak": bytes_of(run, options.device).peak, **found}


def child(options: argparse.Namespace) -> None:
    """Train one model in this process, under the cap if there is one."""
    train(options.child, 32, 1, options)  # threads, and code that is loaded late
    if options.cap:
        limit(options.cap, options.device)
    print(json.dumps(train(options.child, options.width, options.depth, options)))


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--cap", type=int, default=128, help="MiB; 0: no cap")
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--depth", type=int, default=28)
    parser.add_argument("--batch", type=int, default=4, help=f"times {CONTEXT} tokens")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    arguments(parser)
    options = parser.parse_args()
    if options.quick:
        options.cap, options.width, options.depth, options.batch = 48, 128, 36, 2
    return options


def main() -> None:
    """Run all, print, and write the figures."""
    options = parse()
    if options.child:
        child(options)
        return

    def attempt(name: str, cap: int, steps: int) -> dict[str, Any] | None:
        keys = ("width", "depth", "batch", "device")
        same = {key: getattr(options, key) for key in keys}
        return in_process(__file__, child=name, cap=cap, steps=steps, **same)

    cap = options.cap * 2**20
    free = attempt(ADAMW, 0, 2)  # the second step has all of AdamW's state
    plain = attempt(ADAMW, options.cap, 2)
    ours = attempt(CAPPED, options.cap, options.steps)
    stored = attempt(STORED, 0, options.steps)
    if not (free and stored):
        raise SystemExit(
            "this machine has too little memory (options --depth, --width)"
        )
    figures = [
        Figure(f"need of {ADAMW} / cap", free["peak"] / cap, None, 3.0),
        Figure(f"{ADAMW}: runs under the cap", float(plain is not None), 0.0),
        Figure(f"{CAPPED}: runs under the cap", float(ours is not None), None, 1.0),
    ]
    if ours:
        losses = ours["losses"]
        print(f"loss of {CAPPED}: {losses[0]:.4f} to {losses[-1]:.4f}")
        same = losses == stored["losses"] and ours["digest"] == stored["digest"]
        figures += [
            Figure("last loss / first loss", losses[-1] / losses[0], 0.9),
            Figure(
                "same bits as the run that stores, uncapped", float(same), None, 1.0
            ),
        ]
    if torch.device(options.device).type == "cuda":
        weights = stored["weight_bytes"] / cap
        figures.append(Figure("weights / cap", weights, None, 1.0))
    runs = {"plain": free, "capped": ours, "stored": stored}
    finish(figures, options, {"runs": runs})


if __name__ == "__main__":
    main()
