# SPDX-License-Identifier: Apache-2.0
"""One call of a forward-backward function, whatever the generation's arguments."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

from torch_sm3.megatron._timing import timed
from torch_sm3.megatron._user import user_step
from torch_sm3.megatron.env import Environment, call_with, chunks_of


class Call(NamedTuple):
    """What a forward-backward function is asked to do.

    Attributes:
        user_step: the function of the data iterator and the model.
        iterators: of each chunk.
        chunks: parts of the model on this rank.
        microbatches: their number.
        forward_only: whether there are no backwards.
        collect: whether to collect other data than losses.
        scale: multiplies the loss, or None.
        config: of the model, from core 0.4 on.
        per_token: whether the loss stays a sum until all tokens are counted.
        given: all arguments by name.
    """

    user_step: Callable[..., Any]
    iterators: list[Any]
    chunks: list[torch.nn.Module]
    microbatches: int
    forward_only: bool
    collect: bool
    scale: Callable[[torch.Tensor], torch.Tensor] | None
    config: Any
    per_token: bool
    given: Mapping[str, Any]


def read_call(env: Environment, given: Mapping[str, Any]) -> Call:
    """Read the arguments of a forward-backward function.

    Args:
        env: the Megatron.
        given: arguments by name.
    """
    chunks = chunks_of(given["model"])
    data = given["data_iterator"]
    # The only batch of a fine-tuning step may be a list, too.
    many = isinstance(data, (list, tuple)) and (
        len(chunks) > 1 or (len(data) == 1 and hasattr(data[0], "__next__"))
    )
    iterators = list(data) if many else [data] * len(chunks)
    if len(iterators) != len(chunks):
        raise ValueError(
            f"forward_backward: expected an iterator for each of {len(chunks)} chunks, "
            f"or one for all, but got {len(iterators)} (argument 'data_iterator')"
        )
    config = None
    if "optimizer" in given:
        optimizer = given["optimizer"]
        scale = None if optimizer is None else optimizer.scale_loss
    elif "grad_scaler" in given:
        scale = given["grad_scaler"]
    else:
        config = config_of(chunks[0])
        scale = config.grad_scale_func
    per_token = bool(getattr(config, "calculate_per_token_loss", False))
    return Call(
        user_step(given["forward_step_func"], chunks, config, per_token),
        iterators,
        chunks,
        int(
            given["num_microbatches"]
            if "num_microbatches" in given
            else env.microbatches()
        ),
        bool(given.get("forward_only", False)),
        bool(given.get("collect_non_loss_data", False)),
        scale,
        config,
        per_token,
        given,
    )


def config_of(chunk: torch.nn.Module) -> Any:
    """Return the configuration of a model, of whichever wrapper has one."""
    module: Any = chunk
    while not hasattr(module, "config"):
        module = module.module
    return module.config


def forward(
    env: Environment,
    call: Call,
    store: list[Any],
    chunk: int,
    microbatch: int,
    value: Any,
    last: bool,
    checkpoint: bool | None,
) -> tuple[Any, Any]:
    """Run Megatron's own forward step.

    Args:
        env: the Megatron.
        call: what is asked.
        store: where the last stage keeps what the loss function returns.
        chunk: the chunk.
        microbatch: the microbatch.
        value: of the stage before, None on the first.
        last: whether this is the last stage.
        checkpoint: whether to recompute activations, None if Megatron does not ask.

    Returns:
        The output, on the last stage the loss over the number of microbatches, and
        the number of tokens or None.
    """
    model, iterator = call.chunks[chunk], call.iterators[chunk]
    found = env.package.functions.get("forward_step")
    if found is None:
        timers = None if call.forward_only else env.timers()
        with timed(timers, "forward-compute"):
            made = _first_generation(call, store, model, iterator, value, last)
        return made, None
    result = call_with(
        found.function,
        call.user_step,
        iterator,
        model,
        num_microbatches=call.microbatches,
        input_tensor=value,
        forward_data_store=store,
        losses_reduced=store,
        timers=call.given.get("timers"),
        config=call.config,
        collect_non_loss_data=call.collect,
        autocast_dtype=call.given.get("dtype") or torch.float,
        enable_autocast=call.given.get("enable_autocast", False),
        current_microbatch=microbatch,
        checkpoint_activations_microbatch=checkpoint,
        is_first_microbatch=_is_first(call, microbatch),
        encoder_decoder_xattn=getattr(call.config, "encoder_decoder_xattn", False),
        vp_stage=chunk if len(call.chunks) > 1 else None,
        is_last_stage=last,
        cp_group_size=env.context_size(call.given),
    )
    return result if isinstance(result, tuple) else (result, None)


def _is_first(call: Call, microbatch: int) -> bool:
    """Whether weights that are kept in another precision are to be converted anew."""
    first_step = call.given.get("first_val_step")
    if call.forward_only and first_step is not None and not first_step:
        return False
    return microbatch == 0


def _first_generation(
    call: Call, store: list[Any], model: Any, iterator: Any, value: Any, last: bool
) -> Any:
    """Call the user step of v2.0, which takes the value and returns loss and dict."""
    output = call.user_step(iterator, model, value)
    if not last:
        return output
    loss, reduced = output
    store.append(reduced)
    return loss / call.microbatches
