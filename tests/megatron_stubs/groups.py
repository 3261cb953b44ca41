# SPDX-License-Identifier: Apache-2.0
"""Parallel groups on Gloo, which each stand-in's ``mpu`` hands on by its own names."""

from __future__ import annotations

import torch.distributed as dist


class _State:
    """What is known of this process."""

    def __init__(self) -> None:
        self.pipeline = self.data = self.embedding = self.position = None
        self.ranks: list[int] = []
        self.embedding_ranks: list[int] = []
        self.position_ranks: list[int] = []
        self.virtual_size = self.virtual_rank = self.split = None


_state = _State()


def initialize_model_parallel(
    tensor_model_parallel_size_=1,
    pipeline_model_parallel_size_=1,
    virtual_pipeline_model_parallel_size_=None,
    pipeline_model_parallel_split_rank_=None,
):
    """Make all groups; ranks of one stage follow each other."""
    assert tensor_model_parallel_size_ == 1, "the stand-ins do not split tensors"
    global _state
    _state = state = _State()
    rank, world = dist.get_rank(), dist.get_world_size()
    stages = pipeline_model_parallel_size_
    replicas = world // stages
    state.virtual_size = virtual_pipeline_model_parallel_size_
    state.virtual_rank = None if state.virtual_size is None else 0
    state.split = split = pipeline_model_parallel_split_rank_
    for stage in range(stages):
        ranks = list(range(stage * replicas, (stage + 1) * replicas))
        group = dist.new_group(ranks)
        if rank in ranks:
            state.data = group
    for replica in range(replicas):
        ranks = list(range(replica, world, replicas))
        heads = {0} if split is None else {0, split}
        embedding = [ranks[i] for i in sorted(heads | {stages - 1})]
        position = [ranks[i] for i in sorted(heads)]
        groups = [dist.new_group(r) for r in (ranks, embedding, position)]
        if rank in ranks:
            state.pipeline, state.embedding, state.position = groups
            state.ranks = ranks
            state.embedding_ranks, state.position_ranks = embedding, position


def destroy_model_parallel():
    """Give the groups back."""
    for name in ("pipeline", "data", "embedding", "position"):
        group = getattr(_state, name)
        if group is not None:
            dist.destroy_process_group(group)
            setattr(_state, name, None)


def get_model_parallel_group():
    return _state.pipeline


def get_pipeline_model_parallel_group():
    return _state.pipeline


def get_data_parallel_group():
    return _state.data


def get_embedding_group():
    return _state.embedding


def get_position_embedding_group():
    return _state.position


def get_pipeline_model_parallel_world_size():
    return len(_state.ranks)


def get_pipeline_model_parallel_rank():
    return _state.ranks.index(dist.get_rank())


def get_data_parallel_world_size():
    return dist.get_world_size(_state.data)


def get_data_parallel_rank():
    return dist.get_rank(_state.data)


def get_pipeline_model_parallel_next_rank():
    at = get_pipeline_model_parallel_rank()
    return _state.ranks[(at + 1) % len(_state.ranks)]


def get_pipeline_model_parallel_prev_rank():
    at = get_pipeline_model_parallel_rank()
    return _state.ranks[(at - 1) % len(_state.ranks)]


def get_virtual_pipeline_model_parallel_world_size():
    return _state.virtual_size


def get_virtual_pipeline_model_parallel_rank():
    return _state.virtual_rank


def set_virtual_pipeline_model_parallel_rank(rank):
    _state.virtual_rank = rank


def _is_chunk(chunk, ignore_virtual):
    return ignore_virtual or _state.virtual_size is None or _state.virtual_rank == chunk


def is_pipeline_first_stage(ignore_virtual=False):
    return _is_chunk(0, ignore_virtual) and get_pipeline_model_parallel_rank() == 0


def is_pipeline_last_stage(ignore_virtual=False):
    last = (_state.virtual_size or 1) - 1
    here = get_pipeline_model_parallel_rank() == len(_state.ranks) - 1
    return _is_chunk(last, ignore_virtual) and here


def is_rank_in_embedding_group(ignore_virtual=False):
    rank = dist.get_rank()
    if rank not in _state.embedding_ranks:
        return False
    if rank == _state.embedding_ranks[0]:
        return is_pipeline_first_stage(ignore_virtual) or len(_state.ranks) == 1
    if rank == _state.embedding_ranks[-1]:
        return is_pipeline_last_stage(ignore_virtual)
    return True


def is_rank_in_position_embedding_group():
    return dist.get_rank() in _state.position_ranks


def is_pipeline_stage_before_split(rank=None):
    rank = get_pipeline_model_parallel_rank() if rank is None else rank
    return len(_state.ranks) == 1 or _state.split is None or rank < _state.split


def is_pipeline_stage_after_split(rank=None):
    rank = get_pipeline_model_parallel_rank() if rank is None else rank
    return len(_state.ranks) == 1 or _state.split is None or rank >= _state.split


def is_pipeline_stage_at_split():
    rank = get_pipeline_model_parallel_rank()
    before = is_pipeline_stage_before_split(rank)
    return before and is_pipeline_stage_after_split(rank + 1)
