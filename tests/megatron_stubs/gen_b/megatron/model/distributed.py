# SPDX-License-Identifier: Apache-2.0
"""Data parallelism."""

from megatron_stubs.models import BufferedBase


class DistributedDataParallel(BufferedBase):
    """Adds gradients up in buffers."""
