# SPDX-License-Identifier: Apache-2.0
"""``python -m torch_sm3.estimate``: the memory that training a transformer takes."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from torch_sm3.optim import SM3
from torch_sm3.reversible import AdditiveCoupling
from torch_sm3.trainer import CrossEntropy, WeightedMean, extract_reversible_blocks
from torch_sm3.trainer._contract import Terms, contract_of
from torch_sm3.trainer._layers import Model
from torch_sm3.trainer._optimizers import attach
from torch_sm3.trainer._side import SideItems

_META = torch.device("meta")
#: Whose kernels the activations are counted for; attention keeps no scores there.
_CPU = torch.device("cpu")
_OPTIMIZERS: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
    "sm3": lambda params: SM3(params),
    "sm3-momentum": lambda params: SM3(params, momentum=0.9),
    "adamw": lambda params: torch.optim.AdamW(params),
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1),
}


class _Embedding(nn.Embedding):
    """Tokens to two equal streams."""

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        """Return the streams."""
        h = super().forward(tokens)
        return h, h


class _Attention(nn.Module):
    """Pre-norm causal attention."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, length, width) to the same shape."""
        batch, length, width = x.shape
        qkv = self.qkv(self.norm(x)).view(batch, length, 3, self.heads, -1)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(batch, length, width))


class _Join(nn.Module):
    """Two streams to one, where the loss begins."""

    n_in = 2
    loss_border = True

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        """Return the sum."""
        return a + b


def layers_of(options: argparse.Namespace) -> list[Any]:
    """Return the layers of a reversible transformer, the loss included."""
    width = options.width

    def mlp() -> nn.Module:
        hidden = options.expansion * width
        return nn.Sequential(
            nn.LayerNorm(width),
            nn.Linear(width, hidden),
            nn.GELU(),
            nn.Linear(hidden, width),
        )

    couplings = [
        AdditiveCoupling(_Attention(width, options.heads), mlp())
        for _ in range(options.depth)
    ]
    head = nn.Linear(width, options.vocabulary, bias=False)
    norm = nn.LayerNorm(width)
    loss = [_Join(), norm, head, nn.LogSoftmax(-1), CrossEntropy(), WeightedMean()]
    return [_Embedding(options.vocabulary, width), couplings, *loss]


def estimate(options: argparse.Namespace) -> dict[str, int]:
    """Return the bytes of each term; nothing is allocated."""
    op = "estimate"
    with _META:
        layers = layers_of(options)
        shape = options.batch, options.length
        tokens = torch.empty(shape, dtype=torch.int64)
        batch = tokens, tokens, torch.empty(shape)
    blocks, loss = extract_reversible_blocks(layers, options.loss_chunk)
    model = Model(op, blocks, loss)
    for module in model.modules:
        module.to(getattr(torch, options.dtype))
    attach(op, model, _OPTIMIZERS[options.optimizer])
    terms = Terms(
        exact=options.exact,
        offloads=options.offload == "host",
        n_microbatches=options.microbatches,
        n_prefetch=options.prefetch,
        n_async=options.async_layers,
        two_passes=options.two_passes,
    )
    return contract_of(model, SideItems(op, model, None), _CPU, batch, terms)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m torch_sm3.estimate",
        description="Print the bytes on the device while ReversibleTrainer trains a "
        "reversible transformer. Nothing is allocated.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--depth", type=int, default=12)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--heads", type=int, default=12)
    parser.add_argument("--expansion", type=int, default=4, help="of the MLP")
    parser.add_argument("--vocabulary", type=int, default=50257)
    parser.add_argument("--batch", type=int, default=8, help="examples on a device")
    parser.add_argument("--length", type=int, default=1024, help="tokens an example")
    dtypes = ("float32", "bfloat16", "float16", "float64")
    parser.add_argument("--dtype", choices=dtypes, default="float32")
    parser.add_argument("--optimizer", choices=[*_OPTIMIZERS], default="sm3")
    parser.add_argument("--offload", choices=("none", "host"), default="none")
    modes = ("none", "grid", "sidecar")
    parser.add_argument("--exact", choices=modes, default="grid")
    parser.add_argument("--microbatches", type=int, default=1)
    parser.add_argument("--prefetch", type=int, default=1, help="layers ahead")
    parser.add_argument("--async-layers", type=int, default=1, help="layers behind")
    parser.add_argument(
        "--two-passes", action="store_true", help="clipping or loss scaling"
    )
    parser.add_argument("--loss-chunk", type=int, default=0, help="rows; 0 for all")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args(arguments)
    for name in ("depth", "width", "heads", "vocabulary", "batch", "length"):
        if getattr(options, name) < 1:
            parser.error(f"expected at least 1, but got {getattr(options, name)} "
                         f"(argument '--{name}')")  # fmt: skip
    if options.width % options.heads:
        parser.error(
            f"expected a multiple of {options.heads} heads, but got {options.width} "
            "(argument '--width')"
        )
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table."""
    options = parse(arguments)
    terms = estimate(options)
    total = sum(terms.values())
    if options.json:
        print(json.dumps({**terms, "total": total}, indent=2))
        return 0
    for name, size in [*terms.items(), ("total", total)]:
        print(f"{name:<28}{size / 2**20:>12,.1f} MiB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
