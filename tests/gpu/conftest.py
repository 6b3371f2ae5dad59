"""Tests that need an NVIDIA GPU: `pytest -m gpu tests/gpu`."""

from __future__ import annotations

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Everything in this folder is marked."""
    for item in items:
        if "/tests/gpu/" in str(item.path):
            item.add_marker(pytest.mark.gpu)
