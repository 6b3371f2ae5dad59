"""The page at `/` as a file, and what it draws plans from."""

from __future__ import annotations

import re

from unit.runtime.server.fakes import Server
from unit.runtime.server.test_app import serve

from toolkit.runtime.layers import split_layers
from toolkit.runtime.server.app import create_app
from toolkit.runtime.server.page import page_html


def test_it_is_one_file_that_needs_no_other() -> None:
    text = page_html()
    assert "{{" not in re.sub(r"\$\{.*?\}", "", text).replace("}}", "")
    addresses = set(re.findall(r"https?://[^\s'\"]+", text)) - {"http://www.w3.org/2000/svg"}
    assert addresses == set()
    assert not re.search(r"<(script|link|img|iframe)[^>]*\s(src|href)=(?!.data:)", text.replace('href="data:', "data:"))
    assert "innerHTML" not in text


def test_it_is_served_with_a_policy_that_allows_nothing_else() -> None:
    async def test(server: Server) -> None:
        answer = await server.client.get("/")
        assert (answer.status_code, answer.headers["content-type"]) == (200, "text/html; charset=utf-8")
        policy = answer.headers["content-security-policy"].split("; ")
        assert policy[0] == "default-src 'none'"
        assert "connect-src 'self'" in policy
        assert "frame-ancestors 'none'" in policy
        assert server.plan.model.name not in answer.text  # it opens without a key

    serve(test)


def test_it_can_be_left_out() -> None:
    async def test(server: Server) -> None:
        paths = {getattr(route, "path", "") for route in create_app(server.service, page=False).routes}
        assert paths == {getattr(route, "path", "") for route in server.app.routes} - {"/"}

    serve(test)


def test_server_info_has_the_graph() -> None:
    async def test(server: Server) -> None:
        info = (await server.client.get("/server_info")).json()
        plan = server.plan
        parts = split_layers(plan, plan.buckets[0].launches)
        assert [(part["name"], len(part["ops"])) for part in info["graph"]] == [
            (part.name, len(part.launches[0])) for part in parts
        ]
        assert sum(each["bytes"] for each in info["weights"]) == sum(each.bytes for each in plan.weights.values())
        assert sum(each["tensors"] for each in info["weights"]) == len(plan.weights)

    serve(test)
