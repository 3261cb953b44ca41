# SPDX-License-Identifier: Apache-2.0
"""Parallel groups."""

from .initialize import *
