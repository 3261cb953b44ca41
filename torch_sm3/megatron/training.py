# SPDX-License-Identifier: Apache-2.0
"""The training loop of Megatron-LM before core 0.4."""

from __future__ import annotations

import functools
import inspect
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from torch_sm3.megatron import _old_gradients
from torch_sm3.megatron._finetune import FineTuning
from torch_sm3.megatron._log import Log
from torch_sm3.megatron._timing import start, timed
from torch_sm3.megatron.env import (
    Environment,
    call_with,
    chunks_of,
    device_of,
    scheduler_of,
    unwrapped,
)
from torch_sm3.megatron.schedules import Schedules

_NAMES = ("train_step", "train", "evaluate", "training_log")


class OldLoop:
    """Megatron's functions of a training loop, for generations A to 23.06.

    What is not about steps, such as checkpoints, is asked of Megatron's own module, by
    the names that it has there.

    Args:
        env: the Megatron.
        schedules: run the evaluations of v2.0, which has no function for them.
        strict_log: whether logs leave out what Megatron's do.
    """

    def __init__(
        self, env: Environment, schedules: Schedules, strict_log: bool
    ) -> None:
        self._env = env
        self._schedules = schedules
        self._home: Any = env.package.modules["training"]
        self._log = Log(env, strict_log)
        self._old = env.package.generation == "A"

    def functions(self) -> dict[str, Callable[..., Any]]:
        """Return the functions that take the place of Megatron's, by name."""
        made = {}
        known = self._env.package.functions
        if "_train" in known:
            tuning = FineTuning(self._env)
            made["_train"] = _by_name(known["_train"].function, tuning.train)
        for name in _NAMES:
            found = known.get(name)
            if found is not None:
                method = (
                    self._log.write if name == "training_log" else getattr(self, name)
                )
                made[name] = _by_name(found.function, method)
        return made

    # --- a step ------------------------------------------------------------

    def train_step(self, given: dict[str, Any]) -> tuple[Any, ...]:
        """Do one step of all ranks."""
        args, timers = self._env.args(), self._env.timers()
        model, optimizer = given["model"], given["optimizer"]
        chunks = chunks_of(model)
        _old_gradients.clear(args, chunks, optimizer)
        barrier = getattr(args, "barrier_with_L1_time", False)
        levels = self._env.package.at_least("D2")
        with timed(timers, "forward-backward" if levels else None, 1, barrier):
            losses = self._forward_backward(given, forward_only=False)
        self._empty_cache(1)
        _old_gradients.reduce(self._env, chunks, optimizer, self._schedules.adasum)
        self._vision(model, "cancel_gradients_last_layer")
        with timed(timers, "optimizer", 1, barrier):
            asks = hasattr(optimizer, "reduce_model_grads")
            done = optimizer.step(args, timers) if asks else optimizer.step()
        success, *norms = done if isinstance(done, tuple) else (done,)
        if success:
            _old_gradients.gather(self._env, optimizer)
        self._vision(model, "update_momentum")
        if success:
            scheduler_of(given).step(increment=self._samples(args.data_parallel_size))
        self._empty_cache(2)
        last = self._env.rank == self._env.stages - 1
        return (_averaged(losses) if last else {}), int(not success), *norms

    def _forward_backward(
        self, given: dict[str, Any], forward_only: bool, collect: bool = False
    ) -> list[Any]:
        """Call the schedule that Megatron's module has now."""
        home, env = self._home, self._env
        args, timers = env.args(), None if forward_only else env.timers()
        optimizer = given.get("optimizer")
        if self._old and forward_only:
            return self._schedules.evaluate(given)
        select = getattr(home, "get_forward_backward_func", None)
        if select is not None:
            schedule = select()
        else:
            kind = "pipelining" if env.stages > 1 else "no_pipelining"
            schedule = getattr(home, f"forward_backward_{kind}")
        if getattr(args, "timing_log_level", 2) < 2:
            timers = None
        shape = (args.seq_length, args.micro_batch_size, args.hidden_size)
        overlap = getattr(args, "overlap_p2p_comm", False)
        return call_with(
            schedule,
            forward_step_func=given["forward_step_func"],
            data_iterator=given["data_iterator"],
            model=given["model"],
            optimizer=optimizer,
            num_microbatches=env.microbatches(),
            dtype=args.params_dtype,
            tensor_shape=shape,
            grad_scaler=None if optimizer is None else optimizer.scale_loss,
            sequence_parallel=getattr(args, "sequence_parallel", False),
            overlap_p2p_comm=overlap,
            batch_p2p_comm=not overlap,
            timers=timers,
            forward_only=forward_only,
            collect_non_loss_data=collect,
        )

    def _samples(self, replicas: int) -> int:
        return self._env.microbatches() * self._env.args().micro_batch_size * replicas

    def _empty_cache(self, level: int) -> None:
        wanted = getattr(self._env.args(), "empty_unused_memory_level", 0)
        if wanted >= level and torch.cuda.is_available():
            torch.cuda.empty_cache()

    def _vision(self, model: Any, method: str) -> None:
        """Let a model that learns from its own past do what it does around a step."""
        args = self._env.args()
        if getattr(args, "vision_pretraining", False) and (
            args.vision_pretraining_type == "dino"
        ):
            getattr(unwrapped(model[0]), method)(args.curr_iteration)

    # --- evaluation --------------------------------------------------------

    def evaluate(self, given: dict[str, Any]) -> Any:
        """Average the losses of some batches without training."""
        env, home = self._env, self._home
        args, model = env.args(), given["model"]
        chunks = chunks_of(model)
        if getattr(args, "vision_pretraining_type", None) == "dino" and (
            args.vision_pretraining
        ):
            home.compute_feature_bank(model)
        for chunk in chunks:
            chunk.eval()
        total: dict[str, Any] = {}
        replicas = env.state.get_data_parallel_world_size()
        with torch.no_grad():
            for iteration in range(1, args.eval_iters + 1):
                if given["verbose"] and iteration % args.log_interval == 0:
                    home.print_rank_0(f"Evaluating iter {iteration}/{args.eval_iters}")
                data = {**given, "optimizer": None}
                for losses in self._forward_backward(data, forward_only=True):
                    for key, loss in losses.items():
                        total[key] = total.get(key, _zero(loss)) + loss
                self._empty_cache(1)
                args.consumed_valid_samples += self._samples(replicas)
            collected = None
            if given.get("process_non_loss_data_func") is not None:
                collected = self._forward_backward(data, True, collect=True)
        for chunk in chunks:
            chunk.train()
        for key in total:
            total[key] /= args.eval_iters * env.microbatches()
        return (total, collected) if "process_non_loss_data_func" in given else total

    # --- the loop ----------------------------------------------------------

    def train(self, given: dict[str, Any]) -> int:
        """Train until an end is reached; return the number of iterations."""
        env, home = self._env, self._home
        args, timers = env.args(), env.timers()
        model, optimizer = given["model"], given["optimizer"]
        scheduler = scheduler_of(given)
        home.write_args_to_tensorboard()
        for chunk in chunks_of(model):
            chunk.train()
        interval = "interval time" if self._old else "interval-time"
        start(timers, interval, 0, barrier=True)
        home.print_datetime("before the start of training step")
        total: dict[str, Any] = {}
        iteration, report = args.iteration, True
        while iteration < args.train_iters:
            home.update_num_microbatches(args.consumed_train_samples)
            args.curr_iteration = iteration
            losses, skipped, *norms = home.train_step(
                given["forward_step_func"],
                given["train_data_iterator"],
                model,
                optimizer,
                scheduler,
            )
            iteration += 1
            replicas = env.state.get_data_parallel_world_size()
            args.consumed_train_samples += self._samples(replicas)
            if norms:
                wanted = args.log_params_norm
                norms.insert(1, home.calc_params_l2_norm(model) if wanted else None)
            report = home.training_log(
                losses,
                total,
                optimizer.param_groups[0]["lr"],
                iteration,
                optimizer.get_loss_scale().item(),
                report,
                skipped,
                *norms,
            )
            self._after(given, scheduler, iteration)
        return iteration

    def _after(self, given: dict[str, Any], scheduler: Any, iteration: int) -> None:
        """Resume, evaluate, save and end, each where it is due."""
        args, home = self._env.args(), self._home
        state = given["model"], given["optimizer"], scheduler
        if args.adlr_autoresume and iteration % args.adlr_autoresume_interval == 0:
            home.check_adlr_autoresume_termination(iteration, *state)
        if args.eval_interval and iteration % args.eval_interval == 0 and args.do_valid:
            more = [given[n] for n in ("process_non_loss_data_func",) if n in given]
            home.evaluate_and_print_results(
                f"iteration {iteration}",
                given["forward_step_func"],
                given["valid_data_iterator"],
                given["model"],
                iteration,
                *more,
                False,
            )
        if getattr(args, "exit_signal_handler", False) and any(
            home.get_signal_handler().signals_received()
        ):
            home.save_checkpoint_and_time(iteration, *state)
            self._exit("exiting program after receiving SIGTERM.")
        saved = bool(
            args.save and args.save_interval and iteration % args.save_interval == 0
        )
        if saved:
            home.save_checkpoint_and_time(iteration, *state)
        minutes = (time.time() - home._TRAIN_START_TIME) / 60.0
        if args.exit_duration_in_mins and self._anywhere(
            minutes > args.exit_duration_in_mins, given["model"]
        ):
            if not saved:
                home.save_checkpoint_and_time(iteration, *state)
            self._exit(f"exiting program after {minutes} minutes")
        if args.exit_interval and iteration % args.exit_interval == 0:
            if args.save and not saved:
                home.save_checkpoint_and_time(iteration, *state)
            dist.barrier()
            self._exit(f"exiting program at iteration {iteration}")

    def _anywhere(self, here: bool, model: Any) -> bool:
        """Whether something holds on any rank."""
        flag = torch.tensor([here], dtype=torch.int, device=device_of(model))
        dist.all_reduce(flag, op=dist.ReduceOp.MAX)
        return bool(flag.item())

    def _exit(self, why: str) -> None:
        self._home.print_datetime(why)
        sys.exit()


def _by_name(
    original: Callable[..., Any], method: Callable[..., Any]
) -> Callable[..., Any]:
    """Return a function with the arguments of another that hands them on by name."""
    signature = inspect.signature(original)

    @functools.wraps(original)
    def function(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs)
        given.apply_defaults()
        return method(given.arguments)

    return function


def _averaged(losses: list[dict[str, Any]]) -> dict[str, Any]:
    """Average what microbatches returned, by the keys of the first one."""
    return {key: sum(x[key] for x in losses) / len(losses) for key in losses[0]}


def _zero(loss: torch.Tensor) -> torch.Tensor:
    return torch.zeros(1, dtype=torch.float, device=loss.device)
