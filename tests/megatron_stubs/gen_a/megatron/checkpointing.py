# SPDX-License-Identifier: Apache-2.0
"""Files of model, optimizer and learning rate."""

from megatron_stubs.tools import load_checkpoint, save_checkpoint
