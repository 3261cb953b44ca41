# SPDX-License-Identifier: Apache-2.0
"""SM3 under FSDP1, which flattens; FSDP2 is in test_sm3_dtensor.py."""

from __future__ import annotations

from helpers.sm3_ranks import assert_fine


def test_sm3_row_16_state_that_is_not_parameter_shaped(
    two_ranks: dict[str, str],
) -> None:
    # Of DTensors it is DTensors, see row 19; of FSDP1's flat parameters it is diagonal.
    assert_fine(two_ranks, "row_19")
    assert_fine(two_ranks, "row_16")
