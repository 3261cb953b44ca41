# SPDX-License-Identifier: Apache-2.0
"""The log line and the scalars of Megatron-LM before core 0.4."""

from __future__ import annotations

import math
from typing import Any

import torch

from torch_sm3.megatron._timing import elapsed, has_levels
from torch_sm3.megatron.env import Environment

ADVANCED, SKIPPED, NAN = (
    f"{what} iterations" for what in ("advanced", "skipped", "nan")
)
_P2P = (
    *("forward-recv", "forward-send", "backward-recv", "backward-send"),
    *("forward-send-forward-recv", "forward-send-backward-recv"),
    *("backward-send-forward-recv", "backward-send-backward-recv"),
    "forward-backward-send-forward-backward-recv",
)
_OPTIMIZER = (
    *("optimizer-copy-to-main-grad", "optimizer-unscale-and-check-inf"),
    *("optimizer-clip-main-grad", "optimizer-count-zeros", "optimizer-inner-step"),
    *("optimizer-copy-main-to-model-params", "optimizer"),
)
# By level since August 2022, and before that, in the order of either.
_NAMES = (
    *("forward-backward", "forward-compute", "backward-compute", "batch-generator"),
    *_P2P,
    *("layernorm-grads-all-reduce", "embedding-grads-all-reduce", "grads-all-reduce"),
    *("grads-reduce-scatter", "params-all-gather"),
    *_OPTIMIZER,
)
_OLD_NAMES = (
    *("forward-compute", *_P2P[:2], "forward-send-backward-recv"),
    *("forward-backward-send-forward-backward-recv", "backward-compute"),
    *(_P2P[2], _P2P[3], "backward-send-forward-recv", "backward-send-backward-recv"),
    *("backward-params-all-reduce", "backward-layernorm-all-reduce"),
    *("backward-embedding-all-reduce", "backward-reduce-model-grads"),
    *("backward-gather-model-params", *_OPTIMIZER, "batch-generator"),
)


class Log:
    """Counts iterations and writes what Megatron's ``training_log`` does.

    Args:
        env: the Megatron.
        strict: whether to leave out averages that are not positive, and to look for
            NaN in skipped iterations only, as Megatron does.
    """

    def __init__(self, env: Environment, strict: bool) -> None:
        self._env = env
        self._home: Any = env.package.modules["training"]
        self._strict = strict
        self._old = env.package.generation == "A"

    def write(self, given: dict[str, Any]) -> bool:
        """Log an iteration; return whether memory is still to be reported."""
        args, timers = self._env.args(), self._env.timers()
        total, iteration = given["total_loss_dict"], given["iteration"]
        self._count(given["loss_dict"], total, given["skipped_iter"])
        iterations = total[ADVANCED] + total[SKIPPED]
        batch = self._env.microbatches() * args.micro_batch_size
        batch *= args.data_parallel_size
        names = self._timers(timers)
        writer = self._home.get_tensorboard_writer()
        self._scalars(writer, given, batch, names, iterations)
        if iteration % args.log_interval:
            return given["report_memory_flag"]
        seconds = elapsed(timers, "interval time" if self._old else "interval-time")
        seconds /= iterations
        if writer and self._times_iterations(args):
            writer.add_scalar("iteration-time", seconds, iteration)
        self._home.print_rank_last(self._line(given, batch, seconds))
        for key in (ADVANCED, SKIPPED, NAN):
            total[key] = 0
        report = given["report_memory_flag"]
        if report and given["learning_rate"] > 0.0:
            if torch.cuda.is_available():
                self._home.report_memory(f"(after {iteration} iterations)")
            report = False
        timers.log(names, normalizer=args.log_interval)
        return report

    def _count(
        self, losses: dict[str, Any], total: dict[str, Any], skipped: int
    ) -> None:
        total[ADVANCED] = total.get(ADVANCED, 0) + (not skipped)
        total[SKIPPED] = total.get(SKIPPED, 0) + skipped
        found = False
        for key, loss in losses.items():
            if not skipped:
                before = total.get(key)
                zero = torch.zeros(1, dtype=torch.float, device=loss.device)
                total[key] = (zero if before is None else before) + loss
            if skipped or not self._strict:
                found |= not math.isfinite(loss.float().sum().item())
        total[NAN] = total.get(NAN, 0) + int(found)

    def _line(self, given: dict[str, Any], batch: int, seconds: float) -> str:
        args, total = self._env.args(), given["total_loss_dict"]
        fields = [
            f"iteration {given['iteration']:8d}/{args.train_iters:8d}",
            f"consumed samples: {args.consumed_train_samples:12d}",
            f"elapsed time per iteration (ms): {seconds * 1000.0:.1f}",
            f"learning rate: {given['learning_rate']:.3E}",
            f"global batch size: {batch:5d}",
        ]
        for key in [k for k in total if k not in (ADVANCED, SKIPPED, NAN)]:
            average = total[key].item() / max(1, total[ADVANCED])
            if average > 0.0 or not (self._strict or total[ADVANCED] == 0):
                fields.append(f"{key}: {average:.6E}")
            total[key] = torch.zeros_like(total[key])
        fields.append(f"loss scale: {given['loss_scale']:.1f}")
        for name, key, form in (
            ("grad norm", "grad_norm", ".3f"),
            ("num zeros", "num_zeros_in_grad", ".1f"),
            ("params norm", "params_norm", ".3f"),
        ):
            if given.get(key) is not None:
                fields.append(f"{name}: {given[key]:{form}}")
        fields.append(f"number of skipped iterations: {total[SKIPPED]:3d}")
        fields.append(f"number of nan iterations: {total[NAN]:3d}")
        return " " + " | ".join(fields) + " |"

    # --- TensorBoard -------------------------------------------------------

    def _scalars(
        self,
        writer: Any,
        given: dict[str, Any],
        batch: int,
        names: list[str],
        count: int,
    ) -> None:
        args, timers = self._env.args(), self._env.timers()
        iteration = given["iteration"]
        levels = has_levels(timers)
        if iteration % getattr(args, "tensorboard_log_interval", 1):
            return
        times = self._old or args.log_timers_to_tensorboard
        if times and levels:  # which all ranks take part in
            timers.write(names, writer, iteration, normalizer=count)
        if not writer or not (levels or self._home.is_last_rank()):
            return
        for name, value in self._values(args, given, batch):
            writer.add_scalar(name, value, iteration)
            writer.add_scalar(f"{name} vs samples", value, args.consumed_train_samples)
        if times and not levels:
            timers.write(names, writer, iteration, normalizer=count)
        if getattr(args, "log_memory_to_tensorboard", False):
            stats = torch.cuda.memory_stats() if torch.cuda.is_available() else {}
            for name, key in (
                ("mem-reserved-bytes", "reserved_bytes.all.current"),
                ("mem-allocated-bytes", "allocated_bytes.all.current"),
                ("mem-allocated-count", "allocation.all.current"),
            ):
                writer.add_scalar(name, stats.get(key, 0), iteration)

    def _values(
        self, args: Any, given: dict[str, Any], batch: int
    ) -> list[tuple[str, Any]]:
        """Return scalars that are written against iterations and samples."""

        def asked(option: str) -> bool:
            return self._old or bool(getattr(args, f"log_{option}_to_tensorboard", 0))

        values: list[tuple[str, Any]] = []
        if asked("learning_rate"):
            values.append(("learning-rate", given["learning_rate"]))
        if asked("batch_size"):
            values.append(("batch-size", batch))
        values.extend(given["loss_dict"].items())
        if asked("loss_scale"):
            values.append(("loss-scale", given["loss_scale"]))
        if not self._old and asked("world_size"):
            values.append(("world-size", args.world_size))
        for name, key in (
            ("grad-norm", "grad_norm"),
            ("num-zeros", "num_zeros_in_grad"),
            ("params-norm", "params_norm"),
        ):
            if given.get(key) is not None:
                values.append((name, given[key]))
        return values

    def _times_iterations(self, args: Any) -> bool:
        if self._old:
            return torch.distributed.get_rank() == 0
        return bool(args.log_timers_to_tensorboard)

    def _timers(self, timers: Any) -> list[str]:
        if has_levels(timers):
            return list(_NAMES)
        return [name for name in _OLD_NAMES if name in timers.timers]
