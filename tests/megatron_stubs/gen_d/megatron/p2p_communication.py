# SPDX-License-Identifier: Apache-2.0
"""Messages between neighbours."""

from megatron_stubs.runs import exchange


def recv_forward(tensor_shape=None, dtype_=None, timers=None):
    return exchange(True, None, tensor_shape, dtype_, timers)


def recv_backward(tensor_shape=None, timers=None):
    return exchange(False, None, tensor_shape, None, timers)


def send_forward(output_tensor, tensor_shape=None, dtype_=None, timers=None):
    exchange(True, output_tensor, timers=timers)


def send_backward(input_tensor_grad, tensor_shape=None, timers=None):
    exchange(False, input_tensor_grad, timers=timers)
