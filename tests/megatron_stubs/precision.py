# SPDX-License-Identifier: Apache-2.0
"""Loss scales, gradient norms and copies for the stand-ins' optimizers."""

from __future__ import annotations

import torch
import torch.distributed as dist
from megatron_stubs.groups import get_model_parallel_group


class ConstantGradScaler:
    """A loss scale that stays."""

    def __init__(self, initial_scale):
        self._scale = torch.tensor([float(initial_scale)])

    @property
    def scale(self):
        return self._scale

    @property
    def inv_scale(self):
        return self._scale.double().reciprocal().float()

    def update(self, found_inf):
        """Do nothing."""

    def state_dict(self):
        return {"scale": self._scale}

    def load_state_dict(self, state_dict):
        self._scale = state_dict["scale"]


class DynamicGradScaler(ConstantGradScaler):
    """A loss scale that falls at overflows and else grows."""

    def __init__(
        self,
        initial_scale,
        min_scale,
        growth_factor,
        backoff_factor,
        growth_interval,
        hysteresis,
    ):
        super().__init__(initial_scale)
        self.min_scale = torch.tensor([float(min_scale)])
        self.growth_factor, self.backoff_factor = growth_factor, backoff_factor
        self.growth_interval, self.hysteresis = growth_interval, hysteresis
        self._growth_tracker, self._hysteresis_tracker = 0, hysteresis

    def update(self, found_inf):
        """Move the scale after a step."""
        if found_inf:
            self._growth_tracker = 0
            self._hysteresis_tracker -= 1
            if self._hysteresis_tracker <= 0:
                smaller = self._scale * self.backoff_factor
                self._scale = torch.max(smaller, self.min_scale)
            return
        self._growth_tracker += 1
        if self._growth_tracker == self.growth_interval:
            self._growth_tracker = 0
            self._hysteresis_tracker = self.hysteresis
            self._scale = self._scale * self.growth_factor


def split_weights(modules):
    """Return parameter groups with and without weight decay."""
    some, none = {"params": []}, {"params": [], "weight_decay": 0.0}
    for module in modules:
        for parameter in module.parameters():
            (some if parameter.dim() > 1 else none)["params"].append(parameter)
    return some, none


def get_param_groups(modules, no_weight_decay_cond, scale_lr_cond, lr_mult):
    """Return groups by whether weights decay and have a learning rate of their own."""
    groups = {}
    for module in modules:
        for name, parameter in module.named_parameters():
            decays = parameter.dim() > 1
            if no_weight_decay_cond is not None:
                decays = not no_weight_decay_cond(name, parameter)
            scaled = scale_lr_cond is not None and scale_lr_cond(name, parameter)
            groups.setdefault((scaled, not decays), []).append(parameter)
    return [
        {
            "params": parameters,
            "wd_mult": float(not key[1]),
            "lr_mult": lr_mult if key[0] else 1.0,
        }
        for key, parameters in sorted(groups.items())
    ]


def main_copies(optimizer, dtypes):
    """Let an optimizer work on fp32 copies; return pairs of model's and own.

    Args:
        optimizer: the optimizer between wrapper and parameters.
        dtypes: which parameters get a copy.
    """
    pairs = []
    for group in optimizer.param_groups:
        for number, parameter in enumerate(group["params"]):
            if parameter.dtype in dtypes:
                main = parameter.detach().clone().float().requires_grad_()
                main.shared = getattr(parameter, "shared", False)
                group["params"][number] = main
                pairs.append((parameter, main))
    return pairs


def parameters_of(optimizer):
    return [p for group in optimizer.param_groups for p in group["params"]]


def unscale(gradients, inverse, group):
    """Multiply gradients; return whether any rank has one that is not finite."""
    found = torch.zeros(1)
    for gradient in gradients:
        gradient.mul_(inverse)
        if not gradient.isfinite().all():
            found.fill_(1.0)
    dist.all_reduce(found, op=dist.ReduceOp.MAX, group=group)
    return bool(found.item())


def _own_gradients(parameters):
    """Yield gradients, of tied weights once only."""
    for parameter in parameters:
        if parameter.grad is not None and not getattr(parameter, "shared", False):
            yield parameter.grad


def clip_norm(parameters, limit, group):
    """Scale gradients down to a norm; return the norm that they had."""
    total = torch.zeros(1)
    for gradient in _own_gradients(parameters):
        total += gradient.float().norm() ** 2
    dist.all_reduce(total, group=group)
    norm = total.item() ** 0.5
    factor = limit / (norm + 1.0e-6)
    if factor < 1.0:
        for parameter in parameters:
            if parameter.grad is not None:
                parameter.grad.mul_(factor)
    return norm


def count_zeros(parameters, group):
    total = torch.zeros(1)
    for gradient in _own_gradients(parameters):
        total += (gradient == 0).sum()
    dist.all_reduce(total, group=group)
    return total.item()


class OptimizerBase:
    """A wrapper's common part: what the optimizer inside has, and the end of a step."""

    def __init__(self, optimizer, clip_grad, log_num_zeros_in_grad=False):
        self.optimizer = optimizer
        self.clip_grad = clip_grad
        self.log_num_zeros_in_grad = log_num_zeros_in_grad
        self._scale = torch.tensor([1.0])

    param_groups = property(lambda self: self.optimizer.param_groups)
    state = property(lambda self: self.optimizer.state)

    def get_loss_scale(self):
        return self._scale

    def scale_loss(self, loss):
        return self.get_loss_scale() * loss

    def reload_model_params(self):
        pass

    def zero_grad(self, set_to_none=True):
        self.optimizer.zero_grad(set_to_none)

    def state_dict(self):
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict):
        self.optimizer.load_state_dict(state_dict)

    def finish(self):
        """Clip, count and step; return norm and number of zeros."""
        parameters = parameters_of(self.optimizer)
        group = get_model_parallel_group()
        norm = zeros = None
        if self.clip_grad > 0.0:
            norm = clip_norm(parameters, self.clip_grad, group)
        if self.log_num_zeros_in_grad:
            zeros = count_zeros(parameters, group)
        self.optimizer.step()
        return norm, zeros

    def take_main_grads(self, keep):
        """Let ``grad`` be what data parallelism has summed up."""
        for parameter in parameters_of(self.optimizer):
            parameter.grad = parameter.main_grad
            if not keep:
                parameter.main_grad = None


class HalfOptimizerBase(OptimizerBase):
    """One that steps on fp32 copies, unless gradients are not finite."""

    def copy_parameters(self, grad_scaler):
        self.grad_scaler = grad_scaler
        self._pairs = main_copies(self.optimizer, (torch.half, torch.bfloat16))

    def zero_grad(self, set_to_none=True):
        self.optimizer.zero_grad(set_to_none)
        for parameter, _ in self._pairs:
            parameter.grad = None

    def get_loss_scale(self):
        return self._scale if self.grad_scaler is None else self.grad_scaler.scale

    def reload_model_params(self):
        for parameter, main in self._pairs:
            main.data.copy_(parameter.data)

    @torch.no_grad()
    def step_copies(self):
        """Return norm and number of zeros; None if nothing was done."""
        for parameter, main in self._pairs:
            gradient = getattr(parameter, "main_grad", parameter.grad)
            main.grad = None if gradient is None else gradient.float()
            parameter.grad = None
        if self.grad_scaler is not None:
            gradients = [main.grad for _, main in self._pairs if main.grad is not None]
            inverse = self.grad_scaler.inv_scale
            found = unscale(gradients, inverse, get_model_parallel_group())
            self.grad_scaler.update(found)
            if found:
                return None
        result = self.finish()
        for parameter, main in self._pairs:
            parameter.data.copy_(main.data)
        return result

    def state_dict(self):
        state = {"optimizer": self.optimizer.state_dict()}
        if self.grad_scaler is not None:
            state["grad_scaler"] = self.grad_scaler.state_dict()
        state["fp32_from_fp16_params"] = [main for _, main in self._pairs]
        return state

    def load_state_dict(self, state_dict):
        self.optimizer.load_state_dict(state_dict["optimizer"])
        if self.grad_scaler is not None:
            self.grad_scaler.load_state_dict(state_dict["grad_scaler"])
        saved = state_dict["fp32_from_fp16_params"]
        for (_, main), values in zip(self._pairs, saved, strict=True):
            main.data.copy_(values.data)


def scaler_of(args):
    """Return the loss scale that the options ask for."""
    if args.loss_scale:
        return ConstantGradScaler(args.loss_scale)
    if not args.fp16:
        return None
    return DynamicGradScaler(
        initial_scale=args.initial_loss_scale,
        min_scale=args.min_loss_scale,
        growth_factor=2.0,
        backoff_factor=0.5,
        growth_interval=args.loss_scale_window,
        hysteresis=args.hysteresis,
    )
