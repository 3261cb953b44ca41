# SPDX-License-Identifier: Apache-2.0
"""Train a model that is cut into stages over several ranks.

A :class:`Schedule` says what every rank does, :func:`plan` makes one, and a
:class:`PipelineRunner` runs it with framed messages over Gloo.
"""

from torch_sm3.pipeline._faults import PipelineError, ProtocolError
from torch_sm3.pipeline._result import OptimResult, StepResult
from torch_sm3.pipeline.costs import Costs
from torch_sm3.pipeline.planner import kinds, partition, plan
from torch_sm3.pipeline.plot import Chart, plot
from torch_sm3.pipeline.profile import profile
from torch_sm3.pipeline.runner import PipelineRunner
from torch_sm3.pipeline.schedule import Action, Candidate, Schedule, ScheduleError
from torch_sm3.pipeline.simulator import (
    Report,
    Simulation,
    live_bytes,
    simulate,
    verify,
)
from torch_sm3.pipeline.stage import Stage
from torch_sm3.pipeline.validate import PostValidator

__all__ = [
    "Action",
    "Candidate",
    "Chart",
    "Costs",
    "OptimResult",
    "PipelineError",
    "PipelineRunner",
    "PostValidator",
    "ProtocolError",
    "Report",
    "Schedule",
    "ScheduleError",
    "Simulation",
    "Stage",
    "StepResult",
    "kinds",
    "live_bytes",
    "partition",
    "plan",
    "plot",
    "profile",
    "simulate",
    "verify",
]

# Tracebacks and pickles call the errors by their public names.
for _error in (ScheduleError, PipelineError, ProtocolError):
    _error.__module__ = __name__
del _error
