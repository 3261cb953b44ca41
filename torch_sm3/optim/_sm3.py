# SPDX-License-Identifier: Apache-2.0
"""SM3, an adaptive optimizer whose state is rows + columns."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, overload

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer, ParamsT

from torch_sm3 import _ops
from torch_sm3.optim._checks import check_options, check_param

__all__ = ["SM3", "sm3"]

_DEFAULTS: dict[str, Any] = {
    "lr": 0.1,
    "momentum": 0.0,
    "beta2": None,
    "eps": None,
    "weight_decay": 0.0,
    "maximize": False,
}


class SM3(Optimizer):
    r"""Implements SM3-II, Adagrad with one accumulator per row and per column.

    A matrix of :math:`m \times n` elements keeps :math:`m + n` numbers instead of
    :math:`mn`; a tensor of any rank keeps one vector per dimension. With gradient
    :math:`g`, accumulators :math:`\mu(r)` over the sets :math:`S_r` (rows, columns,
    ...), learning rate :math:`\eta`, momentum :math:`\beta_1` and weight decay
    :math:`\lambda`, a step is

    .. math::
        \begin{aligned}
        \nu(i) &= c_1 \min_{r \ni i} \mu(r) + c_2\, g(i)^2, \qquad
        \mu(r) \leftarrow \max_{i \in S_r} \nu(i) \\
        u(i) &= g(i) / \sqrt{\nu(i) + \epsilon} \\
        m(i) &\leftarrow \beta_1 m(i) + (1 - \beta_1) u(i)
            \qquad (m = u \text{ if } \beta_1 = 0) \\
        w(i) &\leftarrow (1 - \eta \lambda)\, w(i) - \eta\, m(i)
        \end{aligned}

    with :math:`c_1 = c_2 = 1` (the sum), or :math:`c_1 = \beta_2` and
    :math:`c_2 = 1 - \beta_2`. Scalars, vectors and 2 x 2 matrices use Adagrad
    itself. A gradient element that is NaN or infinite never enters an accumulator;
    only its own weight shows it.

    Results have the same bits for any number of threads, instruction set and
    strides. Gradients may have another floating dtype than their parameter.

    Args:
        params: parameters or parameter groups, on CPU or CUDA.
        lr: learning rate, a number or a tensor with one element.
        momentum: average of the preconditioned gradients, in [0, 1). Costs one
            buffer of the parameter's size; 0 keeps the state small.
        beta2: None or 1 sums squared gradients; less forgets them exponentially.
        eps: added under the root. None is 1e-30, at which a zero gradient is an
            exact no-op.
        weight_decay: decoupled decay, applied before the update as in AdamW.
        maximize: ascend instead of descend.

    Raises:
        ValueError: for a hyper-parameter out of its range, or a complex, integer,
            sparse or memory-overlapping parameter.
        TypeError: for a callable ``lr``.
        RuntimeError: at :meth:`step`, for a sparse gradient.

    Example:
        >>> model = torch.nn.Linear(1000, 500)
        >>> optimizer = torch_sm3.SM3(model.parameters(), lr=0.1)
        >>> optimizer.state_bytes()  # (1000 + 500 + 500) floats and 2 step counts
        8016
        >>> model(torch.ones(1, 1000)).sum().backward()
        >>> optimizer.step()

    Source: Anil, Gupta, Koren, Singer, "Memory-Efficient Adaptive Optimization",
    arXiv 1901.11150, algorithm SM3-II.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 0.1,
        momentum: float = 0.0,
        beta2: float | None = None,
        eps: float | None = None,
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
    ) -> None:
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "beta2": beta2,
            "eps": eps,
            "weight_decay": weight_decay,
            "maximize": maximize,
        }
        check_options(defaults)
        self._loaded: dict[str, Any] | None = None
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group; a rejected one leaves the optimizer unchanged.

        Args:
            param_group: parameters under ``"params"`` and options that differ from
                the defaults.
        """
        check_options({**self.defaults, **param_group})
        super().add_param_group(param_group)
        try:
            for param in self.param_groups[-1]["params"]:
                check_param(param)
        except ValueError:
            del self.param_groups[-1]
            raise

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore from a pickle or a loaded state dict, filling missing options."""
        super().__setstate__(state)
        for group in self.param_groups:
            for key, value in _DEFAULTS.items():
                group.setdefault(key, value)
        self.__dict__.setdefault("_loaded", None)
        if self._loaded is not None:
            self._fill_state(self._loaded)

    def init_state(self) -> None:
        """Create the state of every parameter that requires a gradient."""
        for group in self.param_groups:
            for param in group["params"]:
                if param.requires_grad or param.grad is not None:
                    self._init_param(param, group)

    def _init_param(self, param: Tensor, group: dict[str, Any]) -> dict[str, Any]:
        state: dict[str, Any] = self.state[param]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.int64)
            accumulators = _ops.sm3_accumulators(param.detach())
            for i, accumulator in enumerate(accumulators):
                state[f"accumulator_{i}"] = accumulator
        if group["momentum"] > 0 and "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(
                param, memory_format=torch.preserve_format
            )
        return state

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Do one step on all parameters that have a gradient.

        Args:
            closure: computes the loss again, with gradients, and returns it.

        Returns:
            The closure's loss, or None.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.init_state()
        for group in self.param_groups:
            # A parameter listed twice is updated once.
            params = {id(p): p for p in group["params"] if p.grad is not None}
            for device in {p.device for p in params.values()}:
                self._step_params(
                    [p for p in params.values() if p.device == device], group
                )
        return loss

    def _step_params(self, params: list[Tensor], group: dict[str, Any]) -> None:
        states = [self._init_param(param, group) for param in params]
        grads = [param.grad for param in params if param.grad is not None]
        momenta = [s["momentum_buffer"] for s in states if group["momentum"] > 0]
        sm3(
            params,
            grads,
            [_accumulators(state) for state in states],
            momenta,
            [state["step"] for state in states],
            **{key: group[key] for key in _DEFAULTS},
        )

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what :meth:`state_dict` returned; no state tensor changes its dtype.

        Args:
            state_dict: is not modified.

        Raises:
            ValueError: if groups or shapes do not fit the parameters.
        """

        # The base class casts state to the parameter's dtype, which would ruin the
        # float32 accumulators of 16-bit parameters. This hook runs after the user's
        # and takes the state away; __setstate__ puts it in place, before post-hooks.
        def take(_: Optimizer, full: dict[str, Any]) -> dict[str, Any]:
            self._loaded = full
            return {**full, "state": {}}

        handle = self.register_load_state_dict_pre_hook(take)
        try:
            super().load_state_dict(state_dict)
        finally:
            handle.remove()
            self._loaded = None

    def _fill_state(self, full: dict[str, Any]) -> None:
        saved = [key for group in full["param_groups"] for key in group["params"]]
        params = [param for group in self.param_groups for param in group["params"]]
        by_key = dict(zip(saved, params, strict=True))
        # Everything is checked before anything is kept.
        filled = {
            by_key[key]: _load_param(by_key[key], state, key)
            for key, state in full["state"].items()
            if key in by_key
        }
        self.state.update(filled)

    def state_bytes(self, detail: bool = False) -> int | dict[str, int]:
        """Count the bytes of the optimizer's state on this process.

        Before the first step this is what the state will take.

        Args:
            detail: return a dict by kind: accumulator, momentum, step.

        Returns:
            Bytes, or bytes by kind.

        Example:
            >>> weight = torch.nn.Parameter(torch.zeros(512, 512, 3, 3))
            >>> torch_sm3.SM3([weight]).state_bytes(detail=True)["accumulator"]
            4120
        """
        sizes = {"accumulator": 0, "momentum": 0, "step": 0}
        for group in self.param_groups:
            for param in {id(p): p for p in group["params"]}.values():
                state = self.state.get(param)
                if not state:
                    if not param.requires_grad:
                        continue
                    state = _predict_state(param, group)
                for key, value in state.items():
                    sizes[key.split("_")[0]] += value.numel() * value.element_size()
        return sizes if detail else sum(sizes.values())


def _predict_state(param: Tensor, group: dict[str, Any]) -> dict[str, Tensor]:
    """Return the state of a parameter on the meta device, where nothing is stored."""
    like = torch.empty_like(param, device="meta")
    state = {f"accumulator_{i}": a for i, a in enumerate(_ops.sm3_accumulators(like))}
    state["step"] = torch.empty((), dtype=torch.int64, device="meta")
    if group["momentum"] > 0:
        state["momentum_buffer"] = like
    return state


def _accumulators(state: dict[str, Any]) -> list[Tensor]:
    count = sum(key.startswith("accumulator_") for key in state)
    return [state[f"accumulator_{i}"] for i in range(count)]


def _load_param(param: Tensor, state: dict[str, Any], key: object) -> dict[str, Any]:
    """Copy one parameter's saved state to its device, with all dtypes kept."""
    loaded: dict[str, Any] = {}
    expected = _ops.sm3_accumulators(torch.empty_like(param, device="meta"))
    shapes = [tuple(accumulator.shape) for accumulator in expected]
    found = [tuple(accumulator.shape) for accumulator in _accumulators(state)]
    if shapes != found:
        raise ValueError(
            f"SM3.load_state_dict: expected accumulators of shapes {shapes} for "
            f"parameter {key} of shape {tuple(param.shape)}, but got {found} "
            "(argument 'state_dict')"
        )
    for name, value in state.items():
        if name == "step":
            loaded[name] = torch.as_tensor(value).to("cpu", torch.int64, copy=True)
        elif isinstance(value, Tensor):
            loaded[name] = value.to(param.device, copy=True)
        else:
            loaded[name] = value
    return loaded


def sm3(
    params: list[Tensor],
    grads: list[Tensor],
    accumulators: Iterable[list[Tensor]],
    momentum_buffers: list[Tensor],
    steps: list[Tensor],
    *,
    lr: float | Tensor,
    momentum: float = 0.0,
    beta2: float | None = None,
    eps: float | None = None,
    weight_decay: float = 0.0,
    maximize: bool = False,
) -> None:
    r"""Do one step of SM3 on explicit lists; the functional form of :class:`SM3`.

    Args:
        params: parameters on one device, updated in place.
        grads: their gradients, dense, never written.
        accumulators: for each parameter the list that
            ``torch.ops.torch_sm3.sm3_accumulators`` makes, updated in place.
        momentum_buffers: one per parameter, or empty without momentum.
        steps: one int64 CPU scalar per parameter, counted up.
        lr: learning rate.
        momentum: see :class:`SM3`, as all that follow.
        beta2: see :class:`SM3`.
        eps: see :class:`SM3`.
        weight_decay: see :class:`SM3`.
        maximize: see :class:`SM3`.

    Raises:
        ValueError: if counts, shapes, dtypes or devices do not fit.
        RuntimeError: for a sparse gradient.

    Example:
        >>> weight, grad = torch.zeros(2, 3), torch.ones(2, 3)
        >>> state = torch.ops.torch_sm3.sm3_accumulators(weight)
        >>> step = torch.zeros((), dtype=torch.int64)
        >>> torch_sm3.sm3([weight], [grad], [state], [], [step], lr=0.1)
        >>> weight[0], step
        (tensor([-0.1000, -0.1000, -0.1000]), tensor(1))
    """
    if any(grad.layout != torch.strided for grad in grads):
        raise RuntimeError("SM3 does not support sparse gradients")
    _ops.sm3_update_(
        params,
        grads,
        [tensor for one in accumulators for tensor in one],
        momentum_buffers,
        [],
        [],
        steps,
        lr=float(lr),
        momentum=momentum,
        beta2=1.0 if beta2 is None else beta2,
        eps=eps,
        weight_decay=weight_decay,
        maximize=maximize,
    )
