# SPDX-License-Identifier: Apache-2.0
"""Fixtures of the reversible tests."""

from __future__ import annotations

import pytest

from torch_sm3.reversible import ReversibleSequence


@pytest.fixture(params=["node", "graph"])
def engine(request, monkeypatch):
    """Let sequences that name no engine have each engine in turn."""
    defaults = ReversibleSequence.__init__.__kwdefaults__
    monkeypatch.setitem(defaults, "engine", request.param)
    return request.param
