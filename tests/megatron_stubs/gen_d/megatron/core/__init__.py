# SPDX-License-Identifier: Apache-2.0
"""What later became a package of its own."""

from megatron.core import parallel_state

# The name that modules import.
mpu = parallel_state
