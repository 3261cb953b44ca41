# SPDX-License-Identifier: Apache-2.0
"""SM3 in the place of the optimizer that Megatron's wrappers drive."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch

from torch_sm3.megatron import adasum
from torch_sm3.megatron._flags import options_of
from torch_sm3.megatron._shards import TensorParallelSM3
from torch_sm3.megatron.detect import Found
from torch_sm3.megatron.env import Environment
from torch_sm3.optim import SM3

Factory = Callable[[Any, Any], torch.optim.Optimizer]


def replacement(
    env: Environment,
    choice: str | Factory | None,
    options: Mapping[str, Any],
    with_adasum: bool,
) -> Callable[..., Any]:
    """Return what takes the place of ``get_megatron_optimizer``.

    Megatron makes its parameter groups and its wrapper; only the optimizer between
    them is another.

    Args:
        env: the Megatron.
        choice: ``"sm3"``, or a function of parameter groups and Megatron's options;
            None for Megatron's own.
        options: arguments of SM3, and ``tp_exact``.
        with_adasum: whether Adasum combines the gradients of replicas.
    """
    found = env.package.functions["get_megatron_optimizer"]
    signature = inspect.signature(found.function)

    @functools.wraps(found.function)
    def get_megatron_optimizer(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs).arguments
        config = given.get("config") or env.args()
        if with_adasum:
            model = given.get("model", given.get("model_chunks"))
            adasum.check(config, model if isinstance(model, list) else [model])
        if choice is None:
            return found.function(*args, **kwargs)
        _check(config, choice)
        flags = options_of(_args(env))
        make = choice if callable(choice) else _sm3(env, {**flags, **options})
        with _replaced(found, config, make):
            wrapper = found.function(*args, **kwargs)
        for part in parts_of(wrapper):
            _let_init_state(part)
        return wrapper

    return get_megatron_optimizer


def config_function(
    env: Environment,
) -> tuple[Callable[..., Any], Callable[..., Any]] | None:
    """Return Megatron's function that reads its options, and one that knows SM3.

    Args:
        env: the Megatron; before 0.16 it has no such function.
    """
    module = env.package.modules.get("training")
    function = getattr(module, "get_megatron_optimizer_config", None)
    if function is None:
        return None

    @functools.wraps(function)
    def get_megatron_optimizer_config(args: Any, *rest: Any, **kwargs: Any) -> Any:
        if args.optimizer != "sm3":
            return function(args, *rest, **kwargs)
        with mock.patch.object(args, "optimizer", "sgd"):
            return function(args, *rest, **kwargs)

    return function, get_megatron_optimizer_config


def parts_of(wrapper: Any) -> Iterator[Any]:
    """Yield Megatron's wrappers of one optimizer each.

    Args:
        wrapper: such a wrapper, or a chain of them.
    """
    yield from getattr(wrapper, "chained_optimizers", None) or [wrapper]


def _check(config: Any, choice: str | Factory) -> None:
    name = "sm3" if choice == "sm3" else "another optimizer"
    if getattr(config, "use_distributed_optimizer", False):
        raise ValueError(
            f"install: expected whole parameters for {name}, but got "
            "--use-distributed-optimizer, which deals out flat pieces of them and "
            "Adam's state; leave the flag out (argument 'optimizer')"
        )
    if getattr(config, "optimizer_cpu_offload", False):
        raise ValueError(
            f"install: expected {name} beside its parameters, but got "
            "--optimizer-cpu-offload; leave the flag out (argument 'optimizer')"
        )


def _args(env: Environment) -> Any:
    """Return Megatron's arguments if there are any yet."""
    try:
        return env.args()
    except AssertionError:
        return None


def _sm3(env: Environment, options: Mapping[str, Any]) -> Factory:
    def make(groups: Any, config: Any) -> torch.optim.Optimizer:
        known = {"lr": config.lr, "weight_decay": config.weight_decay, **options}
        exact = known.pop("tp_exact", True)
        if not exact or env.state.get_tensor_model_parallel_world_size() == 1:
            return SM3(groups, **known)
        return TensorParallelSM3(groups, env.tensor_group, **known)

    return make


@contextmanager
def _replaced(found: Found, config: Any, make: Factory) -> Iterator[None]:
    """Let Megatron make another optimizer where it would make its own."""

    def made(groups: Any, *_: Any, **__: Any) -> torch.optim.Optimizer:
        return make(groups, config)

    module = found.module
    if not hasattr(module, "SGD"):
        with mock.patch.object(module, "Adam", made):
            yield
        return
    # Adam would come with Adam's state.
    with (
        mock.patch.object(module, "SGD", made),
        mock.patch.object(config, "optimizer", "sgd"),
    ):
        yield


def _let_init_state(part: Any) -> None:
    """Let a wrapper that makes the state before a checkpoint is loaded do so."""
    optimizer = getattr(part, "optimizer", None)
    if hasattr(part, "init_state_fn") and hasattr(optimizer, "init_state"):
        part.init_state_fn = lambda inner, *_: inner.init_state()
