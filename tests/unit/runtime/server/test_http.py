"""What stands before the application: keys, request ids, origins, root path, TLS and Unix sockets."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import click
import httpx
import openai
import pytest
from starlette.routing import Route
from unit.runtime.server.fakes import Server
from unit.runtime.server.test_app import CHAT, REPLY, serve

from toolkit.cli import serve as serve_command
from toolkit.runtime.errors import UserError
from toolkit.runtime.server.http import OPEN_ROUTES, guarded
from toolkit.runtime.server.options import HttpOptions
from toolkit.runtime.server.run import listen_unix, tls_context


def client(server: Server, root: str = "", **options: Any) -> httpx.AsyncClient:
    app = guarded(server.app, HttpOptions(**options))
    transport = httpx.ASGITransport(app, raise_app_exceptions=False, root_path=root)
    return httpx.AsyncClient(transport=transport, base_url="http://server")


def test_keys_protect_every_route_but_health_and_readiness() -> None:
    async def test(server: Server) -> None:
        async with client(server, api_keys=("one", "zwei-ü")) as http:
            for route in server.app.routes:
                assert isinstance(route, Route)
                path = route.path.replace("{model:path}", "x")
                for method in route.methods or ():
                    response = await http.request(method, path, headers={"authorization": "Bearer on"})
                    assert (response.status_code == 401) == (path not in OPEN_ROUTES), path
            assert (await http.get("/nowhere")).status_code == 401
            for headers in (
                {"authorization": "Bearer one"},
                {"authorization": "bearer  one"},
                {"x-api-key": "one"},
            ):
                assert (await http.get("/v1/models", headers=headers)).status_code == 200
            for headers in ({}, {"authorization": "one"}, {"authorization": "Basic one"}, {"x-api-key": ""}):
                response = await http.get("/v1/models", headers=headers)
                assert (response.status_code, response.headers["www-authenticate"]) == (401, "Bearer")
            untyped: Any = http
            options = {"base_url": "http://server/v1", "http_client": untyped, "max_retries": 0}
            answer = await openai.AsyncOpenAI(api_key="one", **options).chat.completions.create(**CHAT)
            assert answer.choices[0].message.content == REPLY
            with pytest.raises(openai.AuthenticationError):
                await openai.AsyncOpenAI(api_key="two", **options).chat.completions.create(**CHAT)

    serve(test)


def test_every_answer_has_a_request_id() -> None:
    async def test(server: Server) -> None:
        async with client(server, api_keys=("one",)) as http:
            assert (await http.get("/health", headers={"x-request-id": "mine"})).headers["x-request-id"] == "mine"
            made = [(await http.get(path)).headers["x-request-id"] for path in ("/health", "/v1/models", "/nowhere")]
            assert len(set(made)) == 3
            long = await http.get("/health", headers={"x-request-id": "x" * 1000})
            assert len(long.headers["x-request-id"]) == 32

    serve(test)


def test_pages_of_allowed_origins_may_call_without_a_key_in_the_preflight() -> None:
    async def test(server: Server) -> None:
        ask = {"access-control-request-method": "POST", "access-control-request-headers": "authorization"}
        async with client(server, api_keys=("one",), cors_origins=("http://page",)) as http:
            allowed = await http.options("/v1/completions", headers={"origin": "http://page", **ask})
            assert allowed.headers["access-control-allow-origin"] == "http://page"
            other = await http.options("/v1/completions", headers={"origin": "http://other", **ask})
            assert other.status_code == 400
        async with client(server) as http:
            plain = await http.get("/v1/models", headers={"origin": "http://page"})
            assert "access-control-allow-origin" not in plain.headers

    serve(test)


def test_below_a_root_path() -> None:
    async def test(server: Server) -> None:
        async with client(server, "/llm", api_keys=("one",)) as http:
            assert (await http.get("/llm/ready")).status_code in (200, 503)
            assert (await http.get("/llm/v1/models")).status_code == 401
            assert (await http.get("/llm/v1/models", headers={"x-api-key": "one"})).status_code == 200
            answer = await http.post("/llm/v1/messages", json={}, headers={"x-api-key": "one"})
            assert answer.json()["type"] == "error"

    serve(test)


def test_a_unix_socket_is_taken_over_only_from_the_dead(tmp_path: Path) -> None:
    path = tmp_path / "socket"
    with listen_unix(path), pytest.raises(UserError, match="in use"):
        listen_unix(path)
    with listen_unix(path) as again, socket.socket(socket.AF_UNIX) as caller:
        caller.connect(again.getsockname())
    with pytest.raises(UserError, match="can't listen"):
        listen_unix(tmp_path / "none/socket")


def test_tls_files_are_checked_before_the_engine_starts(tmp_path: Path) -> None:
    bad = tmp_path / "bad.pem"
    bad.write_text("nothing")
    assert tls_context(HttpOptions()) is None
    with pytest.raises(UserError, match="can't be used"):
        tls_context(HttpOptions(ssl_certfile=bad))
    with pytest.raises(UserError, match="need --ssl-certfile"):
        tls_context(HttpOptions(ssl_keyfile=bad))


# --- flags ------------------------------------------------------------------------------------------------------------


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> dict[str, Any]:
    """What `serve` is asked for by a command line."""
    asked: dict[str, Any] = {}
    monkeypatch.setattr("toolkit.runtime.server.run.serve", lambda *given, **named: asked.update(named, given=given))
    serve_command.command.main(list(arguments), standalone_mode=False)
    return asked


def test_options_come_from_the_command_line_then_the_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    config, keys = tmp_path / "serve.yaml", tmp_path / "keys"
    keys.write_text("b\n\nc\n")
    config.write_text(f"port: 9000\nhost: '::1'\napi-key: [a]\napi_key_file: {keys}\nmax-num-seqs: 3\n")
    asked = run(monkeypatch, "plan", "--config", str(config), "--port", "1", "--allowed-origins", "*")
    assert (asked["port"], asked["host"]) == (1, "::1")
    assert asked["http"] == HttpOptions(api_keys=("a", "b", "c"), cors_origins=("*",))
    assert asked["given"][1].max_num_seqs == 3


def test_one_value_in_a_file_is_a_list_of_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    config = tmp_path / "serve.yaml"
    config.write_text("api-key: secret\nallow-credentials: true\nallowed-origins: http://page\n")
    http = run(monkeypatch, "plan", "--config", str(config))["http"]
    assert http == HttpOptions(api_keys=("secret",), cors_origins=("http://page",), cors_credentials=True)


@pytest.mark.parametrize("text", ["bogus: 1", "[1]", "a: [", "config: x", "port: many"])
def test_a_bad_file_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: str) -> None:
    config = tmp_path / "serve.yaml"
    config.write_text(text)
    with pytest.raises((UserError, click.UsageError)):
        run(monkeypatch, "plan", "--config", str(config))


def test_an_empty_key_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("\n \n")
    for arguments in (("--api-key", ""), ("--api-key-file", str(tmp_path / "keys"))):
        with pytest.raises(UserError, match="must not be empty"):
            run(monkeypatch, "plan", *arguments)
