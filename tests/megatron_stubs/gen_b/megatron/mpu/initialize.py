# SPDX-License-Identifier: Apache-2.0
"""Groups on Gloo."""

from megatron_stubs.groups import *
