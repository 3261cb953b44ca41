# SPDX-License-Identifier: Apache-2.0
"""Train a model that is cut into stages over several ranks.

A :class:`Schedule` says what every rank does, :func:`plan` makes one, and a
:class:`PipelineRunner` runs it with framed messages over Gloo.
"""

from torch_sm3.pipeline._faults import PipelineError, ProtocolError
from torch_sm3.pipeline.runner import PipelineRunner, StepResult
from torch_sm3.pipeline.schedule import Action, Schedule, ScheduleError, plan
from torch_sm3.pipeline.stage import Stage

__all__ = [
    "Action",
    "PipelineError",
    "PipelineRunner",
    "ProtocolError",
    "Schedule",
    "ScheduleError",
    "Stage",
    "StepResult",
    "plan",
]
