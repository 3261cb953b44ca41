# SPDX-License-Identifier: Apache-2.0
"""The optimizer's step over all ranks: norm, scale, skip, failures."""

from __future__ import annotations

import pytest
from helpers import pipeline_ranks_precision as ranks_precision
from helpers.pool import Pools


@pytest.mark.parametrize("scaled", [False, True])
def test_pipeline_row_30_any_optimizer_steps_on_the_norm_of_all_stages(
    pools: Pools, scaled: bool
) -> None:
    norms = []
    for placement in ([0, 0, 0, 0], [0, 1, 1, 0], [0, 1, 2, 3]):
        answers = pools(max(placement) + 1).run(
            ranks_precision.clipped, placement, scaled
        )
        assert [wrong for wrong, _ in answers] == [[]] * len(answers)
        norms += [norm for _, norm in answers]
    assert all(other == norms[0] for other in norms)


def test_pipeline_row_30_every_optimizer_of_torch_steps(pools: Pools) -> None:
    assert len(ranks_precision.torch_optimizers()) >= 13
    first, second = pools(2).run(ranks_precision.clipped, [0, 1, 1, 0], False, True)
    assert first == second and first[0] == []


@pytest.mark.parametrize("frozen", [False, True])
def test_pipeline_row_14_an_infinity_on_stage_1_skips_all(
    pools: Pools, frozen: bool
) -> None:
    wanted = [
        (True, 1024.0, True),
        (False, 512.0, False),
        (True, 512.0, True),
        (True, 1024.0, True),
    ]
    assert pools(3).run(ranks_precision.infinite, frozen) == [wanted] * 3


def test_an_infinity_in_one_replica_skips_all(pools: Pools) -> None:
    assert pools(4).run(ranks_precision.infinite_replica) == [[False, 512.0]] * 4


def test_a_norm_that_is_no_number_skips_the_step(pools: Pools) -> None:
    assert pools(2).run(ranks_precision.no_norm) == [[False, True]] * 2


@pytest.mark.parametrize("later", [False, True])
@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("clip", [False, True])
def test_an_optimizer_that_raises_is_named_everywhere(
    pools: Pools, clip: bool, scaled: bool, later: bool
) -> None:
    text = "pipeline: rank 1 at OPTIM: LookupError: no step"
    answers = pools(3).run(ranks_precision.failing_optimizer, clip, scaled, later)
    # All scales grow alike; where the failed step is told later, it does not count.
    assert answers == [answers[0]] * 3
    assert answers[0][:2] == (text, True)
    assert answers[0][2] == (0.0 if not scaled else 128.0 if later else 256.0)
