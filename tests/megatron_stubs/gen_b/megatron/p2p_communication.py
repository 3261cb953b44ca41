# SPDX-License-Identifier: Apache-2.0
"""Messages between neighbours."""

from megatron_stubs.runs import exchange


def recv_forward(
    tensor_shape=None,
    override_scatter_gather_tensors_in_pipeline=False,
    dtype_=None,
    timers=None,
):
    return exchange(True, None, tensor_shape, dtype_, timers)


def recv_backward(timers=None):
    return exchange(False, timers=timers)


def send_forward(
    output_tensor,
    timers=None,
    override_scatter_gather_tensors_in_pipeline=False,
    dtype_=None,
):
    exchange(True, output_tensor, timers=timers)


def send_backward(input_tensor_grad, timers=None):
    exchange(False, input_tensor_grad, timers=timers)
