# SPDX-License-Identifier: Apache-2.0
"""Gloo ranks that may be killed or stopped; their store lives with the parent."""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import pickle
import signal
import time
import traceback
from collections.abc import Callable, Iterable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

PATIENCE = timedelta(seconds=120)


class Place(NamedTuple):
    """Where a rank stands.

    Attributes:
        rank: this rank.
        size: number of ranks.
        store: of all ranks; it outlives each of them.
        pipe: to the parent.
    """

    rank: int
    size: int
    store: Store
    pipe: Connection

    def tell(self, value: Any) -> None:
        """Send the parent a word before the answer."""
        self.pipe.send_bytes(pickle.dumps(("word", value)))

    def gather(self, name: str, rank: int, size: int) -> None:
        """Make a default group of ranks that are left.

        Args:
            name: of the group, not used before.
            rank: of this process among them.
            size: their number.
        """
        if dist.is_initialized():
            dist.destroy_process_group()
        store = PrefixStore(name, self.store)
        dist.init_process_group(
            "gloo", store=store, rank=rank, world_size=size, timeout=PATIENCE
        )


def _serve(rank: int, size: int, port: int, pipe: Connection) -> None:
    """Answer calls until the parent hangs up."""
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    faulthandler.register(signal.SIGUSR1)
    store = TCPStore("127.0.0.1", port, is_master=False, timeout=PATIENCE)
    place = Place(rank, size, store, pipe)
    place.gather("first", rank, size)
    while True:
        try:
            function, arguments = pickle.loads(pipe.recv_bytes())
        except EOFError:
            break
        try:
            answer = function(place, *arguments)
        except BaseException:
            answer = traceback.format_exc()
        pipe.send_bytes(pickle.dumps(("answer", answer)))
    # The others may be gone, so there is nobody to part from.
    os._exit(0)


class Crew:
    """Processes of one Gloo group.

    Args:
        size: their number.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["torch_sm3.pipeline"])
        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._pipes: list[Connection] = []
        self._processes: list[BaseProcess] = []
        for rank in range(size):
            here, there = context.Pipe()
            process = context.Process(
                target=_serve, args=(rank, size, self._store.port, there), daemon=True
            )
            process.start()
            there.close()
            self._pipes.append(here)
            self._processes.append(process)

    def call(self, function: Callable[..., Any], *arguments: Any) -> None:
        """Let all ranks call a module-level function with their place first."""
        message = pickle.dumps((function, arguments))
        for pipe in self._pipes:
            pipe.send_bytes(message)

    def listen(
        self, ranks: Iterable[int], seconds: float
    ) -> tuple[dict[int, Any], list[Any]]:
        """Wait for the answers of ranks.

        Args:
            ranks: whose answers are awaited.
            seconds: longest wait.

        Returns:
            The answers that came, None from a process that ended and text from a call
            that raised, and all words that any rank said before.
        """
        answers: dict[int, Any] = {}
        words: list[Any] = []
        awaited = {self._pipes[rank]: rank for rank in ranks}
        end = time.monotonic() + seconds
        while awaited:
            ready = wait(list(awaited), max(0.0, end - time.monotonic()))
            if not ready:
                break
            for pipe in ready:
                assert isinstance(pipe, Connection)
                try:
                    what, value = pickle.loads(pipe.recv_bytes())
                except (EOFError, ConnectionError):
                    what, value = "answer", None
                if what == "word":
                    words.append(value)
                else:
                    answers[awaited.pop(pipe)] = value
        return answers, words

    def wake(self, rank: int) -> None:
        """Let a stopped process go on."""
        pid = self._processes[rank].pid
        assert pid is not None, "started"
        os.kill(pid, signal.SIGCONT)

    def show(self, ranks: Iterable[int]) -> list[str]:
        """Let ranks that give no answer write their stacks; return what they are."""
        states = []
        for rank in ranks:
            process = self._processes[rank]
            code, pid = process.exitcode, process.pid
            states.append(f"rank {rank} " + ("runs" if code is None else f"is {code}"))
            if code is None and pid is not None:
                os.kill(pid, signal.SIGUSR1)
        return states

    def end(self) -> None:
        """End all processes, wherever they are."""
        for process, pipe in zip(self._processes, self._pipes, strict=True):
            process.kill()
            process.join()
            pipe.close()
