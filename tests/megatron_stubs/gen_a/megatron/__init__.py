# SPDX-License-Identifier: Apache-2.0
"""A stand-in for Megatron-LM v2.0."""

from .global_vars import (
    get_adlr_autoresume,
    get_args,
    get_current_global_batch_size,
    get_num_microbatches,
    get_tensorboard_writer,
    get_timers,
    is_last_rank,
    print_rank_0,
    print_rank_last,
    update_num_microbatches,
)
from .initialize import initialize
