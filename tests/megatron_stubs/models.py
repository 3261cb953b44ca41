# SPDX-License-Identifier: Apache-2.0
"""Stages of a GPT and of an encoder with a decoder, with their wrappers."""

from __future__ import annotations

import enum

import torch
from megatron_stubs import groups as mpu
from megatron_stubs.layers import EncoderDecoder, LanguageModel, Tied
from megatron_stubs.shared import get_args


class ModelType(enum.Enum):
    encoder_or_decoder = 1
    encoder_and_decoder = 2


def _layers(number, stage, stages):
    """Return the numbers of a stage's layers."""
    each = number // stages
    return range(stage * each, (stage + 1) * each)


class GPTBase(Tied):
    """A decoder with tied embeddings."""

    def __init__(self, pre_process=True, post_process=True):
        super().__init__()
        stages = mpu.get_pipeline_model_parallel_world_size()
        stage = mpu.get_pipeline_model_parallel_rank()
        chunks = mpu.get_virtual_pipeline_model_parallel_world_size()
        if chunks is not None:
            stage += mpu.get_virtual_pipeline_model_parallel_rank() * stages
            stages *= chunks
        layers = _layers(get_args().num_layers, stage, stages)
        self.language_model = LanguageModel(layers, pre_process)
        self.tie(pre_process, post_process)

    def forward(self, input_ids, position_ids, attention_mask, labels=None):
        x = self.language_model(input_ids)
        return self.head(x, labels) if self.post_process else x


class GPTModel(GPTBase):
    """The same, which is told what the stage before sent."""

    def set_input_tensor(self, input_tensor):
        if not isinstance(input_tensor, list):
            input_tensor = [input_tensor]
        assert len(input_tensor) == 1, "one tensor for a decoder"
        self.language_model.input_tensor = input_tensor[0]


class T5Base(Tied):
    """An encoder and a decoder with tied embeddings, split at a rank."""

    turned = False

    def __init__(self, pre_process, post_process, add_encoder, add_decoder):
        super().__init__()
        args = get_args()
        stages = mpu.get_pipeline_model_parallel_world_size()
        rank = mpu.get_pipeline_model_parallel_rank()
        first = 0 if stages == 1 else args.pipeline_model_parallel_split_rank
        encoder = decoder = None
        if add_encoder:
            encoder = _layers(args.encoder_num_layers, rank, first or 1)
        if add_decoder:
            decoder = _layers(args.decoder_num_layers, rank - first, stages - first)
        self.language_model = EncoderDecoder(
            encoder, decoder, pre_process, post_process, self.turned
        )
        self.tie(pre_process, add_decoder and post_process)
        if pre_process and rank > 0:
            for weight in self.language_model.embedding.parameters():
                weight.shared = True

    def set_input_tensor(self, input_tensor):
        if not isinstance(input_tensor, list):
            input_tensor = [input_tensor]
        self.language_model.input_tensor = input_tensor

    def forward(self, input_ids, decoder_ids, labels=None):
        x = self.language_model(input_ids, decoder_ids)
        return self.head(x, labels) if self.post_process else x


class HalfBase(torch.nn.Module):
    """A model in half precision, whose ends are in fp32."""

    def __init__(self, module, dtype):
        super().__init__()
        self.dtype = dtype
        self.add_module("module", module.to(dtype))

    def forward(self, *inputs, **kwargs):
        outputs = self.module(*inputs, **kwargs)
        return outputs.float() if mpu.is_pipeline_last_stage() else outputs

    def state_dict(self, *args, **kwargs):
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, state_dict, strict=True):
        self.module.load_state_dict(state_dict, strict=strict)


class BufferedBase(torch.nn.Module):
    """Data parallelism that adds gradients up in buffers."""

    def __init__(
        self, module, accumulate_allreduce_grads_in_fp32, use_contiguous_buffers
    ):
        super().__init__()
        self.module = module
        self._in_fp32 = accumulate_allreduce_grads_in_fp32
        self._grad_buffers = None
        if use_contiguous_buffers:
            self._make_buffers()

    def _make_buffers(self):
        self._grad_buffers, self._accumulators = {}, []
        parts = {}
        for parameter in self.module.parameters():
            dtype = torch.float if self._in_fp32 else parameter.dtype
            parts.setdefault(dtype, []).append(parameter)
            node = parameter.expand_as(parameter).grad_fn.next_functions[0][0]
            node.register_hook(self._hook(parameter))
            self._accumulators.append(node)
        for dtype, parameters in parts.items():
            sizes = [p.numel() for p in parameters]
            flat = self._grad_buffers[dtype] = torch.zeros(sum(sizes), dtype=dtype)
            for p, piece in zip(parameters, flat.split(sizes), strict=True):
                p.main_grad = piece.view_as(p)

    def _hook(self, parameter):
        def accumulate(*_):
            if parameter.grad is not None:
                parameter.main_grad.add_(parameter.grad)
                parameter.grad = None

        return accumulate

    def forward(self, *inputs, **kwargs):
        return self.module(*inputs, **kwargs)

    def state_dict(self, *args, **kwargs):
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, state_dict, strict=True):
        self.module.load_state_dict(state_dict, strict=strict)

    def zero_grad_buffer(self):
        for buffer in self._grad_buffers.values():
            buffer.zero_()

    def allreduce_gradients(self):
        buffers = (self._grad_buffers or {}).values()
        if self._grad_buffers is None:
            buffers = []
            for parameter in self.module.parameters():
                if parameter.grad is not None:
                    parameter.main_grad = parameter.grad
                    buffers.append(parameter.grad)
        for buffer in buffers:
            buffer /= mpu.get_data_parallel_world_size()
            torch.distributed.all_reduce(buffer, group=mpu.get_data_parallel_group())
