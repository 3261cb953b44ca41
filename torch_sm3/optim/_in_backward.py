# SPDX-License-Identifier: Apache-2.0
"""SM3 that steps each parameter as soon as its gradient is there, and frees it."""

from __future__ import annotations

import gc
import math
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grads_with_norm_
from torch.optim.optimizer import ParamsT

from torch_sm3.optim._gradient_norm import GradientNorm
from torch_sm3.optim._sm3 import SM3, run


class SM3InBackward(SM3):
    r"""SM3 whose step is part of backward, so that few gradients exist at a time.

    A hook steps each parameter when its gradient is complete and frees the gradient.
    Parameters and state have the bits of the ordinary loop.

    - One iteration is ``loss.backward()``, then :meth:`step`, which also steps what the
      hooks left: gradients from inside :meth:`no_step`, and SM3-I on sharded
      parameters.
    - To accumulate, run all backwards but the last inside ``with opt.no_step():``.
    - To clip by the global norm, pass ``max_norm`` and call :meth:`backward` in place
      of ``loss.backward()``: it runs forward and backward twice.

    With FSDP2 the hooks run after the reduce-scatter. Under DDP a gradient is not yet
    reduced in a hook: use SM3 there.

    Args:
        params: as of :class:`SM3`.
        args: options of :class:`SM3`.
        max_norm: clip all gradients together to this norm, as
            ``torch.nn.utils.clip_grad_norm_`` does. None does not clip.
        kwargs: options of :class:`SM3`, without ``differentiable``.

    Raises:
        ValueError: for a ``max_norm`` that is not positive and finite.
        RuntimeError: for ``skip_nonfinite`` without ``max_norm``, as a step that has
            begun cannot be undone, and for ``differentiable``. In backward: for a
            parameter of a DDP module, one whose gradient comes twice in an iteration
            outside :meth:`no_step`, a plain ``backward()`` with ``max_norm``, and a
            ``GradScaler`` that hands over its scale.

    Example:
        >>> model = torch.nn.Linear(8, 4)
        >>> optimizer = torch_sm3.SM3InBackward(model.parameters(), lr=0.1)
        >>> model(torch.ones(2, 8)).sum().backward()
        >>> model.weight.grad is None  # stepped and freed
        True
        >>> optimizer.step()  # ends the iteration
    """

    def __init__(
        self,
        params: ParamsT,
        *args: Any,
        max_norm: float | None = None,
        **kwargs: Any,
    ) -> None:
        if max_norm is not None and not (0 < max_norm < math.inf):
            raise ValueError(
                "SM3InBackward: expected None or a finite number > 0, but got "
                f"{max_norm} (argument 'max_norm')"
            )
        self._max_norm = max_norm
        self._start()
        super().__init__(params, *args, **kwargs)
        if self._skip_nonfinite and max_norm is None:
            raise RuntimeError(
                "SM3InBackward: expected skip_nonfinite=False, but got True (argument "
                "'skip_nonfinite'); it needs max_norm, whose first pass sees all "
                "gradients before any step, or SM3"
            )

    def _start(self) -> None:
        self._hooked: set[Tensor] = set()
        self._quiet = 0
        self._has_fired = False
        self._is_outside_ddp = False
        self._end()

    def _end(self) -> None:
        """Forget the iteration."""
        self._places: dict[Tensor, tuple[dict[str, Any], int]] | None = None
        self._done: set[Tensor] = set()
        # What a hook does with a gradient while backward() runs.
        self._measuring: GradientNorm | None = None
        self._total: Tensor | None = None
        self._keeping = False
        self._is_clipped = False

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_max_norm": self._max_norm}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore from a pickle or a loaded state dict, filling missing options."""
        is_new = "_hooked" not in self.__dict__
        if is_new:
            self._start()
        super().__setstate__(state)
        if is_new:
            self._hook_all()

    # --- hooks -----------------------------------------------------------------

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group, see :meth:`SM3.add_param_group`.

        Args:
            param_group: parameters under ``"params"`` and options that differ from
                the defaults.
        """
        super().add_param_group(param_group)
        self._hook_all()

    def _check_flags(self, group: Any) -> None:
        super()._check_flags(group)
        if group["differentiable"]:
            raise RuntimeError(
                "SM3InBackward: expected differentiable=False, but got True (argument "
                "'differentiable'); use SM3"
            )

    def _hook_all(self) -> None:
        me = weakref.ref(self)

        def after(param: Tensor) -> None:
            optimizer = me()
            if optimizer is not None:
                optimizer._after_accumulation(param)

        for _, param in self._params():
            if param.requires_grad and param not in self._hooked:
                param.register_post_accumulate_grad_hook(after)
                self._hooked.add(param)
                self._is_outside_ddp = False

    @torch.no_grad()
    def _after_accumulation(self, param: Tensor) -> None:
        self._has_fired = True
        if self._quiet or self._keeping or param.grad is None:
            return
        place = self._begin().get(param)
        if place is None:
            return
        measuring = self._measuring
        if self._max_norm is not None and measuring is None and self._total is None:
            raise RuntimeError(
                "SM3InBackward: expected opt.backward(closure) with max_norm, but got "
                "a plain backward(); clipping needs all gradients before the first step"
            )
        if param in self._done:
            raise RuntimeError(
                "SM3InBackward: expected one gradient of a parameter in an iteration, "
                "but got a second one after its step; call step() after each backward, "
                "run backwards that accumulate inside no_step(), or use SM3"
            )
        self._done.add(param)
        if measuring is not None:
            measuring.add(param)
        elif not self._step_one(param, *place):
            return
        param.grad = None

    def _step_one(self, param: Tensor, group: dict[str, Any], ordinal: int) -> bool:
        """Step a parameter unless it waits for :meth:`step`."""
        if self._total is not None and self._max_norm is not None:
            clip_grads_with_norm_([param], self._max_norm, self._total)
        if group["variant"] == "I" and self._is_sharded(param):
            # Its accumulators need all processes before the first weight moves, and
            # the order of hooks is no order for messages.
            return False
        assert param.grad is not None, "seen by the hook"
        works = self._works_of(param, group, ordinal, param.grad)
        self._watch_stale(works)
        for work in works:
            run(work, self._options(work, None, None))
        return True

    # --- one iteration ---------------------------------------------------------

    def _begin(self) -> dict[Tensor, tuple[dict[str, Any], int]]:
        """Prepare the first step of an iteration; later ones find it done."""
        if self._places is not None:
            return self._places
        for name in ("grad_scale", "found_inf"):
            if getattr(self, name, None) is not None:
                raise RuntimeError(
                    f"SM3InBackward: expected no {name}, but got one; use SM3 with "
                    "GradScaler, or bfloat16, which needs no loss scale"
                )
        if not self._is_outside_ddp and _wrapped_by_ddp(self._hooked):
            raise RuntimeError(
                "SM3InBackward: expected parameters outside of "
                "DistributedDataParallel, whose gradients are not reduced in a hook; "
                "use fully_shard, or SM3"
            )
        self._is_outside_ddp = True
        self._settle()
        self.init_state()
        found: dict[Tensor, tuple[dict[str, Any], int]] = {}
        ordinal = 0
        for group in self.param_groups:
            for i, param in enumerate(group["params"]):
                found[param] = group, ordinal + i
            ordinal += len(group["params"])
        self._places = found
        return found

    @contextmanager
    def no_step(self) -> Iterator[None]:
        """Only accumulate gradients inside; the next backward outside steps once.

        Example:
            >>> weight = torch.nn.Parameter(torch.zeros(3))
            >>> optimizer = torch_sm3.SM3InBackward([weight], lr=0.1)
            >>> with optimizer.no_step():
            ...     (weight * 2).sum().backward()
            >>> weight.grad
            tensor([2., 2., 2.])
            >>> (weight * 3).sum().backward()  # steps on 5
            >>> optimizer.step()
        """
        self._quiet += 1
        try:
            yield
        finally:
            self._quiet -= 1

    def backward(self, closure: Callable[[], Tensor]) -> Tensor:
        """Run forward and backward, twice with ``max_norm``, and step in the last.

        Both passes start with the same state of torch's random generators. What else a
        forward changes, as the running means of batch normalization, it changes twice.
        If gradients were accumulated inside :meth:`no_step`, one pass adds to them and
        the step waits for :meth:`step`.

        Args:
            closure: computes the loss and returns it; it may call ``backward()`` on it.

        Returns:
            The loss.

        Example:
            >>> model = torch.nn.Linear(8, 4)
            >>> x = torch.ones(2, 8)
            >>> optimizer = torch_sm3.SM3InBackward(model.parameters(), max_norm=1.0)
            >>> loss = optimizer.backward(lambda: model(x).square().mean())
            >>> optimizer.step()
        """
        params = [param for _, param in self._params()]
        if self._max_norm is None or self._quiet:
            return self._pass(closure)
        if any(param.grad is not None for param in params):
            self._keeping = True
            try:
                return self._pass(closure)
            finally:
                self._keeping = False
        with torch.no_grad():
            self._begin()
        loss, norm = self._measure(closure, params)
        if self._skip_nonfinite and self._is_skipped(norm):
            return loss
        with torch.no_grad():
            self._total = norm.total(params)
        try:
            return self._pass(closure)
        finally:
            self._total, self._is_clipped = None, True

    def _pass(self, closure: Callable[[], Tensor]) -> Tensor:
        """Run forward and backward."""
        self._has_fired = False
        with torch.enable_grad():
            loss = closure()
            if not self._has_fired:
                loss.backward()
        return loss

    def _measure(
        self, closure: Callable[[], Tensor], params: list[Tensor]
    ) -> tuple[Tensor, GradientNorm]:
        """Run the first pass, after which random generators are as before."""
        devices = {param.device for param in params if param.device.type != "cpu"}
        kind = next((device.type for device in devices), "cuda")
        self._measuring = norm = GradientNorm(self._skip_nonfinite)
        try:
            with torch.random.fork_rng(list(devices), device_type=kind):
                return self._pass(closure), norm
        finally:
            self._measuring = None
            self._done.clear()

    @torch.no_grad()
    def _is_skipped(self, norm: GradientNorm) -> bool:
        found = self._agreed(norm.found)
        if found is None:
            return False
        self._skips_on(found.device).add_(found != 0)
        return bool(found)

    def _do_step(self) -> None:
        self._begin()
        left = [param for _, param in self._params() if param.grad is not None]
        if left and self._max_norm is not None and not self._is_clipped:
            torch.nn.utils.clip_grad_norm_(left, self._max_norm)
        super()._do_step()
        for param in left:
            param.grad = None
        self._end()
        # Of parameters that were frozen before.
        self._hook_all()


def _wrapped_by_ddp(params: set[Tensor]) -> bool:
    """Tell whether a DistributedDataParallel holds any of the parameters."""
    if not (dist.is_available() and dist.is_initialized()):
        return False
    # A parameter does not tell who reduces its gradient.
    return any(
        not params.isdisjoint(found.parameters())
        for found in gc.get_objects()
        if issubclass(type(found), DistributedDataParallel)
    )
