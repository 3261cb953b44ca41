# SPDX-License-Identifier: Apache-2.0
"""What a runner does with gradients: the optimizer's step of all stages."""

from __future__ import annotations

from torch.amp import GradScaler
from torch.optim.optimizer import Optimizer

from torch_sm3.pipeline._result import OptimResult
from torch_sm3.pipeline._session import Session


class Steppable:
    r"""Step the optimizers of all ranks as one."""

    _session: Session

    def optimizer_step(
        self,
        optimizer: Optimizer,
        *,
        max_norm: float | None = None,
        scaler: GradScaler | None = None,
        post_validate: bool = False,
    ) -> OptimResult:
        r"""Step this rank's optimizer as a part of one optimizer of all stages.

        .. math::
            \|g\| = \sqrt{\sum_s \sum_{w \in s} \|g_w\|^2}, \qquad
            g \leftarrow g \cdot \min(1, \text{max\_norm} / \|g\|)

        Collective. A tied weight counts once. If a gradient is infinite or NaN
        anywhere, with ``max_norm`` or ``scaler``, all ranks skip the step and all
        scales shrink alike.

        Args:
            optimizer: any optimizer of this rank's parameters.
            max_norm: clip the gradients of all stages together to this norm.
            scaler: the one of :meth:`step`; it is updated here.
            post_validate: step at once, as if nothing had to be clipped or skipped, and
                ask the other ranks in the warm-up of the next step, which begins anew
                if that was wrong. Parameters, state and losses are the same as
                without. ``.grad`` is None afterwards; :meth:`flush` ends it, before
                parameters are read, for example. The next step does not wait for
                the other ranks at its end either: if one fails there after the
                losses are known, the call after it raises that on all ranks.

        Returns:
            Whether the step was applied, and the norm; with ``post_validate`` neither
            is known yet, see :meth:`flush`.

        Raises:
            PipelineError: on every rank, if the optimizer of any fails; those of
                other ranks may have stepped.
            ProtocolError: on every rank, if only some no longer validate later; the
                others are in their next step, so the runner ends.
            ValueError: on every rank, if ``max_norm`` is negative or not alike.
            TypeError: on every rank, if ``optimizer`` is none.

        Example::

            >>> import torch
            >>> from torch_sm3.pipeline import PipelineRunner, Stage, plan
            >>> module = torch.nn.Linear(4, 1)
            >>> runner = PipelineRunner(
            ...     [Stage(module, index=0)], plan("none", ranks=1, microbatches=2),
            ...     loss_fn=torch.nn.functional.mse_loss)
            >>> x, y = torch.randn(6, 4), torch.randn(6, 1)
            >>> optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
            >>> result = runner.step(x, target=y)
            >>> runner.optimizer_step(optimizer, max_norm=1.0).applied
            True
            >>> runner.close()
        """
        return self._session.optimize(optimizer, max_norm, scaler, post_validate)

    def flush(self) -> OptimResult | None:
        r"""End an optimizer step with ``post_validate`` before the next step does.

        Collective. :meth:`eval` and :meth:`optimizer_step` do it by themselves.

        Returns:
            What became of the step; None if there is none to validate.

        Raises:
            PipelineError: on every rank, if the optimizer of any failed.
        """
        return self._session.flush()

    def zero_grad(self, set_to_none: bool = True) -> None:
        r"""Clear the gradients of this rank's stages; :meth:`step` never does.

        Args:
            set_to_none: make them None instead of zeros.
        """
        self._session.zero_grad(set_to_none)
