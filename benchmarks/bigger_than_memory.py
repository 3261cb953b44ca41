# SPDX-License-Identifier: Apache-2.0
"""Train a GPT under a memory cap of a third of what AdamW and autograd need for it.

Every run is a process of its own. An uncapped process measures the need of the plain
run: ``torch.optim.AdamW`` on the same layers under ordinary autograd. A third of it,
or less, is the cap of the others: of the data segment beyond what Python and torch hold
(``RLIMIT_DATA``) on the CPU, of the caching allocator on a CUDA device, where the
weights alone exceed it. Under the cap the plain run must end out of memory, and
``ReversibleTrainer`` with SM3 must train with falling loss. The run of
``Trainer.from_blocks`` with the same optimizer and no cap must end with the same bits
in losses and weights.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from _cap import in_process, limit
from _meter import bytes_of
from _report import Figure, arguments, finish
from torch import Tensor, nn

import torch_sm3
from torch_sm3.reversible import AdditiveCoupling
from torch_sm3.trainer import ReversibleTrainer, Trainer

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "examples"))

from gpt import MLP, Attention, Head, Shape, alibi, initialise  # noqa: E402

VOCABULARY, HEADS = 256, 4
#: How many times the cap the plain run must need.
TIMES = 3.0


class Streams(nn.Embedding):
    """Tokens to two equal streams."""

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        """Return the streams."""
        h = super().forward(tokens)
        return h, h


class Loss(nn.Module):
    """The mean of the streams to the cross entropy of the targets."""

    n_in = 3

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.head = Head(shape)

    def forward(self, a: Tensor, b: Tensor, targets: Tensor) -> Tensor:
        """Return a scalar."""
        logits = self.head((a + b) * 0.5)
        return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def build(options: argparse.Namespace) -> tuple[Any, nn.Module]:
    """Return blocks and loss of a GPT on the CPU."""
    torch.manual_seed(0)
    width, depth, length = options.width, options.depth, options.length
    shape = Shape(VOCABULARY, width, depth, HEADS, length, "reversible")
    bias = alibi(HEADS, length).to(options.device)
    embedding = Streams(VOCABULARY, width)
    layers = [
        AdditiveCoupling(Attention(width, bias), MLP(width)) for _ in range(depth)
    ]
    loss = Loss(shape)
    for module in (embedding, *layers, loss):
        initialise(module, depth)
    return [([embedding], layers)], loss


def batch(options: argparse.Namespace) -> tuple[Tensor, Tensor]:
    """Return tokens, and the next ones as targets."""
    generator = torch.Generator().manual_seed(1)
    shape = options.batch, options.length + 1
    tokens = torch.randint(VOCABULARY, shape, generator=generator)
    return tokens[:, :-1].to(options.device), tokens[:, 1:].to(options.device)


def make(kind: str, options: argparse.Namespace) -> Any:
    """Return a trainer: of the plain run, ours, or ours without reversal."""
    blocks, loss = build(options)
    if kind == "plain":
        modules = nn.ModuleList([*blocks[0][0], *blocks[0][1], loss])
        modules.to(options.device)
        return Trainer.from_blocks(
            blocks, loss, lambda params: torch.optim.AdamW(params, lr=1e-3)
        )

    def sm3(params: list[nn.Parameter]) -> torch.optim.Optimizer:
        return torch_sm3.SM3(params, lr=0.02)

    if kind == "ours":
        offload = "host" if options.device == "cuda" else "none"
        return ReversibleTrainer(
            blocks, loss, sm3, exact="grid", offload=offload, device=options.device
        )
    nn.ModuleList([*blocks[0][0], *blocks[0][1], loss]).to(options.device)
    return Trainer.from_blocks(blocks, loss, sm3, exact="grid", device=options.device)


def train(kind: str, options: argparse.Namespace, steps: int) -> dict[str, Any]:
    """Train from scratch and return losses, a hash of the weights and the time."""
    torch.use_deterministic_algorithms(True)
    trainer = make(kind, options)
    data = batch(options)
    losses = []
    start = time.perf_counter()
    for step in range(steps):
        loss, stats = trainer.one_step(data, rng=step, step=step)
        del stats
        losses.append(float(loss))
    seconds = (time.perf_counter() - start) / steps
    digest = hashlib.sha256()
    for state in trainer.state_dict()["layers"]:
        for tensor in state.values():
            flat = tensor.detach().cpu().contiguous().flatten()
            digest.update(flat.view(torch.uint8).numpy().tobytes())
    return {"losses": losses, "hash": digest.hexdigest(), "seconds": seconds}


def child(options: argparse.Namespace) -> None:
    """Do one run in this process and print what came out."""
    kind = options.child
    small = argparse.Namespace(**{**vars(options), "width": 32, "depth": 1})
    train("plain" if kind == "need" else kind, small, 2)  # threads, late code
    if kind == "need":
        peak = bytes_of(lambda: train("plain", options, 2), options.device).peak
        weights = sum(
            p.numel() * p.itemsize for layer in make("plain", options).optimizers
            for group in layer.param_groups for p in group["params"]
        )  # fmt: skip
        print(json.dumps({"need": peak, "weights": weights}))
        return
    if options.cap:
        limit(options.cap, options.device)
    print(json.dumps(train(kind, options, options.steps)))


def run(kind: str, cap: int, options: argparse.Namespace) -> dict[str, Any] | None:
    """Do one run in a fresh process; return None where it runs out of memory."""
    keys = ("width", "depth", "batch", "length", "steps", "device")
    same = {key: getattr(options, key) for key in keys}
    return in_process(__file__, child=kind, cap=cap, **same)


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--depth", type=int, default=16)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--cap", type=int, default=0, help="bytes; 0 for need / 3")
    kinds = ("need", "plain", "ours", "store")
    parser.add_argument("--child", choices=kinds, help=argparse.SUPPRESS)
    arguments(parser)
    options = parser.parse_args()
    if options.quick and not options.child:
        options.width, options.depth, options.batch = 128, 12, 4
    return options


def main() -> None:
    """Measure, compare, print, and write the figures."""
    options = parse()
    if options.child:
        child(options)
        return
    measured = run("need", 0, options)
    if measured is None:
        raise SystemExit("the plain run does not fit without a cap (option --depth)")
    need, weights = measured["need"], measured["weights"]
    cap = options.cap or int(need / TIMES)
    if options.device == "cuda":
        cap = options.cap or min(cap, int(0.9 * weights))
    print(
        f"GPT of width {options.width}, {options.depth} blocks, "
        f"{options.batch * options.length} tokens: weights {weights / 2**20:.0f} MiB, "
        f"plain run {need / 2**20:.0f} MiB, cap {cap / 2**20:.0f} MiB"
    )
    plain = run("plain", cap, options)
    print(f"plain AdamW under the cap: {'trains' if plain else 'out of memory'}")
    ours = run("ours", cap, options)
    if ours is None:
        raise SystemExit("ReversibleTrainer does not fit into the cap")
    first, last = ours["losses"][0], ours["losses"][-1]
    print(
        f"ReversibleTrainer with SM3 under the cap: loss {first:.3f} to {last:.3f} in "
        f"{options.steps} steps of {ours['seconds']:.2f} s"
    )
    store = run("store", 0, options)
    same = store is not None and all(
        store[key] == ours[key] for key in ("losses", "hash")
    )
    print(f"without cap and reversal: {'the same bits' if same else 'OTHER BITS'}")
    figures = [
        Figure("need of the plain run / cap", need / cap, None, TIMES),
        Figure("plain runs that trained under the cap", float(plain is not None), 0),
        Figure("last loss / first loss", last / first, 0.99),
        Figure("runs with other bits than the store run", float(not same), 0),
    ]
    if options.device == "cuda":
        figures.append(Figure("weights / cap", weights / cap, None, 1.0))
    finish(figures, options, {"need": measured, "ours": ours, "store": store})


if __name__ == "__main__":
    main()
