# SPDX-License-Identifier: Apache-2.0
"""Adasum in the place of the mean over Megatron's replicas."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from torch_sm3.distributed import AdasumState, adasum_all_reduce
from torch_sm3.megatron.env import Environment, call_with

# What reduces over replicas in the generations before core 0.4, and since.
_REDUCTIONS = ("allreduce_params", "allreduce_gradients", "finish_grad_sync")


class Adasum:
    """Combines the gradients of replicas, each parameter as a layer of its own.

    Gradients are summed over whatever else holds parts of them first, sequences and
    tied weights, since such sums and Adasum do not commute.

    Args:
        env: the Megatron.
    """

    def __init__(self, env: Environment) -> None:
        self._env = env
        self._states: dict[tuple[bool, bool], AdasumState] = {}

    @contextmanager
    def held_back(self, chunks: list[Any]) -> Iterator[None]:
        """Let Megatron do all of its reductions but that over replicas; then do it.

        Args:
            chunks: of this rank.
        """
        with ExitStack() as stack:
            for chunk in chunks:
                for name in _REDUCTIONS:
                    if hasattr(chunk, name):
                        stack.enter_context(mock.patch.object(chunk, name, _nothing))
            yield
        self.reduce(chunks)

    def divide_by_tokens(self, chunks: list[Any], tokens: torch.Tensor) -> None:
        """Divide the gradients of a replica by its own number of tokens.

        Args:
            chunks: of this rank.
            tokens: their number, known where the last stage is.
        """
        env = self._env
        if env.stages > 1:
            group = env.pipeline_group()
            ranks = dist.get_process_group_ranks(group)
            dist.broadcast(tokens, src=ranks[-1], group=group)
        self._over_sequences([tokens], dist.ReduceOp.SUM)
        for _, gradient in _gradients(chunks):
            gradient.div_(tokens.clamp(min=1))

    def reduce(self, chunks: list[Any]) -> None:
        """Combine the gradients of all replicas in place.

        Args:
            chunks: of this rank.
        """
        kinds: dict[tuple[bool, bool], list[torch.Tensor]] = {}
        for parameter, gradient in _gradients(chunks):
            kinds.setdefault(self._kind(parameter), []).append(gradient)
        for kind, gradients in sorted(kinds.items()):
            if not kind[0]:
                # Megatron multiplies the loss by the number of parts of a sequence.
                self._over_sequences(gradients, dist.ReduceOp.AVG)
            state = self._state(kind)
            if state is not None:
                adasum_all_reduce(gradients, state=state)

    def close(self) -> None:
        """Give the groups back."""
        while self._states:
            self._states.popitem()[1].close()

    def _kind(self, parameter: torch.nn.Parameter) -> tuple[bool, bool]:
        """Return whether a parameter is an expert's, and whether a shard."""
        tensor_ranks = self._env.state.get_tensor_model_parallel_world_size()
        shard = getattr(parameter, "tensor_model_parallel", False) and tensor_ranks > 1
        return not getattr(parameter, "allreduce", True), bool(shard)

    def _state(self, kind: tuple[bool, bool]) -> AdasumState | None:
        if kind not in self._states:
            expert, shard = kind
            group = self._replicas(expert)
            if dist.get_world_size(group) == 1:
                return None
            shards = self._env.state.get_tensor_model_parallel_group()
            self._states[kind] = AdasumState(
                process_group=group, shard_group=shards if shard else None
            )
        return self._states[kind]

    def _replicas(self, expert: bool) -> dist.ProcessGroup:
        state = self._env.state
        if expert:
            for name in ("expert_data", "data_modulo_expert"):
                get = getattr(state, f"get_{name}_parallel_group", None)
                if get is not None:
                    return get()
        return call_with(state.get_data_parallel_group, with_context_parallel=False)

    def _over_sequences(self, tensors: list[torch.Tensor], op: Any) -> None:
        ranks = self._env.context_size({})
        if ranks == 1:
            return
        group = self._env.state.get_context_parallel_group()
        for tensor in tensors:
            # Gloo knows no average.
            dist.all_reduce(tensor, group=group)
            if op is dist.ReduceOp.AVG:
                tensor.div_(ranks)


def check(config: Any, chunks: list[Any]) -> None:
    """Refuse options that reduce gradients before Adasum could.

    Args:
        config: Megatron's options of an optimizer, or its arguments.
        chunks: of this rank.

    Raises:
        ValueError: naming the option.
    """
    options = [config, *(getattr(chunk, "ddp_config", None) for chunk in chunks)]
    for name in ("use_distributed_optimizer", "overlap_grad_reduce"):
        if any(getattr(option, name, False) for option in options):
            flag = "--" + name.replace("_", "-")
            raise ValueError(
                f"install: expected whole gradients after the last backward, but got "
                f"{flag}; leave the flag out (argument 'reduction')"
            )


def _gradients(
    chunks: list[Any],
) -> Iterator[tuple[torch.nn.Parameter, torch.Tensor]]:
    seen = set()
    for chunk in chunks:
        for parameter in chunk.parameters():
            gradient = getattr(parameter, "main_grad", None)
            gradient = parameter.grad if gradient is None else gradient
            if parameter not in seen and gradient is not None:
                seen.add(parameter)
                yield parameter, gradient


def _nothing(*_: Any, **__: Any) -> None:
    """Stand for a reduction that is done later."""
