# SPDX-License-Identifier: Apache-2.0
"""Plan schedules, and cut a model into stages."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

from torch_sm3 import _ops
from torch_sm3.pipeline._errors import checked, instance, real, whole, words
from torch_sm3.pipeline.costs import Costs
from torch_sm3.pipeline.schedule import Candidate, Schedule


def kinds() -> list[str]:
    r"""Return the names of the plans that :func:`plan` knows.

    Example::

        >>> from torch_sm3.pipeline import kinds
        >>> kinds()[:4]
        ['none', 'gpipe', 'forward', '1f1b']
    """
    return list(_ops.pipeline_schedule_class().kinds())


def plan(
    kind: str,
    ranks: int,
    microbatches: int,
    *,
    chunks: int | None = None,
    group_size: int | str = "auto",
    costs: Costs | None = None,
    link_cost: float = 0.0,
    memory_limit: float | Sequence[float] | None = None,
    max_pending: int = 2,
    split: int | None = None,
    via: str = "chain",
    warmup: int | str = "auto",
    rank: int | None = None,
) -> Schedule:
    r"""Plan a schedule of p ranks and m microbatches.

    .. math::
        \text{bubble} = \begin{cases}
            (p - 1)(F + B + W) & \text{gpipe, 1f1b} \\
            (p - 1)(F + B + W) / v & \text{interleaved, looped\_bfs}, m \ge p \\
            (p - 1) \max(F, B, F + B - W) & \text{zb\_h1}, m \ge p
        \end{cases}

    F, B and W are a rank's times of the forward, the gradients of the inputs and those
    of the weights, v its chunks. Any m is legal but for ``dualpipe_v``, which needs
    :math:`m \ge 2p`.

    ``none`` (p = 1) runs forward and backward of each microbatch in turn; ``gpipe``
    all forwards, then all backwards; ``1f1b`` warms up, alternates and drains, so that
    rank r never holds more than :math:`\min(p - r, m)` microbatches; ``forward`` runs
    forwards only; ``interleaved`` gives each rank several chunks and alternates;
    ``looped_bfs`` finishes all microbatches of a chunk before the next; ``zb_h1`` and
    ``zb_h2`` fill the bubble with gradients of weights; ``zbv``, ``v_half`` and
    ``v_min`` do so with two chunks per rank in a V, the latter two in a half and a
    third of the memory; ``dualpipe_v`` runs forwards and backwards in pairs. ``auto``
    searches all of them, and lists of its own, for the least simulated makespan that
    fits; :attr:`Schedule.alternatives` says what it looked at.

    Args:
        kind: the name of the plan.
        ranks: number of ranks p.
        microbatches: number of microbatches m.
        chunks: stages per rank v; the usual number of the kind if None.
        group_size: microbatches per group of ``interleaved``.
        costs: of the actions, uniform if None.
        link_cost: time of a message one way, in the unit of the costs.
        memory_limit: bytes of each rank; one number for all.
        max_pending: sends of a link that may be under way, whose bytes count against
            the limit; as many as :class:`PipelineRunner` has by default.
        split: first stage of the decoder, if the model has an encoder and a decoder.
        via: how the encoder's output reaches the decoder's stages: ``chain``, handed
            on by each, or ``direct``, by routes of its own.
        warmup: rounds of warm-up of ``1f1b``; by the link cost if ``"auto"``.
        rank: plan the row of this rank alone; the others stay empty.

    Returns:
        A compute-only :class:`Schedule`.

    Raises:
        ValueError: naming the argument that is wrong.
        TypeError: likewise.
        ScheduleError: if nothing fits into the memory, or the order cannot run.

    Example::

        >>> from torch_sm3.pipeline import plan
        >>> print(plan("zb_h1", ranks=2, microbatches=2).text, end="")
        schedule 1 kind=zb_h1 ranks=2 stages=2 microbatches=2 placement=loop
        rank 0: 0F0 0F1 0I0 0W0 0I1 0W1
        rank 1: 1F0 1I0 1F1 1I1 1W0 1W1

    GPipe: Huang et al., 2019, https://arxiv.org/abs/1811.06965; 1F1B and interleaved:
    Narayanan et al., 2021, https://arxiv.org/abs/2104.04473; zero bubble: Qi et al.,
    2023, https://arxiv.org/abs/2401.10241; V: Qi et al., 2024,
    https://arxiv.org/abs/2405.15362; DualPipe: DeepSeek-AI, 2024,
    https://arxiv.org/abs/2412.19437.
    """
    native, found, alternatives, advice = checked(
        lambda: _ops.pipeline_schedule_class().plan_with(
            words("plan", kind, "kind"),
            whole("plan", ranks, "ranks"),
            whole("plan", microbatches, "microbatches"),
            _chosen(chunks, None, "chunks", 1),
            _chosen(group_size, "auto", "group_size", 1),
            values_of("plan", costs, "costs"),
            real("plan", link_cost, "link_cost"),
            limits_of("plan", memory_limit),
            _chosen(max_pending, None, "max_pending", 1),
            _chosen(split, None, "split", 1),
            words("plan", via, "via"),
            -1 if warmup == "auto" else _chosen(warmup, None, "warmup", 0),
            -1 if rank is None else _chosen(rank, None, "rank", 0),
        )
    )
    if advice:
        warnings.warn(advice, stacklevel=2)
    return Schedule(
        native,
        [Candidate(*candidate) for candidate in alternatives],
        Costs.from_values(found) if found else None,
    )


def partition(
    costs: Sequence[float],
    stages: int,
    *,
    memory: Sequence[float] | None = None,
    limit: float = 0.0,
) -> list[int]:
    r"""Cut layers into contiguous stages such that the largest is as small as can be.

    .. math::
        \min_{0 = c_0 < c_1 < \dots < c_S = n} \; \max_s \sum_{l = c_s}^{c_{s+1} - 1}
        \text{cost}_l

    Args:
        costs: of each layer; embedding and head count as layers with their own.
        stages: number of stages S, at most the number of layers n.
        memory: bytes of each layer: of cuts that are equally good, one whose largest
            stage needs least is taken.
        limit: bytes that a stage may hold; no limit if 0.

    Returns:
        The first layer of each stage.

    Raises:
        ValueError: naming the argument that is wrong.
        TypeError: likewise.
        ScheduleError: if no cut keeps the limit, naming the smallest that can be kept.

    Example::

        >>> from torch_sm3.pipeline import partition
        >>> partition([1, 1, 1, 1, 4], stages=2)
        [0, 4]
        >>> partition([1, 1, 1, 1, 4], stages=3)
        [0, 2, 4]
        >>> partition([1, 1, 1, 1, 4], stages=3, memory=[5, 5, 1, 1, 9])
        [0, 1, 4]
    """
    layers = [real("partition", cost, "costs") for cost in costs]
    held = [real("partition", count, "memory") for count in memory or ()]
    native = _ops.pipeline_schedule_class()
    count = whole("partition", stages, "stages")
    most = real("partition", limit, "limit")
    return list(checked(lambda: native.partition(layers, count, held, most)))


def values_of(op: str, costs: Costs | None, name: str) -> dict[str, list[float]]:
    """Return costs as the library takes them: lists by name, none if not given."""
    return {} if costs is None else instance(op, costs, Costs, name).values()


def limits_of(op: str, limit: float | Sequence[float] | None) -> list[float]:
    """Return limits as the library takes them: none, one, or one per rank."""
    if limit is None:
        return []
    if not isinstance(limit, Sequence) or isinstance(limit, str):
        return [real(op, limit, "memory_limit")]
    if not limit:
        raise ValueError(
            f"{op}: expected one limit, or one for each rank, but got none "
            "(argument 'memory_limit')"
        )
    return [real(op, count, "memory_limit") for count in limit]


def _chosen(value: int | str | None, unset: str | None, name: str, least: int) -> int:
    """Return a number for the library, which reads 0 as not given."""
    if value == unset:
        return 0
    number = least - 1
    if value is not None and not isinstance(value, str):
        number = whole("plan", value, name)
    if number < least:
        wanted = f"{name} of at least {least}" + (f" or {unset!r}" if unset else "")
        raise ValueError(
            f"plan: expected {wanted}, but got {value!r} (argument '{name}')"
        )
    return number
