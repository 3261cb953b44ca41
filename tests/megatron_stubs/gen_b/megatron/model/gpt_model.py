# SPDX-License-Identifier: Apache-2.0
"""A decoder."""

from megatron_stubs.models import GPTModel
