# SPDX-License-Identifier: Apache-2.0
"""CSV that the installed ``torch.distributed.pipelining`` writes.

Its schedules want stages, of which they look at a few numbers only; a process group
is not needed to write the order down.
"""

from __future__ import annotations

import csv
import io
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch.distributed.pipelining import schedules
from torch.distributed.pipelining.stage import _PipelineStageBase

LOOPED = (
    "ScheduleLoopedBFS",
    "ScheduleInterleaved1F1B",
    "ScheduleInterleavedZeroBubble",
)
IN_A_V = ("ScheduleZBVZeroBubble", "ScheduleDualPipeV")

_Stub = type(
    "_Stub",
    (_PipelineStageBase,),
    {
        name: lambda self, *args, **kwargs: None
        for name in _PipelineStageBase.__abstractmethods__
    },
)


def _stage(index: int, stages: int, p: int) -> Any:
    stage = _Stub.__new__(_Stub)
    stage.stage_index = index
    stage.num_stages = stages
    stage.group_size = p
    stage.group_rank = 0
    stage.group = None
    stage.submod = torch.nn.Linear(1, 1)
    stage.has_backward = True
    stage.device = torch.device("cpu")
    return stage


def _loss(output: Any, target: Any) -> Any:
    return output


def torch_csv(name: str, p: int, m: int, v: int = 2, *, messages: bool = False) -> str:
    """Return the file that a schedule of several stages per rank writes.

    Args:
        name: its class.
        p: ranks.
        m: microbatches.
        v: stages per rank.
        messages: with communication actions.
    """
    own = [0, 2 * p - 1] if name in IN_A_V else [chunk * p for chunk in range(v)]
    stages = [_stage(index, len(own) * p, p) for index in own]
    schedule = getattr(schedules, name)(stages, m, loss_fn=_loss)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "schedule.csv"
        schedule._dump_csv(path, "compute_comms" if messages else "compute_only")
        with path.open(newline="") as file:
            return file.read()


def torch_single_csv(name: str, p: int, m: int) -> str:
    """Return the order of a schedule of one stage per rank, written as the others do.

    Args:
        name: its class.
        p: ranks.
        m: microbatches.
    """
    schedule = getattr(schedules, name)(_stage(0, p, p), m, loss_fn=_loss)
    file = io.StringIO()
    csv.writer(file).writerows(schedule._get_pipeline_order().values())
    return file.getvalue()


def torch_reads(text: str) -> list[list[str]]:
    """Return torch's own text of each cell after torch has read it.

    Args:
        text: what stands in a file.
    """
    return [
        [str(schedules._Action.from_str(cell) or "") for cell in row]
        for row in csv.reader(io.StringIO(text))
    ]
