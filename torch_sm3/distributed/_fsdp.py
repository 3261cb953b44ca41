# SPDX-License-Identifier: Apache-2.0
"""adasum_fsdp_hook: Adasum between replicas whose parameters FSDP2 shards."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch import Tensor

from torch_sm3.distributed._options import refuse
from torch_sm3.distributed._state import AdasumState

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule

_OP = "adasum_fsdp_hook"


def _check_module(module: Any) -> None:
    # At first use: it takes a second to import.
    from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

    if isinstance(module, FullyShardedDataParallel):
        raise NotImplementedError(
            f"{_OP}: expected a module of FSDP2 (torch.distributed.fsdp.fully_shard), "
            "but got FullyShardedDataParallel, which is FSDP1 (argument 'module')"
        )
    if not isinstance(module, FSDPModule):
        refuse(_OP, "an FSDPModule", type(module).__name__, "module", TypeError)


def _param_group(module: FSDPModule) -> Any:
    """Return what FSDP communicates at once for a module, None without parameters."""
    state = module._get_fsdp_state()
    # torch 2.13 may part a module's parameters between meshes; before, there is one.
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:
        groups = [state._fsdp_param_group] if state._fsdp_param_group else []
    if len(groups) > 1:
        refuse(_OP, "a module with one mesh", f"{len(groups)} meshes", "module")
    return groups[0] if groups else None


def _check_mesh(state: AdasumState, group: Any) -> None:
    info = group.mesh_info
    if getattr(info, "replicate_mesh_dim", None) is not None:
        refuse(
            _OP,
            "a 1-D mesh of shards, since HSDP reduces before the hook runs",
            f"the mesh {info.mesh}",
            "module",
        )
    shards = dist.get_process_group_ranks(info.shard_process_group)
    given = [dist.get_rank()]
    if state.shard_group is not None:
        given = dist.get_process_group_ranks(state.shard_group)
    if sorted(given) != sorted(shards):
        refuse(
            _OP,
            f"a state with the shard_group of the module's mesh, ranks {shards}",
            f"one with ranks {given}",
            "state",
        )


def adasum_fsdp_hook(
    state: AdasumState, module: FSDPModule
) -> Callable[[Tensor], None]:
    r"""Return an all-reduce hook that combines the gradients of FSDP2 replicas.

    FSDP2 shards the module over a 1-D mesh and averages gradients over it, so that the
    leaf of a replica is the mean over its shards. Each shard is exchanged with the
    ranks of ``state.process_group``, which hold the same one, and inner products are
    added over ``state.shard_group``, so that all shards use the coefficients of the
    whole parameter:

    .. math::
        G_{ij} = \sum_{\text{shards } s} \langle g_i^{(s)}, g_j^{(s)} \rangle

    Layers are the parameters, padded as FSDP pads them: zeros add nothing. Call
    :meth:`AdasumState.advance` after each synchronised backward. For micro-batches use
    ``set_requires_gradient_sync(False)``; the result of the last one is added to a
    gradient that is already there.

    Args:
        state: with the replicas as ``process_group``, the shards as ``shard_group``.
        module: an FSDP module, whose hook this becomes; its submodules that are FSDP
            modules need their own.

    Returns:
        A function for ``module.set_all_reduce_hook``. It blocks on the CPU.

    Raises:
        TypeError: if ``state`` is no :class:`AdasumState`, or ``module`` no
            FSDP module.
        NotImplementedError: for modules of FSDP1.
        ValueError: for a mesh with a dimension of replicas (HSDP), or with shards
            other than ``state.shard_group``.
        RuntimeError: from the hook, if some parameters of the module had no gradient.

    Example::

        >>> import torch, torch.distributed as dist
        >>> from torch.distributed.device_mesh import init_device_mesh
        >>> from torch.distributed.fsdp import FSDPModule, fully_shard
        >>> store = dist.HashStore()
        >>> dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        >>> mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("replica", "shard"))
        >>> model = fully_shard(torch.nn.Linear(4, 2), mesh=mesh["shard"])
        >>> state = AdasumState(mesh.get_group("replica"))
        >>> for part in model.modules():
        ...     if isinstance(part, FSDPModule):
        ...         part.set_all_reduce_hook(adasum_fsdp_hook(state, part))
        >>> model(torch.ones(3, 4)).sum().backward()
        >>> state.advance()
        >>> state.close()
        >>> dist.destroy_process_group()

    ``set_all_reduce_hook`` is described at
    https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html.
    """
    if not isinstance(state, AdasumState):
        refuse(_OP, "an AdasumState", type(state).__name__, "state", TypeError)
    _check_module(module)
    group = _param_group(module)
    if group is not None:
        state._bound(_OP)
        _check_mesh(state, group)

    def all_reduce(gradients: Tensor) -> None:
        parameters = [p for p in group.fsdp_params if p.sharded_param.requires_grad]
        sizes = [p.padded_sharded_param_size.numel() for p in parameters]
        if sum(sizes) != gradients.numel():
            raise RuntimeError(
                f"{_OP}: expected gradients of all {len(sizes)} parameters, "
                f"{sum(sizes)} elements, but got {gradients.numel()}; with unused "
                "parameters call module.set_reduce_scatter_unused_params(True)"
            )
        binding, reduction = state._bound(_OP), state._reduction
        keys = [parameter.sharded_param for parameter in parameters]
        layout = reduction.plans.of_sizes(_OP, sizes, keys)
        reduction.submit(binding, layout, [gradients], gradients, _OP).wait()

    return all_reduce
