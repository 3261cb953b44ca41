# SPDX-License-Identifier: Apache-2.0
"""An encoder and a decoder."""

from megatron_stubs.models import T5Base


class T5Model(T5Base):
    # Between encoder and decoder goes (batch, sequence, hidden).
    turned = True
