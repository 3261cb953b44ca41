# SPDX-License-Identifier: Apache-2.0
"""Kinds of models."""

from megatron_stubs.models import ModelType
