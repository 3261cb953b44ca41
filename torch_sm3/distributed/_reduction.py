# SPDX-License-Identifier: Apache-2.0
"""What a state does with tensors: options, counters and messages, whoever calls."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from torch_sm3 import _ops
from torch_sm3.distributed._binding import Binding
from torch_sm3.distributed._log import Log
from torch_sm3.distributed._metrics import AdasumMetrics
from torch_sm3.distributed._names import Layers
from torch_sm3.distributed._options import Options, refuse
from torch_sm3.distributed._plans import Layout, Plans, make_plan

# Of a bucket that nothing was said about: DDP's default.
_COMMON_BYTES = 25 << 20


def as_real(tensor: Tensor) -> Tensor:
    """Return a complex tensor as pairs of real numbers, another one as it is."""
    if tensor.dtype in (torch.complex64, torch.complex128):
        return torch.view_as_real(tensor.detach())
    return tensor


def _is_lazy(tensor: Tensor) -> bool:
    """Whether a tensor's memory holds the conjugate or the negative of its values."""
    return tensor.is_conj() or tensor.is_neg()


def _plain(tensor: Tensor) -> Tensor:
    """Return a tensor whose memory holds its values; a copy where it did not."""
    return tensor.detach().resolve_conj().resolve_neg() if _is_lazy(tensor) else tensor


def refuse_sparse(op: str, tensor: Tensor, name: str) -> None:
    """Raise NotImplementedError for a tensor that is not strided."""
    if tensor.layout is not torch.strided:
        raise NotImplementedError(
            f"{op}: expected dense gradients, but got layout {tensor.layout} of "
            f"{name}; those of nn.Embedding are dense with sparse=False (argument "
            "'tensors')"
        )


def _copied_back(
    result: torch.futures.Future[Any], pairs: list[tuple[Tensor, Tensor]]
) -> torch.futures.Future[Any]:
    """Return the future of what also stands in the tensors that were not read."""
    lazy = [(target, source) for target, source in pairs if _is_lazy(target)]
    if not lazy:
        return result

    def copy(done: torch.futures.Future[Any]) -> Any:
        value = done.value()
        for target, source in lazy:
            target.detach().copy_(source)
        return value

    return result.then(copy)


class Reduction:
    """Options, layers and step count, and the messages made with them.

    Attributes:
        options: what is computed.
        layers: names and excluded parameters.
        plans: layouts made so far.
        step: optimizer steps so far.
        log: of what the metrics are made.
        largest: bytes of the largest message so far.
    """

    def __init__(self, options: Options, layers: Layers) -> None:
        self.layers = layers
        self.step = 0
        self.log = Log()
        self.largest = 0
        self.use(options)

    def use(self, options: Options) -> None:
        """Take other options from now on."""
        self.options = options
        self.plans = Plans(options, self.layers)

    def submit(
        self,
        binding: Binding,
        layout: Layout,
        tensors: Sequence[Tensor],
        value: Any,
        what: str,
        *,
        outputs: Sequence[Tensor] = (),
        header: bool | None = None,
        release: bool = False,
    ) -> torch.futures.Future[Any]:
        """Queue one message of the running step.

        Args:
            binding: who does it.
            layout: of the tensors.
            tensors: of one dtype and device.
            value: of the future.
            what: operation and part, for errors.
            outputs: where the result goes; in place if empty.
            header: compare sizes and options with all ranks first; None: in the first
                iterations.
            release: free the scratch memory afterwards.
        """
        options, step = self.options, self.step
        self.largest = max(self.largest, sum(tensor.nbytes for tensor in tensors))
        check = "off"
        if options.check != "off":
            if binding.first_iterations if header is None else header:
                check = "layout"
            if options.check != "layout" and step % options.check_every == 0:
                check = "hash"
        measured = bool(options.metrics) and step % options.metrics == 0
        ticket, result = binding.submit(
            layout.plan,
            tensors,
            outputs,
            value,
            what,
            mean=step < options.warmup_steps,
            check=check,
            metrics=measured,
            release=release,
        )
        if measured:
            self.log.add(ticket, layout, result)
        return result

    def _leaves(self, ranks: int) -> set[int]:
        """Return of how many leaves a whole Gram matrix may be."""
        nodes = -(-ranks // (self.options.node_size or 1))
        return {ranks, nodes}

    def all_reduce(
        self,
        binding: Binding,
        op: str,
        tensors: Sequence[Tensor],
        value: Any,
        *,
        outputs: Sequence[Tensor] = (),
        names: Sequence[str] | None = None,
        parameters: Sequence[Tensor] | None = None,
        header: bool | None = None,
    ) -> list[torch.futures.Future[Any]]:
        """Queue tensors of any dtypes and devices, each a layer.

        Everything that can be refused here is refused before the first message.

        Args:
            binding: who does it.
            op: for errors.
            tensors: by which dtypes and devices are grouped in the order of the list.
            value: of each future.
            outputs: where results go; in place if empty.
            names: of the layers.
            parameters: to which the layers belong, the tensors themselves if None.
            header: as for :meth:`submit`.

        Returns:
            One future for each dtype and device; the last is the last to complete.
        """
        keys = tensors if parameters is None else parameters
        parts: dict[Any, list[int]] = {}
        for i, (tensor, key) in enumerate(zip(tensors, keys, strict=True)):
            refuse_sparse(op, tensor, self.layers.describe(key))
            parts.setdefault((tensor.dtype, tensor.device), []).append(i)
        messages = []
        for numbers in parts.values():
            read = [_plain(tensors[i]) for i in numbers]
            given = [outputs[i] for i in numbers] if outputs else []
            written = [torch.empty_like(_plain(o)) if _is_lazy(o) else o for o in given]
            layout = self.plans.of_sizes(
                op,
                [as_real(tensor).numel() for tensor in read],
                [keys[i] for i in numbers],
                None if names is None else [names[i] for i in numbers],
            )
            real = [as_real(tensor) for tensor in read]
            out = [as_real(tensor) for tensor in written]
            binding.exchange.check(layout.plan, real, out, op)
            targets = given or [tensors[i] for i in numbers]
            back = list(zip(targets, written or read, strict=True))
            messages.append((layout, real, out, back))
        results = []
        for layout, real, out, back in messages:
            result = self.submit(
                binding, layout, real, value, op, outputs=out, header=header
            )
            results.append(_copied_back(result, back))
        return results

    def end_step(self, binding: Binding | None, op: str) -> None:
        """Count a step; with ``check="full"`` compare all parameters."""
        step = self.step
        self.step = step + 1
        if binding is None:
            return
        binding.iteration += 1
        if self.options.metrics:
            self.log.end_step(step, binding.exchange, self._leaves(binding.size))
        if self.options.check == "full" and step % self.options.check_every == 0:
            self._compare_parameters(binding, op)

    def _compare_parameters(self, binding: Binding, op: str) -> None:
        parameters = self.plans.parameters()
        hashes = torch.zeros(len(parameters), dtype=torch.int64)
        for i, parameter in enumerate(parameters):
            local = getattr(parameter, "to_local", parameter.detach)()
            hashes[i] = _ops.reversible_checksum(as_real(local.detach()))
        everyone = binding.exchange.swap(hashes, f"{op}: comparing all parameters")
        differs = everyone != everyone[0]
        if not differs.any():
            return
        ranks = differs.any(1).nonzero().flatten().tolist()
        names = [
            self.layers.describe(parameter)
            for parameter, found in zip(parameters, differs.any(0), strict=True)
            if found
        ]
        raise RuntimeError(
            f"{op}: expected equal parameters on all ranks, but got others on ranks "
            f"{ranks} than on rank 0 in {', '.join(names)}{binding.place}"
        )

    def algorithm(self, binding: Binding) -> str:
        """Return the algorithm for the largest bucket so far."""
        if self.options.mode in ("mean", "sum"):
            return "all_reduce"
        plan = make_plan(self.options, [1], [], [])
        return binding.exchange.algorithm(plan, self.largest or _COMMON_BYTES)

    def metrics(self, binding: Binding | None) -> AdasumMetrics:
        """Return the metrics of the last measured step."""
        op = "AdasumState.metrics"
        exchange = None if binding is None else binding.exchange
        found = self.log.read(exchange)
        if found is not None:
            return found
        if not self.options.metrics:
            refuse(op, "a state with metrics=True", "False", "metrics", RuntimeError)
        raise RuntimeError(f"{op}: expected a step that has ended, but got none yet")
