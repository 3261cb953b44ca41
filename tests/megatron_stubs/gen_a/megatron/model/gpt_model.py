# SPDX-License-Identifier: Apache-2.0
"""A decoder, which takes tokens or what the stage before sent."""

from megatron_stubs.models import GPTBase


class GPTModel(GPTBase):
    def forward(self, input_ids, position_ids, attention_mask, labels=None):
        first = hasattr(self.language_model, "embedding")
        self.language_model.input_tensor = None if first else input_ids
        return super().forward(input_ids, position_ids, attention_mask, labels)
