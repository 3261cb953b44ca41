# SPDX-License-Identifier: Apache-2.0
"""Set up arguments and groups."""

from megatron_stubs import tools
from megatron_stubs.support import ARGUMENTS, LATER, arguments
from megatron_stubs.tools import write_args_to_tensorboard

from .timers import Timers

_OPTIONS = {
    "log_world_size_to_tensorboard": True,
    "use_contiguous_buffers_in_local_ddp": True,
    "empty_unused_memory_level": 0,
    "exit_signal_handler": False,
    "use_distributed_optimizer": False,
    "vision_pretraining": False,
    "barrier_with_L1_time": True,
    "timing_log_level": 0,
}


def initialize(writer=None, **given):
    """Set up everything by a few options."""
    args = arguments(given, ARGUMENTS, LATER, _OPTIONS)
    tools.initialize(args, writer, Timers(args.timing_log_level, "minmax"))
