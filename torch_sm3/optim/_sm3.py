# SPDX-License-Identifier: Apache-2.0
"""SM3, an adaptive optimizer whose state is rows + columns."""

from __future__ import annotations

from collections.abc import Callable
from typing import overload

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from torch_sm3.optim._batch import Options
from torch_sm3.optim._cover import Cover
from torch_sm3.optim._fused import Entry, fused_sm3, fused_sparse_sm3, lists
from torch_sm3.optim._gather import batch_of
from torch_sm3.optim._multi import multi_tensor_sm3 as _multi_tensor_sm3
from torch_sm3.optim._plan import Work
from torch_sm3.optim._scaling import nonfinite, step_options
from torch_sm3.optim._sharded import ShardedSM3
from torch_sm3.optim._single import single_tensor_sm3 as _single_tensor_sm3
from torch_sm3.optim._sparse import sparse_sm3 as _sparse_sm3
from torch_sm3.optim._state import steps_follow

__all__ = ["SM3"]


class SM3(ShardedSM3):
    r"""Implements SM3, Adagrad with one accumulator per row and per column.

    A matrix of :math:`m \times n` elements keeps :math:`m + n` numbers instead of
    :math:`mn`; a tensor of any rank keeps one vector per dimension. With gradient
    :math:`g`, accumulators :math:`\mu(r)` over the sets :math:`S_r` (rows, columns,
    ...), learning rate :math:`\eta`, momentum :math:`\beta_1` and weight decay
    :math:`\lambda`, a step of SM3-II is

    .. math::
        \begin{aligned}
        \nu(i) &= c_1 \min_{r \ni i} \mu(r) + c_2\, g(i)^2, \qquad
        \mu(r) \leftarrow \max_{i \in S_r} \nu(i) \\
        u(i) &= g(i) / \sqrt{\nu(i) + \epsilon}
            \qquad (u = 0 \text{ if } \nu + \epsilon = 0) \\
        m(i) &\leftarrow \beta_1 m(i) + (1 - \beta_1) u(i)
            \qquad (m = u \text{ if } \beta_1 = 0) \\
        w(i) &\leftarrow (1 - \eta \lambda)\, w(i) - \eta\, m(i)
        \end{aligned}

    with :math:`c_1 = c_2 = 1` (the sum), or :math:`c_1 = \beta_2` and
    :math:`c_2 = 1 - \beta_2`. SM3-I first updates
    :math:`\mu(r) \leftarrow c_1 \mu(r) + c_2 \max_{j \in S_r} g(j)^2`, then takes
    :math:`\nu(i) = \min_{r \ni i} \mu(r)`, which is never smaller. Scalars, vectors
    and 2 x 2 matrices use Adagrad itself.

    Results have the same bits for every implementation (fused, foreach, for-loop), any
    number of threads, instruction set, device and strides. A gradient element that is
    NaN or infinite never enters an accumulator; only its own weight shows it.
    Gradients may have another floating dtype than their parameter, and may be sparse
    COO tensors: a step then visits what they touch, without momentum.

    Args:
        params: parameters, named parameters or groups, on any device. Every option
            but ``skip_nonfinite`` may differ between groups.
        lr: learning rate, a number or a tensor with one element, which is only read.
        momentum: average of the preconditioned gradients, in [0, 1). Costs one
            buffer of the parameter's size; 0 keeps the state small.
        beta2: None or 1 sums squared gradients; less forgets them exponentially.
        eps: added under the root. None is the preset's: 1e-30 without ``compat``, at
            which a zero gradient is an exact no-op.
        weight_decay: decoupled decay, applied before the update as in AdamW.
        variant: "II", or "I" for the paper's first algorithm.
        compat: numeric conventions of another implementation: "google", "optax",
            "trax" or "enealor" (also pytorch_optimizer and gpt-neox).
        cover: "auto", "standard" (without the rule for 2 x 2), "diagonal" (Adagrad
            for every shape) or a :class:`Cover`.
        maximize: ascend instead of descend.
        momentum_dtype: of the buffer: None is the parameter's, or torch.float32,
            torch.bfloat16, torch.int8 (a scale for each 256 elements; small
            parameters keep float32).
        stochastic_rounding: round bfloat16 weights and int8 momentum to a neighbour
            at random, by a generator of its own; torch's stays as it is.
        kahan: keep what rounding of 16-bit weights loses in a tensor of their size.
        seed: of ``stochastic_rounding``.
        skip_nonfinite: change nothing in a step in which a gradient element is NaN or
            infinite; decided on the device, see :attr:`skipped_steps`.
        foreach: True for torch._foreach functions.
        fused: True for one operator per device and group, with an error where there is
            none. None takes it where there is one; False for the for-loop.
        capturable: keep step counts on the parameters' device, for CUDA graphs.
        differentiable: let autograd record the update; for-loop only.

    Raises:
        ValueError: for an option out of its range, a cover that does not fit, or a
            complex, integer, sparse or memory-overlapping parameter.
        TypeError: for a callable ``lr``, or a name that is no string.
        NotImplementedError: for float64 parameters with bfloat16 or int8 momentum.
        RuntimeError: for ``foreach``, ``fused`` and ``differentiable`` together.

    Example:
        >>> model = torch.nn.Linear(1000, 500)
        >>> optimizer = torch_sm3.SM3(model.parameters(), lr=0.1)
        >>> optimizer.state_bytes()  # (1000 + 500 + 500) floats and 2 step counts
        8016
        >>> model(torch.ones(1, 1000)).sum().backward()
        >>> optimizer.step()

    Source: Anil, Gupta, Koren, Singer, "Memory-Efficient Adaptive Optimization",
    arXiv 1901.11150, algorithms SM3-I and SM3-II.
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
        variant: str = "II",
        compat: str | None = None,
        cover: str | Cover = "auto",
        maximize: bool = False,
        momentum_dtype: torch.dtype | None = None,
        stochastic_rounding: bool = False,
        kahan: bool = False,
        seed: int = 0,
        skip_nonfinite: bool = False,
        foreach: bool | None = None,
        fused: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
    ) -> None:
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "beta2": beta2,
            "eps": eps,
            "weight_decay": weight_decay,
            "variant": variant,
            "compat": compat,
            "cover": cover,
            "maximize": maximize,
            "momentum_dtype": momentum_dtype,
            "stochastic_rounding": stochastic_rounding,
            "kahan": kahan,
            "seed": seed,
            "foreach": foreach,
            "fused": fused,
            "capturable": capturable,
            "differentiable": differentiable,
        }
        super().__init__(params, defaults, skip_nonfinite)

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Whether GradScaler hands over its scale instead of unscaling gradients."""
        return all(group["fused"] is True for group in self.param_groups)

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Do one step on all parameters that have a gradient.

        The first call creates the state of all parameters that require a gradient.

        Args:
            closure: computes the loss again, with gradients, and returns it.

        Returns:
            The closure's loss, or None.

        Raises:
            RuntimeError: for a sparse gradient with weight decay or
                ``differentiable``, a parameter that ``fused=True`` or ``capturable``
                cannot take, or a CUDA graph that lacks ``capturable`` or state.
            ValueError: for a gradient of another layout than strided or COO.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with torch.no_grad():
            self._do_step()
        return loss

    def _do_step(self) -> None:
        plan = self._current_plan()
        # Everything is checked before anything is written.
        self._run([work for lane in plan.lanes for work in self._gather(lane)])

    def _run(self, works: list[Work]) -> None:
        """Do all calls of a step, or none of them."""
        self._watch_stale(works)
        skip, found = self._decide(works)
        scale = getattr(self, "grad_scale", None)
        calls = [] if skip else [(w, self._options(w, scale, found)) for w in works]
        for work, options in self._before_update(calls):
            with torch.set_grad_enabled(work.group["differentiable"]):
                run(work, options)
        self._after_update()

    def _decide(self, works: list[Work]) -> tuple[bool, Tensor | None]:
        """Return whether the step is skipped, or a tensor that will tell the device."""
        found: Tensor | None = getattr(self, "found_inf", None)
        if self._skip_nonfinite:
            bad = nonfinite(works)
            if bad is not None:
                found = bad if found is None else bad + found.to(bad.device)
        found = self._agreed(found)
        if found is None:
            return False, None
        found = found.detach().reshape(())
        self._skips_on(found.device).add_(found != 0)
        on_device = found.device.type != "cpu" and all(
            steps_follow(work.group, self._skip_nonfinite) for work in works
        )
        return (False, found) if on_device else (bool(found), None)

    def _options(
        self, work: Work, scale: Tensor | None, found: Tensor | None
    ) -> Options:
        """Return the options of one call, on its device."""
        return step_options(work.group, work.device, scale, found)


def run(work: Work, options: Options) -> None:
    """Update the parameters of one call by its implementation."""
    if work.whole is None:
        shards = [e.owner for e in work.entries if e.owner is not e.param]
        # Their own counters do not see what is written to their parts.
        torch.autograd.graph.increment_version(shards)
    if work.sparse and work.path == "fused":
        fused_sparse_sm3(work.entries[0], work.grads[0], options)
    elif work.sparse:
        _run_sparse(work.entries[0], work.grads[0], options)
    elif work.path == "fused":
        arguments = work.whole or lists(work.entries, work.group)
        fused_sm3(arguments, work.grads, options)
    elif work.path == "foreach":
        _multi_tensor_sm3(batch_of(work), options)
    else:
        _single_tensor_sm3(batch_of(work), options)


def _run_sparse(entry: Entry, grad: Tensor, options: Options) -> None:
    _sparse_sm3(
        entry.param,
        grad,
        entry.accumulators,
        entry.compensation,
        entry.step,
        entry.cover,
        entry.place,
        options,
    )
