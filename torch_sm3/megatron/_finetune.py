# SPDX-License-Identifier: Apache-2.0
"""Fine-tuning over epochs, as Megatron-LM's tasks did before core 0.4."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import torch.distributed as dist

from torch_sm3.megatron._timing import start
from torch_sm3.megatron.env import Environment, chunks_of, scheduler_of


class FineTuning:
    """Trains over the batches of epochs.

    Args:
        env: the Megatron.
    """

    def __init__(self, env: Environment) -> None:
        self._env = env
        self._home = _Names(
            env.package.modules["tasks"], env.package.modules["training"]
        )

    def train(self, given: dict[str, Any]) -> None:
        """Train until the last epoch ends."""
        args, home = self._env.args(), self._home
        if self._env.microbatches() != 1:
            # Megatron's words, which scripts may look for.
            raise AssertionError(
                "finetuning with gradient accumulation doesn't currently work"
            )
        model, loader = given["model"], given["train_dataloader"]
        for chunk in chunks_of(model):
            chunk.train()
        old = self._env.package.generation == "A"
        start(self._env.timers(), "interval time" if old else "interval-time")
        first, skip = divmod(args.iteration, args.train_iters_per_epoch)
        self._iteration, self._report = args.iteration, True
        self._total: dict[str, Any] = {}
        for epoch in range(first, args.epochs):
            home.print_rank_0(f"working on epoch {epoch + 1} ...")
            loader.sampler.set_epoch(args.seed + epoch)
            for number, batch in enumerate(loader):
                # What a checkpoint has seen of its epoch, which is skipped once.
                if epoch > first or number >= skip:
                    self._step(given, batch)
            if args.save:
                self._save(given)
            if given["end_of_epoch_callback"] is not None:
                given["end_of_epoch_callback"](model, epoch)

    def _step(self, given: dict[str, Any], batch: Any) -> None:
        """Train on a batch, and do what is due after it."""
        args, home = self._env.args(), self._home
        model, optimizer = given["model"], given["optimizer"]
        scheduler = scheduler_of(given)
        losses, skipped, *norms = home.train_step(
            given["forward_step"], batch, model, optimizer, scheduler
        )
        self._iteration += 1
        if norms:
            wanted = args.log_params_norm
            norms.insert(1, home.calc_params_l2_norm(model) if wanted else None)
        self._report = home.training_log(
            losses,
            self._total,
            optimizer.param_groups[0]["lr"],
            self._iteration,
            optimizer.get_loss_scale().item(),
            self._report,
            skipped,
            *norms,
        )
        if self._due(args.adlr_autoresume and args.adlr_autoresume_interval):
            home.check_adlr_autoresume_termination(
                self._iteration, model, optimizer, scheduler
            )
        saves = self._due(args.save and args.save_interval)
        if saves:
            self._save(given)
        if self._due(args.eval_interval):
            more = [None] if "opt_param_scheduler" in given else []
            home.evaluate_and_print_results(
                f"iteration {self._iteration}",
                given["forward_step"],
                given["valid_dataloader"],
                model,
                self._iteration,
                *more,
                False,
            )
        if self._due(args.exit_interval):
            if not saves:
                self._save(given)
            dist.barrier()
            home.print_rank_0(f"exiting program at iteration {self._iteration}")
            sys.exit()

    def _due(self, interval: Any) -> bool:
        return bool(interval) and self._iteration % interval == 0

    def _save(self, given: dict[str, Any]) -> None:
        self._home.save_checkpoint(
            self._iteration, given["model"], given["optimizer"], scheduler_of(given)
        )


class _Names:
    """Names as a module sees them that imported some of another's."""

    def __init__(self, *modules: ModuleType) -> None:
        self._modules = modules

    def __getattr__(self, name: str) -> Any:
        for module in self._modules:
            if name in vars(module):
                return vars(module)[name]
        raise AttributeError(name)
