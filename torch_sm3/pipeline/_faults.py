# SPDX-License-Identifier: Apache-2.0
"""Failures: what every rank learns when one of them cannot go on."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch_sm3.pipeline._values import unpack


class Failure(NamedTuple):
    """Say who failed, where and how; equal on every rank."""

    rank: int
    stage: int
    microbatch: int
    action: str
    error_type: str
    message: str

    @classmethod
    def read(cls, structure: str) -> Failure:
        """Read a failure from a poison frame or an alarm."""
        return cls(*unpack(structure, []))

    def __str__(self) -> str:
        place = f" at {self.action}" if self.action else ""
        return f"rank {self.rank}{place}: {self.error_type}: {self.message}"


class Named(NamedTuple):
    """A failure and the data-parallel replica of its rank."""

    failure: Failure
    replica: int


class PipelineError(RuntimeError):
    r"""Say on every rank which rank failed in a step, where and how.

    On the rank that failed the exception itself is the ``__cause__``.

    Args:
        failure: the failure that all ranks report.
        others: failures of other ranks in the same step.
        note: what else a reader must know.
        replica: data-parallel replica of the rank that failed.

    Attributes:
        rank: rank that failed.
        stage: stage that it worked on.
        microbatch: microbatch that it worked on.
        action: action of the schedule, for example ``1F2``.
        error_type: name of the exception's class; ``PeerLost`` if the process ended,
            ``TimeoutError`` if a message did not come.
        message: text of the exception.
        others: the other failures of the step, as text.
        replica: data-parallel replica of the rank that failed, 0 if there is one.

    Example::

        >>> import torch
        >>> from torch_sm3.pipeline import PipelineError, PipelineRunner, Stage, plan
        >>> runner = PipelineRunner(
        ...     [Stage(torch.nn.Linear(4, 1), 0)], plan("none", 1, 2),
        ...     loss_fn=lambda output, target: target["no such key"])
        >>> try:
        ...     runner.step(microbatches=[torch.randn(3, 4)] * 2, targets=[{}, {}])
        ... except PipelineError as error:
        ...     print(error.rank, error.error_type, type(error.__cause__).__name__)
        0 KeyError KeyError
        >>> runner.close()
    """

    def __init__(
        self,
        failure: Failure,
        others: tuple[str, ...] = (),
        note: str = "",
        replica: int = 0,
    ) -> None:
        text = f"pipeline: {failure}"
        if others:
            text += "; also " + "; ".join(others)
        super().__init__(text + note)
        self._made_of = failure, others, note, replica
        self.rank = failure.rank
        self.stage = failure.stage
        self.microbatch = failure.microbatch
        self.action = failure.action
        self.error_type = failure.error_type
        self.message = failure.message
        self.others = others
        self.replica = replica

    def __reduce__(self) -> tuple[type[PipelineError], tuple[Any, ...]]:
        # Launchers hand errors from process to process.
        return type(self), self._made_of


class ProtocolError(PipelineError):
    r"""Say that a rank sent another message than the one that was due."""


#: In place of an action: the arguments of the step were wrong on that rank.
ARGUMENTS = "arguments"


def lost_error(failure: Failure, replica: int) -> PipelineError:
    """Return the error of a failure that ended the links themselves.

    Args:
        failure: the failure.
        replica: data-parallel replica of the rank that failed.
    """
    lost = failure.error_type == ProtocolError.__name__
    kind = ProtocolError if lost else PipelineError
    return kind(failure, (), replica_note(replica), replica)


def replica_note(replica: int) -> str:
    """Return what tells a replica's rank from that of the first one."""
    return f" (replica {replica})" if replica else ""


class LinksLostError(Exception):
    """End every wait after a peer ended, fell silent or broke the protocol."""


class PoisonedError(Exception):
    """Carry the failure of another rank that came in place of a message."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(str(failure))
        self.failure = failure


class DataExhausted(RuntimeError):
    """Say that an iterator ended in the middle of a step."""


class PeerFailedError(RuntimeError):
    """Say that this rank cannot go on since another one failed, which reports it."""


class GroupLostError(Exception):
    """End a step after a rank of another group than the links' is gone.

    Args:
        message: what is known.
        error_type: name for it, as in :class:`PipelineError`.
        replica: replica of the rank that is gone, None if that is not known.
    """

    def __init__(
        self, message: str, error_type: str = "PeerLost", replica: int | None = None
    ) -> None:
        super().__init__(message)
        self.error_type = error_type
        self.replica = replica
