"""Servers of a real model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from e2e.serving import ServerProcess, StartServer, start_server


@pytest.fixture(scope="module")
def server(smollm2_plan: Path) -> Iterator[ServerProcess]:
    """A server that the tests of a module share."""
    running = start_server(smollm2_plan)
    yield running
    assert running.stop() == 0


@pytest.fixture
def own_server(smollm2_plan: Path) -> Iterator[StartServer]:
    """Starts servers that a test may harm."""
    started: list[ServerProcess] = []

    def start(*options: str, **environment: str) -> ServerProcess:
        started.append(start_server(smollm2_plan, *options, **environment))
        return started[-1]

    yield start
    for each in started:
        each.process.kill()
        each.wait()
