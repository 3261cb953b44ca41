# SPDX-License-Identifier: Apache-2.0
"""An encoder and a decoder."""

from megatron_stubs.models import T5Base as T5Model
