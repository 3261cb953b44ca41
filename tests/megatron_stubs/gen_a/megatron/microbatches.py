# SPDX-License-Identifier: Apache-2.0
"""How many microbatches a step has."""

from megatron_stubs.shared import ConstantNumMicroBatches
