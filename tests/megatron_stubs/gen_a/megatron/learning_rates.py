# SPDX-License-Identifier: Apache-2.0
"""Learning rates by samples."""

from megatron_stubs.support import Decay


class AnnealingLR(Decay):
    """Falls with the samples that were seen."""
