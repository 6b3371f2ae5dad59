"""Plans that reports are made of."""

from __future__ import annotations

from pathlib import Path

import pytest
from unit.cli.tiny_plans import make_tiny_plan


@pytest.fixture(scope="session")
def llama_plan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A llama of 4 layers with int4 weights."""
    return make_tiny_plan(tmp_path_factory.mktemp("llama"), "llama", quant="int4")


@pytest.fixture(scope="session")
def gemma_plan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A gemma-3 of 5 layers with float weights; layers 0, 1 and 3 look at 20 tokens, 2 and 4 at all."""
    return make_tiny_plan(tmp_path_factory.mktemp("gemma"), "gemma3_text")
