"""Random requests by the server's own description: none is our fault, none harms another, nothing stays open.

TOOLKIT_RANDOM_REQUESTS says how many; 500 unless told otherwise.
"""

from __future__ import annotations

import asyncio
import os
from typing import Any

import httpx
import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings
from unit.runtime.server.fakes import Server, http_server
from unit.runtime.server.test_app import REPLY

from toolkit.runtime.server.openapi import BODIES, describe

REQUESTS = int(os.environ.get("TOOLKIT_RANDOM_REQUESTS", "500"))
LEFT_OUT = {"/pause", "/sleep"}
"""They would keep the rest waiting."""


def test_no_random_request_is_our_fault() -> None:
    with http_server() as (url, engine):
        api = schemathesis.openapi.from_url(f"{url}/openapi.json")
        found: Any = api.get_all_operations()
        operations = [result.ok() for result in found]
        operations = [each for each in operations if each.path not in LEFT_OUT]
        assert len(operations) > 35
        weights = [8 if each.path in BODIES else 1 for each in operations]
        for operation, weight in zip(operations, weights, strict=True):
            _ask(operation, max(1, REQUESTS * weight // sum(weights)), url)
        assert httpx.get(f"{url}/health").status_code == 200
        assert httpx.get(f"{url}/load").json()["server_load"] == 0
        answer = httpx.post(f"{url}/v1/completions", json={"prompt": "a"})
        assert answer.json()["choices"][0]["text"] == REPLY
        assert len(engine.commands) > 1, "some were good"


def _ask(operation: Any, count: int, url: str) -> None:
    @seed(1)
    @settings(
        max_examples=count,
        phases=[Phase.generate],
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(case=operation.as_strategy())
    def check(case: Any) -> None:
        response = case.call(timeout=20)
        assert response.status_code < 500, (case.as_curl_command(), response.text)
        if response.status_code >= 400:
            assert response.json()["error"]["message"]

    check()


def test_the_description_has_every_route() -> None:
    async def main() -> dict[str, Any]:
        async with Server() as server:
            found: dict[str, Any] = (await server.client.get("/openapi.json")).json()
            assert found == describe(server.app.routes)
            return found

    description = asyncio.run(main())
    assert BODIES.keys() <= description["paths"].keys()
