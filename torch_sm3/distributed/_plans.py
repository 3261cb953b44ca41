# SPDX-License-Identifier: Apache-2.0
"""Plans of the library, made once for each list of layers."""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from torch_sm3 import _ops
from torch_sm3.distributed._names import Layers
from torch_sm3.distributed._options import Options

# Calls with ever new sizes must not fill the memory.
_MOST_BY_SIZE = 64


class Layout:
    """The layers of one message: the library's plan, and whose layers they are."""

    __slots__ = ("names", "plan", "refs")

    def __init__(
        self, plan: Any, names: list[str | None], refs: list[weakref.ref[Tensor]]
    ) -> None:
        self.plan = plan
        self.names = names
        self.refs = refs


def make_plan(
    options: Options, sizes: list[int], means: list[bool], names: list[str]
) -> Any:
    """Return the library's plan of one list of layers."""
    wires = {None: "", torch.float16: "float16", torch.bfloat16: "bfloat16"}
    wide = options.accumulate_dtype == torch.float64
    return _ops.adasum_plan(
        sizes,
        mode=options.mode,
        scale=float(options.scale),
        algorithm=options.algorithm,
        node_size=options.node_size or 0,
        inner=options.inner,
        means=means,
        accumulate="float64" if wide else "float32",
        wire=wires[options.wire_dtype],
        wide_result=options.result_dtype == torch.float32,
        scratch_bytes=options.scratch_bytes,
        threads=options.threads or 0,
        names=names,
    )


class Plans:
    """Layouts by parameters, and plans by sizes."""

    def __init__(self, options: Options, layers: Layers) -> None:
        self._options = options
        self._layers = layers
        self._buckets: dict[tuple[int, ...], Layout] = {}
        self._by_size: OrderedDict[Any, Any] = OrderedDict()
        self._seen: Any = torch.utils.weak.WeakTensorKeyDictionary()

    def of_bucket(self, op: str, parameters: list[Tensor]) -> Layout:
        """Return the layout of a bucket, which depends on its parameters only.

        Args:
            op: for messages.
            parameters: of the bucket, in its order.
        """
        key = tuple(map(id, parameters))
        layout = self._buckets.get(key)
        if layout is None:
            # Complex numbers are pairs of real ones.
            sizes = [p.numel() * (2 if p.is_complex() else 1) for p in parameters]
            layout = self.of_sizes(op, sizes, parameters)
            # An address may be used again once its parameter is gone.
            buckets = self._buckets
            layout.refs = [
                weakref.ref(parameter, lambda _: buckets.pop(key, None))
                for parameter in parameters
            ]
            buckets[key] = layout
            for parameter in parameters:
                self._seen[parameter] = True
        return layout

    def of_sizes(
        self,
        op: str,
        sizes: list[int],
        parameters: Sequence[Tensor],
        names: Sequence[str] | None = None,
    ) -> Layout:
        """Return the layout of layers of given sizes that belong to parameters."""
        layers = self._layers
        given: list[str | None] = list(names or map(layers.name_of, parameters))
        shown = [
            layers.describe(parameter) if name is None else name
            for name, parameter in zip(given, parameters, strict=True)
        ]
        means: list[bool] = []
        if layers.any_excluded:
            means = [layers.excludes(op, parameter) for parameter in parameters]
        key = (tuple(sizes), tuple(means), tuple(shown))
        plan = self._by_size.pop(key, None)
        if plan is None:
            plan = make_plan(self._options, sizes, means, shown)
        self._by_size[key] = plan
        if len(self._by_size) > _MOST_BY_SIZE:
            self._by_size.popitem(last=False)
        return Layout(plan, given, [weakref.ref(p) for p in parameters])

    def parameters(self) -> list[Tensor]:
        """Return all parameters: those named, then those met, in order."""
        named = self._layers.parameters()
        known = set(map(id, named))
        return named + [p for p in self._seen if id(p) not in known]
