# SPDX-License-Identifier: Apache-2.0
"""What a runner is made of: stages, rows, groups, ties and reductions."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist

from torch_sm3.pipeline._agree import Agreement, agree
from torch_sm3.pipeline._collective import Collective
from torch_sm3.pipeline._control import Control
from torch_sm3.pipeline._given import Needs
from torch_sm3.pipeline._gradients import Gradients
from torch_sm3.pipeline._lanes import open_lanes
from torch_sm3.pipeline._links import Links, new_group, patience, route_link
from torch_sm3.pipeline._loss import may_divide
from torch_sm3.pipeline._notice import Notice
from torch_sm3.pipeline._options import Options
from torch_sm3.pipeline._random import devices_of
from torch_sm3.pipeline._reduce import Hook, Reducer
from torch_sm3.pipeline._rows import (
    forward_of,
    reduction_order,
    row_of,
    with_collectives,
)
from torch_sm3.pipeline._step import Machines
from torch_sm3.pipeline._ties import Tie
from torch_sm3.pipeline.schedule import Action, Schedule
from torch_sm3.pipeline.stage import Stage


class Parts:
    """Everything of a runner that does not change from step to step.

    Making it is collective.

    Args:
        stages: the stages of this rank.
        schedule: what every rank does.
        group: the ranks.
        loss_fn: loss of the last stage.
        options: equal on all ranks.
        data_parallel: the ranks with the same stages.
        hook: what reduces in place of ``options.reduce``.

    Attributes:
        rank: this rank.
        key: name of the group that was given, or None.
        placement: rank of each stage.
        microbatches: their number.
        schedule: what every rank does, with its messages.
        stages: the stages of this rank by index.
        routes: source and target of values that skip stages.
        kwargs: names that any stage takes.
        row: actions of a step.
        training: whether there are backwards.
        is_hub: whether this rank has the last stage.
        needs: which data this rank uses.
        devices: CUDA devices of the stages.
        links: links to the other ranks, or None.
        machines: run the rows of this rank.
        control: exchange of small values with them.
        replicas: the ranks with the same stages, or None.
        notice: what ended the runner, for all replicas, or None.
        shrink: by how much the reduction of sums makes them too small.
        gradients: ties and reductions.
    """

    def __init__(
        self,
        stages: Sequence[Stage],
        schedule: Schedule,
        group: dist.ProcessGroup | None,
        loss_fn: Callable[[Any, Any], Any] | None,
        options: Options,
        data_parallel: dist.ProcessGroup | None,
        hook: Hook | None,
    ) -> None:
        distributed = dist.is_available() and dist.is_initialized()
        size = dist.get_world_size(group) if distributed else 1
        own = new_group(group, options.timeout) if size > 1 else None
        self.rank = dist.get_rank(own) if own is not None else 0
        for stage in stages if isinstance(stages, Sequence) else ():
            ddp = getattr(stage, "ddp", None)
            if ddp is not None and data_parallel is None:
                data_parallel = ddp.process_group
        try:
            known = agree(
                own,
                self.rank,
                size,
                stages,
                schedule,
                loss_fn,
                options,
                data_parallel,
                hook,
            )
        except BaseException:
            if own is not None:
                dist.destroy_process_group(own)
            raise
        self.key: str | None = None
        if own is not None:
            self.key = (group or dist.distributed_c10d._get_default_group()).group_name
        self.stages = {s.index: s for s in sorted(stages, key=lambda s: s.index)}
        self.placement = schedule.placement
        self.microbatches = schedule.microbatches
        self.schedule = known.schedule
        self.routes = known.routes
        self.kwargs = known.kwargs
        self.row = row_of(known.schedule, self.rank)
        self.training = any(action.op in ("B", "I") for action in self.row)
        self.is_hub = self.rank == self.placement[-1]
        self.needs = Needs.of(self.stages, self.is_hub and loss_fn is not None)
        self.devices = devices_of(stage.module for stage in self.stages.values())
        self._schedule = schedule
        self._forwards: dict[int, list[Action]] = {}
        self.links: Links | None = None
        if own is not None:
            hub = self.placement[-1]
            first = [self.placement.index(rank) for rank in range(size)]
            lanes = open_lanes(
                group,
                own,
                self.placement,
                self.routes,
                [stage.module for stage in self.stages.values()],
                patience(options.timeout),
            )
            self.links = Links(
                own,
                options.timeout,
                options.max_pending,
                hub,
                first,
                options.link_delay,
                lanes,
            )
        splits = {index: stage.split for index, stage in self.stages.items()}
        fused = [index for index, stage in self.stages.items() if stage.fused]
        self.machines = Machines(
            self.rank,
            self.placement,
            self.routes,
            self.links,
            splits,
            {i: list(stage.module.parameters()) for i, stage in self.stages.items()},
            options.max_pending,
            fused,
        )
        self.control = Control(self.links, self.rank, size, self.placement[-1])
        self.replicas: Collective | None = None
        self.shrink = 1
        self.gradients = self._gradients(known, group, options, data_parallel, hook)
        self.notice = self._notice()

    def forward_row(self, microbatches: int) -> list[Action]:
        """Return the actions of an eval.

        Args:
            microbatches: their number.
        """
        if microbatches not in self._forwards:
            forward = forward_of(self._schedule, microbatches, self.routes)
            self._forwards[microbatches] = row_of(forward.lower(), self.rank)
        return self._forwards[microbatches]

    @property
    def replica(self) -> int:
        """Number of this replica among those of ``replicas``."""
        return 0 if self.replicas is None else self.replicas.rank

    def _notice(self) -> Notice | None:
        """Agree on a key with all ranks of all replicas: those of the first choose."""
        key = ""
        if self.replicas is not None:
            key = str(self.replicas.gather(uuid.uuid4().hex)[0])
        # The first of the ranks of a replica that has others beside it.
        key = next(filter(None, self.control.exchange(key)[0]), "")
        if not key:
            return None
        notice = Notice(key)
        if self.replicas is not None:
            self.replicas.notice = notice
        return notice

    def close(self) -> None:
        """End the links and give the groups back."""
        for end in (self.links, self.replicas):
            if end is not None:
                end.close()

    def _gradients(
        self,
        known: Agreement,
        group: dist.ProcessGroup | None,
        options: Options,
        data_parallel: dist.ProcessGroup | None,
        hook: Hook | None,
    ) -> Gradients:
        ties = {
            number: Tie(
                # Behind the channels of the routes.
                route_link(len(known.routes) + number, backward=False),
                members,
                self.rank,
                self.stages,
                self.links,
            )
            for number, members in enumerate(known.ties.values())
            if any(member.rank == self.rank for member in members)
        }
        for tie in ties.values():
            tie.broadcast()
        order = reduction_order(self.row) or list(self.stages)
        if self.training:
            places = {number: tie.stage for number, tie in ties.items()}
            self.row = with_collectives(self.row, places, order)
        reducer = None
        if data_parallel is not None and dist.get_world_size(data_parallel) > 1:
            self.replicas = Collective(data_parallel, options.timeout, self.links)
            reducer = Reducer(
                self.replicas,
                options.reduce,
                hook,
                [self.stages[index] for index in order],
                options.loss_reduction == "tokens",
            )
            self.shrink = self.replicas.size if reducer.shrinks_sums else 1
        # Alike on all ranks, so that the bits do not depend on the placement.
        apart = may_divide(options.loss_reduction) or bool(known.ties or reducer)
        return Gradients(self.stages.values(), ties, reducer, apart)
