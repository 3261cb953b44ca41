# SPDX-License-Identifier: Apache-2.0
"""Orders of forwards and backwards, and messages between neighbours on Gloo."""

from __future__ import annotations

import contextlib

import torch
import torch.distributed as dist
from megatron_stubs import groups
from megatron_stubs.shared import get_args, get_num_microbatches

_FORWARD, _BACKWARD = 1, 2
_pending: list[tuple[torch.Tensor, dist.Work]] = []


def send(tensor, peer, forward):
    """Send without waiting; see :func:`finish`.

    Args:
        tensor: what is sent.
        peer: to whom.
        forward: whether it is an output, else a gradient.
    """
    copy = tensor.detach().contiguous().clone()
    tag = _FORWARD if forward else _BACKWARD
    _pending.append((copy, dist.isend(copy, peer, tag=tag)))


def receive(shape, dtype, peer, forward):
    """Wait for a tensor of a neighbour."""
    tensor = torch.empty(shape, dtype=dtype)
    dist.recv(tensor, peer, tag=_FORWARD if forward else _BACKWARD)
    return tensor.requires_grad_() if forward else tensor


def finish():
    """Wait until all that was sent is gone."""
    while _pending:
        _pending.pop()[1].wait()


def order(rank, stages, microbatches, chunks, interleaved, forward_only):
    """Return this rank's steps: forward or not, chunk, microbatch.

    Args:
        rank: of the stages.
        stages: their number.
        microbatches: their number.
        chunks: of each rank.
        interleaved: whether by groups of microbatches and chunks, else 1F1B.
        forward_only: whether there are no backwards.
    """
    total = microbatches * chunks
    warm = stages - rank - 1
    if interleaved:
        warm = 2 * warm + (chunks - 1) * stages
        # Megatron does all forwards first when there is one group only.
        warm = total if microbatches == stages else warm
    warm = total if forward_only else min(warm, total)
    forwards = [_place(k, stages, chunks, True) for k in range(total)]
    backwards = [_place(k, stages, chunks, False) for k in range(total)]
    if not interleaved:
        forwards = backwards = [(0, k) for k in range(total)]
    steps = [(True, *place) for place in forwards[:warm]]
    if forward_only:
        return steps
    for k in range(total):
        if warm + k < total:
            steps.append((True, *forwards[warm + k]))
        steps.append((False, *backwards[k]))
    return steps


def _place(k, stages, chunks, forward):
    """Return chunk and microbatch of a rank's step number k."""
    group, within = divmod(k, stages * chunks)
    chunk, inner = divmod(within, stages)
    return chunk if forward else chunks - 1 - chunk, group * stages + inner


def run(steps, forward, backward):
    """Do steps one after the other.

    Args:
        steps: of :func:`order`.
        forward: takes the chunk; receives, runs, sends, and returns what its backward
            needs, or None.
        backward: takes the chunk and that.
    """
    kept = {}
    for is_forward, chunk, microbatch in steps:
        if is_forward:
            kept[chunk, microbatch] = forward(chunk)
        else:
            backward(chunk, kept.pop((chunk, microbatch)))
        if kept.get((chunk, microbatch), 0) is None:
            del kept[chunk, microbatch]
    finish()


def pipelining(module, forward_step, backward_step, chunks, flags, timers, tensors):
    """Run this rank's part of a step, by the functions of a stand-in.

    Args:
        module: its messages, with the four functions that receive and send.
        forward_step: of a chunk and what was received; returns what is sent.
        backward_step: of what was received, sent, and the gradients received.
        chunks: their number.
        flags: whether to interleave, and to do forwards only.
        timers: Megatron's.
        tensors: keywords for each tensor received, and for each sent; None if there is
            one that is no list.
    """
    interleaved, forward_only = flags
    before, after = tensors or [[{"timers": timers}]] * 2

    def listed(value):
        return value if isinstance(value, list) else [value]

    def received(function, wanted):
        values = [function(**options) for options in wanted]
        return values[0] if tensors is None else values

    def forward(chunk):
        if interleaved:
            groups.set_virtual_pipeline_model_parallel_rank(chunk)
        value = received(module.recv_forward, before)
        output = forward_step(chunk, value)
        for tensor in listed(output):
            module.send_forward(tensor)
        return None if forward_only else (value, output)

    def backward(chunk, kept):
        if interleaved:
            groups.set_virtual_pipeline_model_parallel_rank(chunk)
        gradients = received(module.recv_backward, after)
        for tensor in listed(backward_step(*kept, gradients)):
            if tensor is not None:
                module.send_backward(tensor)

    rank = groups.get_pipeline_model_parallel_rank()
    stages = groups.get_pipeline_model_parallel_world_size()
    number = get_num_microbatches()
    steps = order(rank, stages, number, chunks, interleaved, forward_only)
    run(steps, forward, backward)


def exchange(forward, tensor=None, shape=None, dtype=None, timers=None):
    """Send a tensor, or receive one; do nothing at the ends of the pipeline.

    Args:
        forward: whether it is an output, else a gradient.
        tensor: what to send; None to receive.
        shape: of what comes; None for the usual one.
        dtype: of what comes; None for the usual one.
        timers: Megatron's, or None.
    """
    to_next = forward == (tensor is not None)
    at_end = (
        groups.is_pipeline_last_stage if to_next else groups.is_pipeline_first_stage
    )
    if at_end():
        return None
    which = "next" if to_next else "prev"
    peer = getattr(groups, f"get_pipeline_model_parallel_{which}_rank")()
    what = "send" if tensor is not None else "recv"
    name = f"{'forward' if forward else 'backward'}-{what}"
    if timers is not None:
        timers(name).start()
    result = None
    if tensor is not None:
        send(tensor, peer, forward)
    else:
        args = get_args()
        usual = (args.seq_length, args.micro_batch_size, args.hidden_size)
        result = receive(shape or usual, dtype or args.params_dtype, peer, forward)
    if timers is not None:
        timers(name).stop()
    return result


def backward_step(scale_loss, input_tensor, output_tensor, output_tensor_grad):
    """Run a backward; return gradients of the inputs, in a list if they are.

    Args:
        scale_loss: for a loss.
        input_tensor: what was received.
        output_tensor: what was sent, or the loss.
        output_tensor_grad: its gradient, or None for a loss.
    """
    inputs, outputs, gradients = (
        x if isinstance(x, list) else [x]
        for x in (input_tensor, output_tensor, output_tensor_grad)
    )
    for tensor in inputs:
        if tensor is not None:
            tensor.retain_grad()
    output = scale_loss(outputs[0]) if gradients[0] is None else outputs[0]
    torch.autograd.backward(output, grad_tensors=gradients[0])
    found = [None if tensor is None else tensor.grad for tensor in inputs]
    if len(gradients) > 1 and gradients[1] is not None:
        found[-1].add_(gradients[1])
    return found if isinstance(input_tensor, list) else found[0]


def scheduled(home, given, kind, turned=False, forward_more=(), backward_more=()):
    """Run a step by the functions of a stand-in; return what the last stage stored.

    Args:
        home: the module of its schedules.
        given: arguments of a forward-backward function.
        kind: "none", "1f1b" or "interleaved".
        turned: see :func:`shapes`.
        forward_more: arguments of its ``forward_step`` after the store.
        backward_more: arguments of its ``backward_step`` at the end.
    """
    model, data, store = given["model"], given["data_iterator"], []
    iterators = data if kind == "interleaved" else [data]

    def forward(chunk, received):
        what = iterators[chunk], model[chunk], received, store
        return home.forward_step(given["forward_step_func"], *what, *forward_more)

    def backward(*tensors):
        return home.backward_step(given["optimizer"], *tensors, *backward_more)

    forward_only = given["forward_only"]
    assert kind == "interleaved" or len(model) == 1
    if kind == "none":
        _alone(forward, backward, model[0], forward_only)
        return store
    tensors = None
    inner = model[0]
    while hasattr(inner, "module"):
        inner = inner.module
    # The generation before encoders and decoders has no lists.
    if kind == "1f1b" and hasattr(inner, "model_type"):
        both = inner.model_type.name == "encoder_and_decoder"
        tensors = _wanted(both, turned, given["timers"])
    flags = kind == "interleaved", forward_only
    module = home.p2p_communication
    timers = given["timers"]
    pipelining(module, forward, backward, len(model), flags, timers, tensors)
    return store


def _alone(forward_step, backward_step, model, forward_only):
    """Run all microbatches of a pipeline of one stage.

    Args:
        forward_step: of chunk and input; returns the loss.
        backward_step: of input, loss and gradient.
        model: whose data parallelism waits for the last microbatch.
        forward_only: whether there are no backwards.
    """
    number = get_num_microbatches()
    for microbatch in range(number):
        wait = hasattr(model, "no_sync") and microbatch < number - 1
        with model.no_sync() if wait else contextlib.nullcontext():
            output = forward_step(0, None)
            if not forward_only:
                backward_step(None, output, None)


def shapes(rank, both, turned):
    """Return the shapes of what a rank sends.

    Args:
        rank: the rank.
        both: whether there are an encoder and a decoder.
        turned: whether the decoder gets (batch, sequence, hidden) of the encoder.
    """
    args = get_args()
    batch, hidden = args.micro_batch_size, args.hidden_size
    usual = args.seq_length, batch, hidden
    memory = (batch, args.seq_length, hidden) if turned else usual
    if both and not groups.is_pipeline_stage_before_split(rank):
        return [(args.decoder_seq_length, batch, hidden), memory]
    inside = not both or groups.is_pipeline_stage_before_split(rank + 1)
    return [usual if inside else memory]


def _wanted(both, turned, timers):
    """Return what :func:`pipelining` asks its messages for, without interleaving.

    Args:
        both: whether there are an encoder and a decoder.
        turned: see :func:`shapes`.
        timers: Megatron's.
    """
    rank = groups.get_pipeline_model_parallel_rank()
    return [
        [{"tensor_shape": s, "timers": timers} for s in shapes(r, both, turned)]
        for r in (rank - 1, rank)
    ]
