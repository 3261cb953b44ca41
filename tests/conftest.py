# SPDX-License-Identifier: Apache-2.0
"""Shared pytest settings: one cure for a missing library, equal seeds, one thread."""

import pytest
import torch

import torch_sm3


def pytest_report_header() -> str:
    info = torch_sm3.BUILD_INFO
    return (
        f"torch_sm3 {info['version']} ({info['commit']}) on torch {torch.__version__}"
    )


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)
