# SPDX-License-Identifier: Apache-2.0
"""Gloo ranks that stay alive between tests: starting processes takes longest."""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import pickle
import signal
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from helpers.processes import free_port

# Of the default group. Long enough for a busy machine: no test waits for it to pass.
GROUP_TIMEOUT = timedelta(seconds=60)


class _Rank(NamedTuple):
    process: BaseProcess
    pipe: Connection


def _serve(rank: int, size: int, port: int, stacks: str, pipe: Connection) -> None:
    """Answer calls until the parent hangs up."""
    # A handler in C, so that a rank that hangs in C++ can still tell where.
    file = Path(stacks).open("w")
    faulthandler.register(signal.SIGUSR1, file=file, all_threads=True)
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(size))
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://127.0.0.1:{port}",
        rank=rank,
        world_size=size,
        timeout=GROUP_TIMEOUT,
    )
    while True:
        try:
            function, args = pickle.loads(pipe.recv_bytes())
        except EOFError:
            break
        torch.manual_seed(0)
        try:
            answer = (True, function(rank, size, *args))
        except BaseException:
            answer = (False, traceback.format_exc())
        # Plain pickle: a Connection would send tensors as handles that die with us.
        pipe.send_bytes(pickle.dumps(answer))


class Pool:
    """Processes of one world size, with a default Gloo group, started when needed.

    After a call that fails, hangs or loses a process the ranks may be out of step, so
    the next call starts new ones.

    Args:
        size: number of processes.
        method: "forkserver", which imports torch once for all, or "spawn", whose
            processes end as any other Python does.
    """

    def __init__(self, size: int, method: str = "forkserver") -> None:
        self.size = size
        self._context = multiprocessing.get_context(method)
        if method == "forkserver":
            self._context.set_forkserver_preload(["torch_sm3"])
        self._ranks: list[_Rank] = []
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def run(
        self,
        function: Callable[..., Any],
        *args: Any,
        timeout: float = 120.0,
        lost: tuple[int, ...] = (),
    ) -> list[Any]:
        """Run ``function(rank, size, *args)`` on all ranks; return their results.

        Args:
            function: at the top of a module. It leaves the default group as it was,
                unless some are ``lost``.
            *args: pickled.
            timeout: seconds after which the ranks are killed and the call fails.
            lost: ranks that the function kills or stops: not waited for, result None.

        Raises:
            AssertionError: with the tracebacks of the ranks that failed, and with the
                stacks of those that hang.
        """
        if self._folder is None:
            self._start()
        call = pickle.dumps((function, args))
        whole = False
        try:
            for _, pipe in self._ranks:
                pipe.send_bytes(call)
            answers, failures = self._collect(timeout, lost)
            whole = not failures and not lost
        finally:
            # Also where the user interrupts a test.
            if not whole:
                self.close()
        assert not failures, "\n".join(failures)
        return [answers.get(rank) for rank in range(self.size)]

    def close(self) -> None:
        """End the processes, wherever they are."""
        for process, pipe in self._ranks:
            if process.is_alive():
                process.kill()
            process.join()
            pipe.close()
        self._ranks = []
        if self._folder is not None:
            self._folder.cleanup()
        self._folder = None

    def leave(self, timeout: float = 60.0) -> list[int | None]:
        """Let all processes end by themselves; return their exit codes.

        Raises:
            AssertionError: with the stacks of those that do not.
        """
        for _, pipe in self._ranks:
            pipe.close()
        deadline = time.monotonic() + timeout
        for process, _ in self._ranks:
            process.join(max(0.0, deadline - time.monotonic()))
        codes = [process.exitcode for process, _ in self._ranks]
        stuck = [self._where(k) for k, code in enumerate(codes) if code is None]
        self.close()
        assert not stuck, "\n".join(stuck)
        return codes

    def _start(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="pool")
        port = free_port()
        for rank in range(self.size):
            here, there = self._context.Pipe()
            process = self._context.Process(
                target=_serve,
                args=(rank, self.size, port, self._stacks(rank), there),
                daemon=True,
            )
            process.start()
            there.close()
            self._ranks.append(_Rank(process, here))

    def _stacks(self, rank: int) -> str:
        assert self._folder is not None
        return str(Path(self._folder.name) / str(rank))

    def _collect(
        self, timeout: float, lost: tuple[int, ...]
    ) -> tuple[dict[int, Any], list[str]]:
        by_pipe = {pipe: rank for rank, (_, pipe) in enumerate(self._ranks)}
        answers: dict[int, Any] = {}
        failures: list[str] = []
        deadline = time.monotonic() + timeout
        while set(by_pipe.values()) - set(lost):
            ready = wait(list(by_pipe), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                failures += [self._where(rank) for rank in by_pipe.values()]
                break
            for pipe in ready:
                rank = by_pipe.pop(pipe)
                try:
                    good, value = pickle.loads(pipe.recv_bytes())
                except (EOFError, ConnectionError):
                    good, value = rank in lost, None
                    if not good:
                        value = "the process ended without an answer"
                answers[rank] = value
                if not good:
                    failures.append(f"rank {rank}: {value}")
                    # The others may wait for it in vain; give them a moment only.
                    deadline = min(deadline, time.monotonic() + 10)
        return answers, failures

    def _where(self, rank: int) -> str:
        """Say where a rank hangs."""
        process, stacks = self._ranks[rank].process, Path(self._stacks(rank))
        before = stacks.stat().st_size if stacks.exists() else 0
        if process.pid is not None:
            # One that was stopped first has to go on to hear the question.
            os.kill(process.pid, signal.SIGCONT)
            os.kill(process.pid, signal.SIGUSR1)
            for _ in range(20):
                time.sleep(0.05)
                if stacks.exists() and stacks.stat().st_size > before:
                    break
        text = stacks.read_text() if stacks.exists() else ""
        return f"rank {rank} did not answer in time; its threads:\n{text}"


class Pools:
    """One pool per world size."""

    def __init__(self) -> None:
        self._pools: dict[int, Pool] = {}

    def __call__(self, size: int) -> Pool:
        """Return the pool of ``size`` ranks."""
        return self._pools.setdefault(size, Pool(size))

    def close(self) -> None:
        """End all processes."""
        for pool in self._pools.values():
            pool.close()
