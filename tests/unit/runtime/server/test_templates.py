"""What a chat can say of its template: another one, and how much to think."""

from __future__ import annotations

import time
from typing import Any

import pytest
from unit.runtime.server.fakes import RoleTemplate, Server
from unit.runtime.server.test_app import CHAT, REPLY, post, serve

PATH = "/v1/chat/completions"


async def prompt_of(server: Server, **fields: Any) -> str:
    await post(server, PATH, CHAT | fields)
    return bytes(server.engine.commands[-1].prompt).decode()


def test_a_request_may_bring_its_own_template() -> None:
    async def test(server: Server) -> None:
        template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{{ shout }}"
        assert await prompt_of(server, chat_template=template, chat_template_kwargs={"shout": "!"}) == "<user>hi!"
        assert await prompt_of(server) == "user:hi\nassistant:"

    serve(test)


@pytest.mark.parametrize(
    "template",
    [
        "{% for i in range(10**9) %}{% endfor %}",
        "{% for i in range(99999) %}{% for j in range(99999) %}x{% endfor %}{% endfor %}",
        "{{ 'x' * 10**10 }}",
        "{% set a = namespace(x='x') %}{% for i in range(60) %}{% set a.x = a.x ~ a.x %}{% endfor %}{{ a.x }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.__init__.__globals__ }}",
        "{% include '/etc/passwd' %}",
        "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{% if %}",
    ],
)
def test_a_template_that_means_harm_is_a_400_soon(template: str) -> None:
    async def test(server: Server) -> None:
        began = time.monotonic()
        answer = await server.client.post(PATH, json=CHAT | {"chat_template": template})
        assert answer.status_code == 400, answer.text
        assert time.monotonic() - began < 10
        assert not server.engine.commands
        assert (await post(server, PATH, CHAT))["choices"][0]["message"]["content"] == REPLY

    serve(test)


@pytest.mark.parametrize(
    ("source", "effort", "expected"),
    [
        ("{{ reasoning_effort }}", "high", "[reasoning_effort=high]"),
        ("{{ reasoning_effort }}", "none", "[reasoning_effort=none]"),
        ("{{ enable_thinking }}", "none", "[enable_thinking=False]"),
        ("{{ enable_thinking }}", "low", "[enable_thinking=True]"),
        ("", "none", ""),
        ("", "high", None),
    ],
)
def test_effort_is_a_variable_of_the_template(
    source: str, effort: str, expected: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RoleTemplate, "source", source, raising=False)

    async def test(server: Server) -> None:
        if expected is None:
            answer = await server.client.post(PATH, json=CHAT | {"reasoning_effort": effort})
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, "reasoning_effort")
        else:
            assert await prompt_of(server, reasoning_effort=effort) == f"user:hi\n{expected}assistant:"

    serve(test)
