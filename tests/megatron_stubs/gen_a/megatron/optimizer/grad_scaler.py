# SPDX-License-Identifier: Apache-2.0
"""Loss scales."""

from megatron_stubs.precision import ConstantGradScaler, DynamicGradScaler
