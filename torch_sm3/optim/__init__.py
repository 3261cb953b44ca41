# SPDX-License-Identifier: Apache-2.0
"""SM3, an adaptive optimizer whose state is rows + columns."""

from torch_sm3.optim._sm3 import SM3, sm3

__all__ = ["SM3", "sm3"]
