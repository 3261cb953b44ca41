# SPDX-License-Identifier: Apache-2.0
"""One problem of SM3, run by any implementation or by the oracle.

What is compared is the bits of parameters and state after every step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from reference.sm3_oracle import Cover, Options, Place, RoundedSM3, default_cover

from torch_sm3.optim import _batch
from torch_sm3.optim._multi import multi_tensor_sm3
from torch_sm3.optim._single import single_tensor_sm3
from torch_sm3.optim._sparse import sparse_sm3

#: Everything that must agree with the oracle.
IMPLEMENTATIONS = ["single", "multi", "fused"]

State = dict[str, torch.Tensor]


@dataclass
class Param:
    """One parameter and its gradients, one per step; None does no step."""

    weight: torch.Tensor
    grads: list[torch.Tensor | None]
    cover: Cover | None = None
    place: Place | None = None
    start: list[torch.Tensor] = field(default_factory=list)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Compare bits: signs of zeros count, payloads of NaN do not."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    words = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    a, b = a.detach().contiguous(), b.detach().contiguous()
    nan = a.isnan() & b.isnan()
    word = words[a.element_size()]
    return bool(((a.view(word) == b.view(word)) | nan).all())


def assert_same(ours: Sequence[State], expected: Sequence[State], where: str) -> None:
    """Fail with the first state tensor that differs in a bit."""
    for i, (one, other) in enumerate(zip(ours, expected, strict=True)):
        assert one.keys() == other.keys(), where
        for key, value in one.items():
            assert same_bits(value, other[key]), (
                f"{where}: {key} of parameter {i} is\n{value}\nnot\n{other[key]}"
            )


def run(
    implementation: str, params: Sequence[Param], options: Options, **extra: object
) -> list[list[State]]:
    """Run all steps and return the states of all parameters after each.

    Args:
        implementation: "single", "multi", "fused" or "oracle".
        params: parameters with as many gradients each as there are steps.
        options: of the run.
        extra: further fields of the product's options; not for the oracle.
    """
    if implementation == "oracle":
        return _run_oracle(params, options)
    return Run(implementation, params, options, **extra).all()


def _run_oracle(params: Sequence[Param], options: Options) -> list[list[State]]:
    oracles = [_oracle(i, param, options) for i, param in enumerate(params)]
    states = []
    for step in range(len(params[0].grads)):
        for oracle, param in zip(oracles, params, strict=True):
            grad = param.grads[step]
            if grad is not None:
                (oracle.step_sparse if grad.is_sparse else oracle.step)(grad)
        states.append([_oracle_state(oracle) for oracle in oracles])
    return states


def _oracle(i: int, param: Param, options: Options) -> RoundedSM3:
    place = param.place or Place.whole(param.weight.shape, i)
    oracle = RoundedSM3(param.weight, options, param.cover, place)
    oracle.load(param.start)
    return oracle


def _oracle_state(oracle: RoundedSM3) -> State:
    state = {"param": oracle.w, "step": torch.tensor(oracle.count)}
    state |= {f"accumulator_{k}": mu for k, mu in enumerate(oracle.mu)}
    if oracle.o.momentum:
        state["momentum_buffer"] = oracle.m
        if oracle.m_dtype == torch.int8:
            state["momentum_scale"] = oracle.scale
    if _has_compensation(oracle.dtype, oracle.o):
        state["compensation"] = oracle.compensation
    return state


def _has_compensation(dtype: torch.dtype, options: Options) -> bool:
    return options.kahan and dtype in (torch.bfloat16, torch.float16)


class Run:
    """A run of the product on explicit lists."""

    def __init__(
        self,
        implementation: str,
        params: Sequence[Param],
        options: Options,
        **extra: object,
    ) -> None:
        self.implementation, self.given, self.options = implementation, params, options
        self.product = _product_options(options, **extra)
        self.batch = _batch.Batch()
        for i, param in enumerate(params):
            self._add(i, param)

    def _add(self, i: int, param: Param) -> None:
        batch, options = self.batch, self.options
        weight = _copy(param.weight)
        cover = param.cover or default_cover(weight.shape, options.compat)
        resolved = _batch.ResolvedCover(*cover)
        computing = torch.float64 if weight.dtype == torch.float64 else torch.float32
        place = param.place or Place.whole(weight.shape, i)
        batch.params.append(weight)
        batch.covers.append(resolved)
        batch.places.append(_batch.Place(place.ordinal, place.start, place.strides))
        batch.accumulators.append(
            [torch.zeros(shape, dtype=computing) for shape in resolved.shapes]
        )
        for ours, start in zip(batch.accumulators[-1], param.start, strict=False):
            ours.copy_(start)
        batch.steps.append(torch.zeros((), dtype=torch.int64))
        buffer = scale = None
        if options.momentum:
            dtype = getattr(torch, options.momentum_dtype or "", weight.dtype)
            dtype = dtype if isinstance(dtype, torch.dtype) else weight.dtype
            buffer = torch.zeros_like(weight, dtype=dtype)
            if dtype == torch.int8:
                shape = tuple(weight.shape) or (1,)
                scale = torch.zeros(*shape[:-1], -(-shape[-1] // 256))
        batch.momentum_buffers.append(buffer)
        batch.momentum_scales.append(scale)
        kahan = _has_compensation(weight.dtype, options)
        batch.compensations.append(torch.zeros_like(weight) if kahan else None)

    def all(self) -> list[list[State]]:
        """Do all steps and return the states after each."""
        states = []
        for step in range(len(self.given[0].grads)):
            self.step([param.grads[step] for param in self.given])
            states.append(self.states())
        return states

    def step(self, grads: Sequence[torch.Tensor | None]) -> None:
        """Do one step; sparse gradients take their own way."""
        dense = [i for i, g in enumerate(grads) if g is not None and not g.is_sparse]
        if dense:
            some = _batch.Batch(
                grads=[grads[i] for i in dense],
                **{
                    name: [getattr(self.batch, name)[i] for i in dense]
                    for name in _batch.Batch.__dataclass_fields__
                    if name != "grads"
                },
            )
            _DENSE[self.implementation](some, self.product)
        for i, grad in enumerate(grads):
            if grad is not None and grad.is_sparse:
                self._step_sparse(i, grad.coalesce())

    def _step_sparse(self, i: int, grad: torch.Tensor) -> None:
        b = self.batch
        if self.implementation == "fused":
            _fused_sparse(b, i, grad, self.product)
            return
        sparse_sm3(
            b.params[i],
            grad,
            b.accumulators[i],
            b.compensations[i],
            b.steps[i],
            b.covers[i],
            b.places[i],
            self.product,
        )

    def states(self) -> list[State]:
        """Return copies of parameters and state."""
        b, states = self.batch, []
        for i, param in enumerate(b.params):
            state: dict[str, torch.Tensor | None] = {"param": param, "step": b.steps[i]}
            state |= {f"accumulator_{k}": a for k, a in enumerate(b.accumulators[i])}
            state["momentum_buffer"] = b.momentum_buffers[i]
            state["momentum_scale"] = b.momentum_scales[i]
            state["compensation"] = b.compensations[i]
            states.append(
                {k: t.detach().clone() for k, t in state.items() if t is not None}
            )
        return states


def _copy(weight: torch.Tensor) -> torch.Tensor:
    """Copy with all strides kept, gaps included."""
    size = 1 + sum(
        (n - 1) * s for n, s in zip(weight.shape, weight.stride(), strict=True)
    )
    base = torch.zeros(max(size, 0) if weight.numel() else 0, dtype=weight.dtype)
    copy = base.as_strided(weight.shape, weight.stride())
    return copy.copy_(weight)


def _product_options(options: Options, **extra: object) -> _batch.Options:
    scale, double = options.grad_scale, torch.float64
    given: dict[str, object] = {
        "lr": options.lr,
        "momentum": options.momentum,
        "beta2": options.beta2,
        "eps": options.eps,
        "weight_decay": options.weight_decay,
        "variant": options.variant,
        "compat": options.compat,
        "maximize": options.maximize,
        "stochastic_rounding": options.stochastic_rounding,
        "seed": options.seed,
        "grad_scale": None if scale is None else torch.tensor(scale, dtype=double),
    }
    return _batch.Options(**{**given, **extra})


def _encoded(batch: _batch.Batch) -> tuple[list[int], list[int]]:
    """Return covers and places as the operators take them."""
    covers, places = [], []
    for cover, place in zip(batch.covers, batch.places, strict=True):
        masks = [sum(1 << a for a in group) for group in cover.axes]
        covers += [len(cover.view), *cover.view, len(masks), *masks]
        places += [place.ordinal, place.start, *place.strides]
    return covers, places


def _keywords(batch: _batch.Batch, o: _batch.Options) -> dict[str, object]:
    covers, places = _encoded(batch)
    return {
        "lr": o.lr,
        "momentum": o.momentum,
        "beta2": 1.0 if o.beta2 is None else o.beta2,
        "eps": o.eps,
        "weight_decay": o.weight_decay,
        "maximize": o.maximize,
        "variant": o.variant,
        "compat": o.compat or "",
        "covers": covers,
        "global_index": places,
        "stochastic_rounding": o.stochastic_rounding,
        "seed": o.seed,
        "grad_scale": o.grad_scale,
        "found_inf": o.found_inf,
    }


def _some(
    tensors: Sequence[torch.Tensor | None], like: torch.dtype
) -> list[torch.Tensor]:
    """Return an empty list if nothing is there, else empty tensors in the gaps."""
    if all(t is None for t in tensors):
        return []
    return [torch.empty(0, dtype=like) if t is None else t for t in tensors]


def _fused(batch: _batch.Batch, options: _batch.Options) -> None:
    torch.ops.torch_sm3.sm3_update_(
        batch.params,
        batch.grads,
        [one for several in batch.accumulators for one in several],
        [buffer for buffer in batch.momentum_buffers if buffer is not None],
        _some(batch.momentum_scales, torch.float32),
        _some(batch.compensations, torch.bfloat16),
        batch.steps,
        **_keywords(batch, options),
    )


def _fused_sparse(
    batch: _batch.Batch, i: int, grad: torch.Tensor, options: _batch.Options
) -> None:
    one = _batch.Batch(covers=[batch.covers[i]], places=[batch.places[i]])
    torch.ops.torch_sm3.sm3_sparse_update_(
        batch.params[i],
        grad.indices(),
        grad.values(),
        batch.accumulators[i],
        _some([batch.compensations[i]], torch.bfloat16),
        batch.steps[i],
        **_keywords(one, options),
    )


_DENSE: dict[str, Callable[[_batch.Batch, _batch.Options], None]] = {
    "single": single_tensor_sm3,
    "multi": multi_tensor_sm3,
    "fused": _fused,
}
