# SPDX-License-Identifier: Apache-2.0
"""Small tools."""

from megatron_stubs.tools import (
    average_losses_across_data_parallel_group,
    check_adlr_autoresume_termination,
    report_memory,
)
