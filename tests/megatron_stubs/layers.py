# SPDX-License-Identifier: Apache-2.0
"""The mathematics of a tiny transformer, the same for all stand-ins.

Between stages go tensors of (sequence, batch, hidden). Layers are named by their number
in the whole model, so that a weight has one name however the model is split.
"""

from __future__ import annotations

import re
import zlib

import torch
import torch.nn.functional as F
from torch import nn

HIDDEN, HEADS, VOCABULARY, POSITIONS = 8, 2, 16, 8


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.query = nn.Linear(HIDDEN, HIDDEN)
        self.key_value = nn.Linear(HIDDEN, 2 * HIDDEN)
        self.dense = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x, memory, causal):
        q = self.query(x)
        k, v = self.key_value(memory).chunk(2, dim=-1)
        q, k, v = (
            t.reshape(*t.shape[:2], HEADS, -1).permute(1, 2, 0, 3) for t in (q, k, v)
        )
        scores = (q @ k.transpose(-1, -2)) * (HIDDEN // HEADS) ** -0.5
        if causal:
            mask = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
            scores = scores.masked_fill(mask, -1000.0)
        mixed = scores.softmax(-1) @ v
        return self.dense(mixed.permute(2, 0, 1, 3).reshape(x.shape))


class Layer(nn.Module):
    """One layer; a decoder's also looks at what an encoder returned."""

    def __init__(self, causal=True, cross=False):
        super().__init__()
        self.causal = causal
        self.first_norm = nn.LayerNorm(HIDDEN)
        self.attention = Attention()
        if cross:
            self.cross_norm = nn.LayerNorm(HIDDEN)
            self.cross_attention = Attention()
        self.second_norm = nn.LayerNorm(HIDDEN)
        self.up = nn.Linear(HIDDEN, 2 * HIDDEN)
        self.down = nn.Linear(2 * HIDDEN, HIDDEN)

    def forward(self, x, memory=None):
        y = self.first_norm(x)
        x = x + self.attention(y, y, self.causal)
        if memory is not None:
            x = x + self.cross_attention(self.cross_norm(x), memory, False)
        return x + self.down(F.gelu(self.up(self.second_norm(x))))


class Stack(nn.Module):
    """Layers by their number in the whole model."""

    def __init__(self, numbers, **options):
        super().__init__()
        self.layers = nn.ModuleDict({str(n): Layer(**options) for n in numbers})

    def forward(self, x, memory=None):
        for layer in self.layers.values():
            x = layer(x, memory)
        return x


class Embedding(nn.Module):
    def __init__(self):
        super().__init__()
        self.word_embeddings = nn.Embedding(VOCABULARY, HIDDEN)
        self.position_embeddings = nn.Embedding(POSITIONS, HIDDEN)

    def forward(self, tokens):
        places = torch.arange(tokens.shape[1])
        x = self.word_embeddings(tokens) + self.position_embeddings(places)
        return x.transpose(0, 1).contiguous()


class Tied(nn.Module):
    """A model whose last stage has the word embedding of the first one."""

    share_word_embeddings = True

    def tie(self, pre_process, post_process):
        """Make the head: the first stage's own weight, or a copy that is shared."""
        self.post_process = post_process
        if post_process:
            self.final_norm = nn.LayerNorm(HIDDEN)
        if post_process and not pre_process:
            self.word_embeddings = nn.Embedding(VOCABULARY, HIDDEN)
            self.word_embeddings.weight.shared = True
        fill(self)

    def word_embeddings_weight(self):
        own = getattr(self, "word_embeddings", None)
        if own is not None:
            return own.weight
        return self.language_model.embedding.word_embeddings.weight

    def head(self, x, labels):
        """Return the loss of each token, (batch, sequence)."""
        logits = F.linear(self.final_norm(x), self.word_embeddings_weight())
        losses = F.cross_entropy(
            logits.float().permute(1, 2, 0), labels, reduction="none"
        )
        return losses.to(logits.dtype)


class LanguageModel(nn.Module):
    """A decoder's stage: the embedding on the first one, and its layers."""

    def __init__(self, layers, pre_process):
        super().__init__()
        if pre_process:
            self.embedding = Embedding()
        self.encoder = Stack(layers)
        self.input_tensor = None

    def forward(self, tokens):
        x = self.embedding(tokens) if self.input_tensor is None else self.input_tensor
        return self.encoder(x)


class EncoderDecoder(nn.Module):
    """A stage of an encoder and of a decoder, either of which may be missing.

    Args:
        encoder: numbers of its layers, or None.
        decoder: numbers of its layers, or None.
        pre_process: whether there is an embedding.
        turned: whether the encoder's last stage sends (batch, sequence, hidden).
    """

    def __init__(self, encoder, decoder, pre_process, post_process, turned):
        super().__init__()
        if pre_process:
            self.embedding = Embedding()
        if encoder is not None:
            self.encoder = Stack(encoder, causal=False)
        if decoder is not None:
            self.decoder = Stack(decoder, cross=True)
        self.ends_encoder = encoder is not None and post_process
        self.turned = turned
        self.input_tensor = [None]

    def forward(self, tokens, decoder_tokens):
        """Return the hidden state that the next stage gets, or the head."""
        received = self.input_tensor
        memory = received[-1]
        if hasattr(self, "encoder"):
            x = self.embedding(tokens) if memory is None else memory
            memory = self.encoder(x)
            if self.turned and self.ends_encoder:
                memory = memory.transpose(0, 1).contiguous()
        if not hasattr(self, "decoder"):
            return memory
        x = received[0] if len(received) == 2 else self.embedding(decoder_tokens)
        return self.decoder(x, memory.transpose(0, 1) if self.turned else memory)


@torch.no_grad()
def fill(module):
    """Give weights that depend on their name only, whatever the split."""
    for name, parameter in module.named_parameters():
        name = re.sub(r"^.*(word_embeddings|position_embeddings)", r"\1", name)
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        value = torch.randn(parameter.shape, generator=generator) * 0.2
        parameter.copy_(value + 1.0 if "norm.weight" in name else value)
