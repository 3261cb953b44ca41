# SPDX-License-Identifier: Apache-2.0
"""Set up arguments and groups."""

from megatron_stubs import tools
from megatron_stubs.support import ARGUMENTS, Timers, arguments
from megatron_stubs.tools import write_args_to_tensorboard


def initialize(writer=None, **given):
    """Set up everything by a few options."""
    tools.initialize(arguments(given, ARGUMENTS), writer, Timers())
