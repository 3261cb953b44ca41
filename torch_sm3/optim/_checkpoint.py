# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of SM3: plain data out, every dtype and bit back in."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor
from torch.optim.optimizer import Optimizer

from torch_sm3.optim import _state
from torch_sm3.optim._base import SM3Base
from torch_sm3.optim._options import fill, make_plain


class CheckpointedSM3(SM3Base):
    """Adds ``state_dict``, ``load_state_dict``, pickling and copying."""

    def __getstate__(self) -> dict[str, Any]:
        self._settle()
        return {
            **super().__getstate__(),
            "_skip_nonfinite": self._skip_nonfinite,
            "_skipped": self._skipped,
            "_hints": self._hints,
            "_warned": self._warned,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore from a pickle or a loaded state dict, filling missing options."""
        before = self.__dict__.get("param_groups"), self.__dict__.get("state")
        super().__setstate__(state)
        self._plan = None
        self._stale = set()
        # A pickle of an earlier version, or of a subclass, may lack some.
        missing: dict[str, Any] = {
            "_skip_nonfinite": False,
            "_skipped": {},
            "_hints": {},
            "_warned": set(),
            "_loading": None,
        }
        for name, value in missing.items():
            self.__dict__.setdefault(name, value)
        for group in self.param_groups:
            fill(group)
            make_plain(group)
        if self._loading is not None:
            self._load(self._loading, before)

    def state_dict(self) -> dict[str, Any]:
        """Return state and options as plain data, readable with ``weights_only``.

        State of a DTensor parameter is DTensors, reduced over all processes, which
        ``optimizer.state`` is not before this call or the next step.

        Example:
            >>> weight = torch.nn.Parameter(torch.zeros(8, 4, 3, 3))
            >>> cover = torch_sm3.Cover.merge((0,), (1, 2, 3))
            >>> optimizer = torch_sm3.SM3([weight], cover=cover)
            >>> optimizer.state_dict()["param_groups"][0]["cover"]
            ('merge', ((0,), (1, 2, 3)))
        """
        self._settle()
        self._prune()
        for group in self.param_groups:
            make_plain(group)
        return super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what :meth:`state_dict` returned; no state tensor changes its dtype.

        Each present tensor is freed before its successor is made, so that there is
        never more than one of them twice.

        Args:
            state_dict: is not modified.

        Raises:
            ValueError: if groups or shapes do not fit the parameters, or another port
                wrote the state dict (:func:`torch_sm3.import_state_dict` turns it
                into ours).
        """

        # The base class casts state to the parameter's dtype, which would ruin the
        # float32 accumulators of 16-bit parameters. This hook runs after the user's
        # and takes the state away; __setstate__ puts it in place, before post-hooks.
        def take(_: Optimizer, full: dict[str, Any]) -> dict[str, Any]:
            if _state.is_foreign(full):
                raise ValueError(
                    "SM3.load_state_dict: expected a state dict of torch_sm3.SM3, but "
                    "got one of another port (argument 'state_dict'); convert it with "
                    "torch_sm3.import_state_dict"
                )
            self._loading = full
            return {**full, "state": {}}

        self._settle()
        handle = self.register_load_state_dict_pre_hook(take)
        try:
            super().load_state_dict(state_dict)
        finally:
            handle.remove()
            self._loading = None

    def _load(self, full: dict[str, Any], before: tuple[Any, Any]) -> None:
        """Fill the state from a full state dict whose groups are in place already.

        Args:
            full: state dict.
            before: groups and state to return to where shapes do not fit.
        """
        keys = [key for group in full["param_groups"] for key in group["params"]]
        pairs = [(group, p) for group in self.param_groups for p in group["params"]]
        by_key = dict(zip(keys, pairs, strict=True))
        saved: dict[Any, Any] = full["state"]
        try:
            for key, state in saved.items():
                if key in by_key:
                    group, param = by_key[key]
                    self._check_saved(key, param, group, state)
        except ValueError:
            self.param_groups, self.state = before
            raise
        present = before[1] or {}
        for key, state in saved.items():
            if key not in by_key:
                self.state[key] = state
                continue
            group, param = by_key[key]
            # A copy of the dict, as the user may hold it by an earlier state_dict().
            old = dict(present.pop(param, {}))
            step_on = self._step_device(param, group)
            place = partial(self._placed, param, group)
            self.state[param] = _state.load(state, old, step_on, place)

    def _check_saved(
        self, key: object, param: Tensor, group: dict[str, Any], saved: dict[str, Any]
    ) -> None:
        """Check that a saved state fits a parameter."""
        _state.check_shapes(key, self._layout(param, group), saved)

    def _placed(
        self, param: Tensor, group: dict[str, Any], key: str, value: Tensor
    ) -> Tensor:
        """Return a copy of a saved state tensor where the parameter is."""
        return value.to(param.device, copy=True)
