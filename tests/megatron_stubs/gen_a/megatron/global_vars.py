# SPDX-License-Identifier: Apache-2.0
"""What all modules share."""

from megatron_stubs.shared import *
