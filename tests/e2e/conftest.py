"""Servers of a real model, and a browser."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from e2e.serving import ServerProcess, StartServer, start_server

if TYPE_CHECKING:
    from playwright.sync_api import Browser

QUIET = "--no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking --disable-sync"


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


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    names = ("chromium", "chromium-browser", "google-chrome")
    path = next(filter(None, map(shutil.which, names)), None)
    if path is None and os.environ.get("TOOLKIT_TEST_BROWSER") == "required":
        pytest.fail("TOOLKIT_TEST_BROWSER is `required`, but there is no chromium: `make chromium` installs it")
    if path is None:
        pytest.skip("there is no chromium: `make chromium` installs it")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=path, args=QUIET.split())
        yield browser
        browser.close()
