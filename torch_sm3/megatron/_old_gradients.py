# SPDX-License-Identifier: Apache-2.0
"""Gradients of a step, before core 0.4: cleared, reduced over replicas, tied."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist

from torch_sm3.megatron._timing import timed
from torch_sm3.megatron.adasum import Adasum
from torch_sm3.megatron.env import Environment, unwrapped


def clear(args: Any, chunks: list[Any], optimizer: Any) -> None:
    """Clear all gradients, those in buffers and all others.

    Args:
        args: Megatron's arguments.
        chunks: of this rank.
        optimizer: Megatron's.
    """
    buffers = any(
        getattr(args, f"use_contiguous_buffers_in_{name}", False)
        for name in ("ddp", "local_ddp")
    )
    if args.DDP_impl == "local" and buffers:
        for chunk in chunks:
            chunk.zero_grad_buffer()
    optimizer.zero_grad()


def reduce(
    env: Environment, chunks: list[Any], optimizer: Any, adasum: Adasum | None
) -> None:
    """Reduce gradients over replicas and tied weights.

    Args:
        env: the Megatron.
        chunks: of this rank.
        optimizer: Megatron's, which does all of it from June 2022 on.
        adasum: takes the place of the mean over replicas, or None.
    """
    held = nullcontext() if adasum is None else adasum.held_back(chunks)
    with held:
        _reduce(env, chunks, optimizer)


def _reduce(env: Environment, chunks: list[Any], optimizer: Any) -> None:
    args, timers = env.args(), env.timers()
    if hasattr(optimizer, "reduce_model_grads"):
        with timed(timers, _before_levels("backward-reduce-model-grads", timers)):
            optimizer.reduce_model_grads(args, timers)
        return
    if args.DDP_impl == "local":
        with timed(timers, "backward-params-all-reduce"):
            for chunk in chunks:
                _reduce_chunk(args, chunk)
    with timed(timers, "backward-embedding-all-reduce"):
        if env.stages > 1:
            _word_embeddings(env, chunks)
            _position_embeddings(env, chunks)


def gather(env: Environment, optimizer: Any) -> None:
    """Bring the parameters of a sharded optimizer together, where there are such.

    Args:
        env: the Megatron.
        optimizer: Megatron's.
    """
    timers = env.timers()
    if hasattr(optimizer, "gather_model_params"):
        with timed(timers, _before_levels("backward-gather-model-params", timers)):
            optimizer.gather_model_params(env.args(), timers)


def _before_levels(name: str, timers: Any) -> str | None:
    """Name a timer that later generations, whose timers have levels, lack."""
    return None if hasattr(timers, "_log_level") else name


def _reduce_chunk(args: Any, chunk: Any) -> None:
    if hasattr(chunk, "allreduce_gradients"):
        chunk.allreduce_gradients()
    else:
        chunk.allreduce_params(reduce_after=False, fp32_allreduce=args.fp32_allreduce)


def _word_embeddings(env: Environment, chunks: list[Any]) -> None:
    """Sum the gradients of the word embedding over the stages that have it."""
    state = env.state
    first, last = env.rank == 0, env.rank == env.stages - 1
    member = getattr(state, "is_rank_in_embedding_group", None)
    if not (first or last if member is None else member(ignore_virtual=True)):
        return
    model = unwrapped(chunks[-1] if last and not first else chunks[0])
    if model.share_word_embeddings:
        gradient = _gradient(model.word_embeddings_weight())
        dist.all_reduce(gradient, group=state.get_embedding_group())


def _position_embeddings(env: Environment, chunks: list[Any]) -> None:
    """Sum those of the position embedding over encoder and decoder."""
    member = getattr(env.state, "is_rank_in_position_embedding_group", None)
    split = getattr(env.args(), "pipeline_model_parallel_split_rank", None)
    if member is None or split is None or not member():
        return
    embedding = unwrapped(chunks[0]).language_model.embedding
    dist.all_reduce(
        _gradient(embedding.position_embeddings.weight),
        group=env.state.get_position_embedding_group(),
    )


def _gradient(weight: torch.nn.Parameter) -> torch.Tensor:
    """Return where data parallelism keeps a gradient, or else ``.grad``."""
    main: torch.Tensor | None = getattr(weight, "main_grad", None)
    gradient = weight.grad if main is None else main
    assert gradient is not None, "the backward reaches shared embeddings"
    return gradient
