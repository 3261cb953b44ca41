# SPDX-License-Identifier: Apache-2.0
"""Set up arguments and groups."""

from megatron_stubs import tools
from megatron_stubs.support import ARGUMENTS, LATER, Timers, arguments
from megatron_stubs.tools import write_args_to_tensorboard

_OPTIONS = {
    "use_contiguous_buffers_in_ddp": False,
}


def initialize(writer=None, **given):
    """Set up everything by a few options."""
    args = arguments(given, ARGUMENTS, LATER, _OPTIONS)
    tools.initialize(args, writer, Timers())
