# SPDX-License-Identifier: Apache-2.0
"""Groups and state of SM3: checked options, creation, hints and sizes."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy
from torch.optim.optimizer import Optimizer, ParamsT

from torch_sm3.optim import _state
from torch_sm3.optim._batch import ResolvedCover
from torch_sm3.optim._hints import ShapeHint, check_hint, is_flattened
from torch_sm3.optim._options import check_group, check_param, expect, make_plain
from torch_sm3.optim._plan import Plan, unique
from torch_sm3.optim._resolve import resolve

#: What :meth:`SM3.state_bytes` counts apart.
KINDS = ("accumulator", "momentum", "scale", "compensation", "step")


class SM3Base(Optimizer):
    """The part of SM3 that outlives a step; :class:`SM3` adds the step.

    Methods with one underscore are what a subclass for sharded parameters overrides.

    Args:
        params: parameters or groups.
        defaults: options of groups that do not set them.
        skip_nonfinite: skip a step in which any gradient element is not finite.
    """

    def __init__(
        self, params: ParamsT, defaults: dict[str, Any], skip_nonfinite: bool
    ) -> None:
        make_plain(defaults)
        check_group(defaults)
        self._skip_nonfinite = skip_nonfinite
        self._skipped: dict[torch.device, Tensor] = {}
        self._hints: dict[Tensor, ShapeHint] = {}
        # Parameters whose columns a sparse step under a rows-only preset left behind.
        self._stale: set[Tensor] = set()
        self._warned: set[str] = set()
        self._plan: Plan | None = None
        self._loading: dict[str, Any] | None = None
        super().__init__(params, defaults)

    # --- groups ----------------------------------------------------------------

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group; a rejected one leaves the optimizer unchanged.

        Args:
            param_group: parameters under ``"params"`` and options that differ from
                the defaults.

        Raises:
            ValueError: for options and parameters that the constructor refuses, and
                parameters of another group; as there, the errors that follow.
            TypeError: for what is no dict or no parameter.
            NotImplementedError: for float64 with momentum of low precision.
            RuntimeError: for implementations that exclude each other.
        """
        if isinstance(param_group, dict):
            group = {**self.defaults, **param_group}
            make_plain(group)
            check_group(group)
            self._check_flags(group)
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            make_plain(group)
            for param in group["params"]:
                check_param(param, group)
                if not is_lazy(param):
                    self._layout(param, group)
        except Exception:
            del self.param_groups[-1]
            raise

    def _check_flags(self, group: Mapping[str, Any]) -> None:
        expect(
            "skip_nonfinite" not in group,
            "skip_nonfinite for the whole optimizer",
            "it in a group",
            "params",
        )
        if group["differentiable"] and self._skip_nonfinite:
            raise RuntimeError(
                "SM3: expected skip_nonfinite=False with differentiable=True, but got "
                "True (argument 'skip_nonfinite')"
            )

    def _params(self) -> Iterator[tuple[dict[str, Any], Tensor]]:
        """Yield every parameter once, with its group."""
        for group in self.param_groups:
            for param in unique(group["params"]):
                yield group, param

    # --- state -----------------------------------------------------------------

    def _local(self, tensor: Tensor) -> Tensor:
        """Return the part of a parameter or state tensor on this process."""
        return tensor

    def _is_sharded(self, param: Tensor) -> bool:
        """Tell whether other processes hold parts of a parameter."""
        return param in self._hints

    def _settle(self) -> None:
        """Wait for what the last step has sent to other processes."""

    def _global_shape(self, param: Tensor) -> tuple[int, ...]:
        """Return the shape that a parameter's cover is chosen from."""
        hint = self._hints.get(param) if self._hints else None
        return hint.shape if hint else tuple(param.shape)

    def _cover(self, param: Tensor, group: Mapping[str, Any]) -> ResolvedCover:
        """Return the cover of a whole parameter."""
        return resolve(group["cover"], self._global_shape(param), group["compat"])

    def _layout(self, param: Tensor, group: Mapping[str, Any]) -> _state.Layout:
        """Return shapes, of the whole tensors, and dtypes of a parameter's state."""
        shape, cover = self._global_shape(param), self._cover(param, group)
        return _state.layout(param, shape, cover, group)

    def _local_shape(
        self,
        param: Tensor,
        group: Mapping[str, Any],
        key: str,
        shape: tuple[int, ...],
    ) -> tuple[int, ...]:
        """Return the sizes of the part of a state tensor on this process."""
        return shape

    def _new_tensor(
        self,
        param: Tensor,
        group: Mapping[str, Any],
        key: str,
        shape: tuple[int, ...],
        dtype: torch.dtype,
    ) -> Tensor:
        """Return one zero state tensor of a parameter."""
        return _state.zeros(param, key, shape, dtype)

    def _step_device(self, param: Tensor, group: Mapping[str, Any]) -> torch.device:
        follows = _state.steps_follow(group, self._skip_nonfinite)
        return param.device if follows else torch.device("cpu")

    def _complete(self, param: Tensor, group: Mapping[str, Any]) -> dict[str, Any]:
        """Create what a parameter's state lacks, and move it to the parameter."""
        state: dict[str, Any] = self.state[param]
        # Momentum that is not there from the start waits for a dense gradient.
        grad = param.grad
        waits = bool(state) if grad is None else grad.layout != torch.strided
        for key, (shape, dtype) in self._layout(param, group).items():
            if key in state or (waits and key.startswith("momentum")):
                continue
            if key == "momentum_scale" and state["momentum_buffer"].dtype != torch.int8:
                continue
            state[key] = self._new_tensor(param, group, key, shape, dtype)
        _state.follow(param, state, self._step_device(param, group))
        return state

    def init_state(self) -> None:
        """Create the state of every parameter that requires a gradient.

        The first :meth:`step` does the same. Existing state is kept.

        Example:
            >>> weight = torch.nn.Parameter(torch.zeros(3, 4))
            >>> optimizer = torch_sm3.SM3([weight])
            >>> optimizer.init_state()
            >>> {key: tuple(value.shape) for key, value in optimizer.state[weight].items()}
            {'step': (), 'accumulator_0': (3,), 'accumulator_1': (4,)}
        """  # noqa: E501
        self._prune()
        self._warn_flattened()
        for group in self.param_groups:
            make_plain(group)
        for group, param in self._params():
            # Lazy modules tell their shapes in their first forward pass.
            known = not is_lazy(param)
            wanted = param.requires_grad or param.grad is not None
            if known and (wanted or self.state.get(param)):
                self._complete(param, group)

    def _prune(self) -> None:
        """Drop state of parameters that are in no group any more."""
        live = {id(param) for group in self.param_groups for param in group["params"]}
        stale = [k for k in self.state if isinstance(k, Tensor) and id(k) not in live]
        for param in stale:
            del self.state[param]
            self._hints.pop(param, None)
            self._stale.discard(param)
        if stale:
            self._plan = None
            warnings.warn(
                f"SM3: dropped the state of {len(stale)} parameter(s) that are in no "
                "group any more; load a state dict after parameters are replaced",
                stacklevel=4,
            )

    def _warn_flattened(self) -> None:
        if "flattened" in self._warned:
            return
        for _, param in self._params():
            if not self._is_sharded(param) and is_flattened(param):
                self._warned.add("flattened")
                warnings.warn(
                    f"SM3: a 1-D parameter of {param.numel()} elements takes as many "
                    "numbers of state; if an engine (FSDP1, ZeRO) flattened a model, "
                    "use FSDP2 (fully_shard), or tell the shapes by SM3.set_shape_hint",
                    stacklevel=4,
                )
                return

    def set_shape_hint(
        self,
        param: Tensor,
        shape: Sequence[int],
        offset: int = 0,
        process_group: Any = None,
    ) -> None:
        """Tell that a 1-D parameter is a range of a flattened tensor.

        Its accumulators are then those of the whole tensor, on every process, and
        equal on all of them; results have the bits of the unsharded run. A hint is not
        part of a state dict.

        Args:
            param: a 1-D parameter of this optimizer.
            shape: of the tensor that was flattened, row by row.
            offset: position of the parameter's first element in it.
            process_group: the processes that hold the other ranges; None is the default
                group, or nobody where torch.distributed is not initialized.

        Raises:
            ValueError: if the parameter is not 1-D or not in this optimizer, or the
                range is not within the shape.
            RuntimeError: if the parameter has state already.

        Example:
            >>> shard = torch.nn.Parameter(torch.zeros(1000))
            >>> optimizer = torch_sm3.SM3([shard])
            >>> optimizer.set_shape_hint(shard, (64, 32), offset=1000)
            >>> optimizer.state_bytes(detail=True)["accumulator"]  # 4 * (64 + 32)
            384
        """
        groups = [group for group, known in self._params() if known is param]
        hint = ShapeHint(tuple(shape), offset, process_group)
        check_hint(
            hint, param, known=bool(groups), has_state=bool(self.state.get(param))
        )
        resolve(groups[0]["cover"], shape, groups[0]["compat"])
        self._hints[param] = hint
        self._plan = None

    @property
    def skipped_steps(self) -> int:
        """Steps that changed nothing, for ``found_inf`` or ``skip_nonfinite``.

        Reading it may wait for the device.
        """
        return sum(int(count) for count in self._skipped.values())

    def state_bytes(self, detail: bool = False) -> int | dict[str, int]:
        """Count the bytes of the optimizer's state on this process.

        Before the first step this is what the state will take; nothing is allocated.

        Args:
            detail: return a dict by kind: accumulator, momentum, scale, compensation,
                step.

        Returns:
            Bytes, or bytes by kind.

        Example:
            >>> weight = torch.nn.Parameter(torch.zeros(512, 512, 3, 3))
            >>> torch_sm3.SM3([weight]).state_bytes(detail=True)["accumulator"]
            4120
        """
        sizes = dict.fromkeys(KINDS, 0)
        for group, param in self._params():
            state = self.state.get(param)
            if state:
                for key, value in state.items():
                    if (kind := _kind(key)) and isinstance(value, Tensor):
                        local = self._local(value)
                        sizes[kind] += local.numel() * local.element_size()
            elif param.requires_grad:
                for key, (shape, dtype) in self._layout(param, group).items():
                    mine = self._local_shape(param, group, key, shape)
                    sizes[_kind(key) or key] += math.prod(mine) * dtype.itemsize
        return sizes if detail else sum(sizes.values())


def _kind(key: str) -> str | None:
    """Return what a state tensor counts as, None for one that is not ours."""
    if key.startswith("accumulator_"):
        return "accumulator"
    names = {"momentum_buffer": "momentum", "momentum_scale": "scale"}
    name = names.get(key, key)
    return name if name in KINDS else None
