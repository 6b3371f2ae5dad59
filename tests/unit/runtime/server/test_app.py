"""The HTTP application over a scripted engine."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import msgspec
import openai
import pytest
from unit.runtime.server.fakes import EOS, Server

from toolkit.runtime.formats import Formats
from toolkit.runtime.request import Error

REPLY = "Hello, wörld!"
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}]
CHAT: dict[str, Any] = {"model": "bytes/model", "messages": [{"role": "user", "content": "hi"}]}


def serve(test: Callable[[Server], Awaitable[None]], **options: Any) -> None:
    """Run a test against a server in an event loop of its own."""

    async def main() -> None:
        async with Server(**options) as server:
            await asyncio.wait_for(test(server), 20)

    asyncio.run(main())


def sdk(server: Server) -> Any:
    """The SDK, untyped: the fields below go beyond its types."""
    client: Any = server.client
    return openai.AsyncOpenAI(base_url="http://server/v1", api_key="none", http_client=client, max_retries=0)


async def post(server: Server, path: str, body: Any) -> dict[str, Any]:
    response = await server.client.post(path, json=body)
    assert response.status_code == 200, response.text
    data: dict[str, Any] = response.json()
    return data


def events(response: httpx.Response) -> list[dict[str, Any]]:
    lines = response.text.split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""]
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]


# --- chat -------------------------------------------------------------------------------------------------------------


def test_chat_with_the_sdk() -> None:
    async def test(server: Server) -> None:
        answer = await sdk(server).chat.completions.create(**CHAT)
        assert answer.choices[0].message.content == REPLY
        assert answer.choices[0].finish_reason == "stop"
        assert answer.usage is not None
        assert answer.usage.prompt_tokens == len("user:hi\nassistant:")
        assert answer.usage.completion_tokens == len(REPLY.encode()) + 1
        assert answer.usage.prompt_tokens_details is not None
        assert answer.usage.prompt_tokens_details.cached_tokens == 9
        assert answer.system_fingerprint is not None
        assert bytes(server.engine.commands[0].prompt) == b"user:hi\nassistant:"
        assert server.engine.commands[0].eos == (EOS,)

    serve(test)


def test_streamed_chat_with_the_sdk_equals_whole() -> None:
    async def test(server: Server) -> None:
        options = {"logprobs": True, "top_logprobs": 2, "n": 2, "seed": 5}
        whole = await sdk(server).chat.completions.create(**CHAT, **options)
        stream = await sdk(server).chat.completions.create(
            **CHAT, **options, stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
        assert chunks[-1].usage == whole.usage
        assert chunks[-1].choices == []
        for index, choice in enumerate(whole.choices):
            mine = [part for chunk in chunks for part in chunk.choices if part.index == index]
            assert mine[0].delta.role == "assistant"
            assert "".join(part.delta.content or "" for part in mine) == choice.message.content == REPLY
            assert [part.finish_reason for part in mine if part.finish_reason] == ["stop"]
            logprobs = [entry for part in mine if part.logprobs for entry in part.logprobs.content or []]
            assert choice.logprobs is not None
            assert logprobs == choice.logprobs.content
            assert bytes(byte for entry in logprobs[:-1] for byte in entry.bytes or []) == REPLY.encode()
            assert len(logprobs[0].top_logprobs) == 2
        assert [command.params.seed for command in server.engine.commands] == [5, 6, 5, 6]
        assert len({command.request for command in server.engine.commands}) == 4

    serve(test)


def test_tool_calls_and_reasoning_streamed_equal_whole() -> None:
    async def test(server: Server) -> None:
        call = '<tool_call>{"name": "weather", "arguments": {"city": "Bern"}}</tool_call>'
        server.engine.reply = f"<think>Hm.</think>Well.{call}{call}"
        for options, count in (({}, 2), ({"parallel_tool_calls": False}, 1)):
            whole = await sdk(server).chat.completions.create(**CHAT, tools=TOOLS, **options)
            choice = whole.choices[0]
            assert choice.finish_reason == "tool_calls"
            assert (choice.message.content, choice.message.reasoning_content) == ("Well.", "Hm.")
            assert [tool.function.name for tool in choice.message.tool_calls] == ["weather"] * count
            assert json.loads(choice.message.tool_calls[0].function.arguments) == {"city": "Bern"}
            stream = await sdk(server).chat.completions.create(**CHAT, tools=TOOLS, stream=True, **options)
            parts = [part for chunk in [chunk async for chunk in stream] for part in chunk.choices]
            assert "".join(part.delta.content or "" for part in parts) == "Well."
            assert "".join(getattr(part.delta, "reasoning_content", "") for part in parts) == "Hm."
            calls = [tool for part in parts for tool in part.delta.tool_calls or []]
            begun = [tool for tool in calls if tool.id]
            assert [(tool.index, tool.type, tool.function.name, tool.function.arguments) for tool in begun] == [
                (index, "function", "weather", "{") for index in range(count)
            ]
            assert len(calls) > 10 * count
            for index, tool in enumerate(choice.message.tool_calls):
                written = "".join(each.function.arguments for each in calls if each.index == index)
                assert written == tool.function.arguments
            assert parts[-1].finish_reason == "tool_calls"
        whole = await sdk(server).chat.completions.create(**CHAT, tools=TOOLS, tool_choice="none")
        assert (whole.choices[0].message.tool_calls, whole.choices[0].finish_reason) == (None, "stop")
        assert whole.choices[0].message.content == "Well." + call + call

    serve(test, formats=Formats("hermes", "qwen3"))


def test_a_call_that_is_cut_off_has_the_arguments_so_far() -> None:
    async def test(server: Server) -> None:
        server.engine.reply = '<tool_call>{"name": "weather", "arguments": {"city": "Bern"}}</tool_call>'
        most = server.engine.reply.index("rn")
        for stream in (False, True):
            body = {**CHAT, "tools": TOOLS, "max_tokens": most, "stream": stream}
            response = await server.client.post("/v1/chat/completions", json=body)
            choices = [chunk["choices"][0] for chunk in events(response)] if stream else response.json()["choices"]
            calls = [
                call for choice in choices for call in choice.get("message", choice.get("delta")).get("tool_calls", [])
            ]
            assert "".join(call["function"]["arguments"] for call in calls) == '{"city": "Be'
            assert choices[-1]["finish_reason"] == "length"
        body = {
            **CHAT,
            "messages": [*CHAT["messages"], {"role": "assistant", "tool_calls": [calls[0]]}],
            "tools": TOOLS,
        }
        await post(server, "/v1/chat/completions", body)

    serve(test, formats=Formats("hermes"))


def test_an_answer_by_a_grammar_is_content_whatever_the_formats() -> None:
    async def test(server: Server) -> None:
        server.engine.reply = '{"name": "weather", "arguments": {}}'
        for options in ({"response_format": {"type": "json_object"}}, {"extra_body": {"guided_regex": ".*"}}):
            whole = await sdk(server).chat.completions.create(**CHAT, tools=TOOLS, **options)
            assert whole.choices[0].message.content == server.engine.reply
            assert whole.choices[0].message.tool_calls is None
        server.engine.reply = f"[{server.engine.reply}]"
        whole = await sdk(server).chat.completions.create(**CHAT, tools=TOOLS, tool_choice="required")
        assert [call.function.name for call in whole.choices[0].message.tool_calls] == ["weather"]
        assert all(command.params.grammar for command in server.engine.commands)

    serve(test, formats=Formats("llama3_json", "deepseek_r1"))


def test_stop_strings_end_and_abort() -> None:
    async def test(server: Server) -> None:
        for stream in (False, True):
            body = {**CHAT, "stop": ["wör"], "stream": stream}
            response = await server.client.post("/v1/chat/completions", json=body)
            if stream:
                choices = [chunk["choices"][0] for chunk in events(response)]
                text = "".join(choice["delta"].get("content", "") for choice in choices)
            else:
                choices = response.json()["choices"]
                text = choices[0]["message"]["content"]
            assert (text, choices[-1]["finish_reason"], choices[-1]["stop_reason"]) == ("Hello, ", "stop", "wör")
        assert server.engine.aborted == [command.request for command in server.engine.commands]

    serve(test)


def test_token_ids_and_prompt_logprobs() -> None:
    async def test(server: Server) -> None:
        body = {**CHAT, "max_completion_tokens": 2, "return_token_ids": True, "prompt_logprobs": 1}
        answer = await post(server, "/v1/chat/completions", body)
        assert answer["choices"][0]["token_ids"] == list(b"He")
        assert answer["choices"][0]["finish_reason"] == "length"
        assert bytes(answer["prompt_token_ids"]) == b"user:hi\nassistant:"
        assert answer["prompt_logprobs"][0] is None
        assert answer["prompt_logprobs"][1] == {"115": {"logprob": -0.5, "rank": 1, "decoded_token": "s"}}
        assert len(answer["prompt_logprobs"]) == len(answer["prompt_token_ids"])

    serve(test)


def test_usage_in_every_chunk() -> None:
    async def test(server: Server) -> None:
        options = {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}
        chunks = events(await server.client.post("/v1/chat/completions", json={**CHAT, **options}))
        counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
        assert counts == sorted(counts)
        assert counts[-1] == len(REPLY.encode()) + 1

    serve(test)


# --- completions ------------------------------------------------------------------------------------------------------


def test_completions_with_the_sdk() -> None:
    async def test(server: Server) -> None:
        answer = await sdk(server).completions.create(model="bytes/model", prompt=["ab", "cde"], n=2, max_tokens=5)
        assert [(choice.index, choice.text) for choice in answer.choices] == [(i, "Hello") for i in range(4)]
        assert [bytes(command.prompt) for command in server.engine.commands] == [b"ab", b"ab", b"cde", b"cde"]
        assert answer.usage is not None
        assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (5, 20)

    serve(test)


def test_echo_with_logprobs_streamed_equals_whole() -> None:
    async def test(server: Server) -> None:
        options: dict[str, Any] = {"prompt": [65, 66], "echo": True, "logprobs": 1, "max_tokens": 3}
        whole = (await post(server, "/v1/completions", options))["choices"][0]
        assert whole["text"] == "ABHel"
        assert whole["logprobs"]["tokens"] == ["A", "B", "H", "e", "l"]
        assert whole["logprobs"]["text_offset"] == [0, 1, 2, 3, 4]
        assert whole["logprobs"]["token_logprobs"] == [None, -0.5, -0.5, -0.5, -0.5]
        assert whole["logprobs"]["top_logprobs"][:2] == [None, {"B": -0.5}]
        response = await server.client.post("/v1/completions", json={**options, "stream": True})
        parts = [chunk["choices"][0] for chunk in events(response)]
        assert "".join(part["text"] for part in parts) == whole["text"]
        for name, values in whole["logprobs"].items():
            assert [value for part in parts if part["logprobs"] for value in part["logprobs"][name]] == values

    serve(test)


@pytest.mark.parametrize("stream", [False, True])
def test_echo_without_output(stream: bool) -> None:
    async def test(server: Server) -> None:
        body = {"prompt": "AB", "echo": True, "logprobs": 0, "max_tokens": 0, "stream": stream}
        response = await server.client.post("/v1/completions", json=body)
        choices = [chunk["choices"][0] for chunk in events(response)] if stream else response.json()["choices"]
        assert "".join(choice["text"] for choice in choices) == "AB"
        assert [token for choice in choices for token in (choice["logprobs"] or {}).get("tokens", [])] == ["A", "B"]

    serve(test)


def test_best_of_keeps_n() -> None:
    async def test(server: Server) -> None:
        answer = await post(server, "/v1/completions", {"prompt": "a", "n": 2, "best_of": 3})
        assert [choice["index"] for choice in answer["choices"]] == [0, 1]
        assert len(server.engine.commands) == 3
        assert answer["choices"][0]["logprobs"] is None

    serve(test)


def test_prompts_are_truncated_from_the_left() -> None:
    async def test(server: Server) -> None:
        await post(server, "/v1/completions", {"prompt": "abcdef", "truncate_prompt_tokens": 2})
        await post(server, "/v1/completions", {"prompt": "x" * 999, "truncate_prompt_tokens": -1, "max_tokens": 6})
        assert [len(command.prompt) for command in server.engine.commands] == [2, 250]
        assert bytes(server.engine.commands[0].prompt) == b"ef"

    serve(test)


def test_tokens_are_named_by_id_when_asked() -> None:
    async def test(server: Server) -> None:
        body = {"prompt": "a", "logprobs": 0, "max_tokens": 1, "return_tokens_as_token_ids": True}
        answer = await post(server, "/v1/completions", body)
        assert answer["choices"][0]["logprobs"]["tokens"] == ["token_id:72"]

    serve(test)


def test_a_plan_without_text_takes_and_gives_ids() -> None:
    async def test(server: Server) -> None:
        body = {"prompt": [1, 2], "max_tokens": 2, "return_token_ids": True}
        answer = await post(server, "/v1/completions", body)
        assert (answer["choices"][0]["text"], answer["choices"][0]["token_ids"]) == ("", list(b"He"))
        for path, refused, reason in (
            ("/v1/completions", {"prompt": "a"}, "list of token ids"),
            ("/v1/completions", {"prompt": [1], "stop": "a"}, "stop_token_ids"),
            ("/v1/chat/completions", CHAT, "can't chat"),
            ("/detokenize", {"tokens": [1]}, "no tokenizer"),
        ):
            response = await server.client.post(path, json=refused)
            assert response.status_code == 400
            assert reason in response.json()["error"]["message"]

    serve(test, text=False)


def test_the_models_defaults_are_used() -> None:
    async def test(server: Server) -> None:
        await post(server, "/v1/chat/completions", CHAT)
        assert server.engine.commands[0].params.temperature == 0.25

    serve(test, defaults={"temperature": 0.25})


# --- errors -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "body", "status", "param", "code"),
    [
        ("/v1/chat/completions", {**CHAT, "tools": TOOLS}, 400, "tools", "unsupported_parameter"),
        ("/v1/chat/completions", {**CHAT, "model": "other"}, 404, "model", "model_not_found"),
        ("/v1/chat/completions", {**CHAT, "max_tokens": 300}, 400, "messages", "context_length_exceeded"),
        ("/v1/chat/completions", {**CHAT, "messages": []}, 400, None, None),
        ("/v1/completions", {"prompt": "x" * 256}, 400, "prompt", "context_length_exceeded"),
        ("/v1/completions", {"prompt": ""}, 400, None, None),
        ("/v1/completions", {"prompt": [1000]}, 400, None, None),
        ("/v1/completions", {"prompt": [-1]}, 400, None, None),
        ("/v1/completions", {"prompt": "a", "logit_bias": {"1000": 1}}, 400, None, None),
        ("/v1/completions", {"prompt": "a", "n": 10**6}, 400, "n", None),
        ("/tokenize", {}, 400, "prompt", None),
        ("/nowhere", {}, 404, None, None),
        ("/health", {}, 405, None, None),
    ],
)
def test_errors_have_openais_shape(path: str, body: Any, status: int, param: str | None, code: str | None) -> None:
    async def test(server: Server) -> None:
        response = await server.client.post(path, json=body)
        error = response.json()["error"]
        assert (response.status_code, error["param"], error["code"]) == (status, param, code)
        assert error["message"]
        assert error["type"]
        assert server.engine.commands == []

    serve(test)


def test_bodies_are_checked() -> None:
    async def test(server: Server) -> None:
        json_type = {"content-type": "application/json"}
        for content, headers, status in (
            (b"{", json_type, 400),
            (b"{}", {"content-type": "text/plain"}, 415),
            (b'{"prompt": "' + b"x" * 200_000 + b'"}', json_type, 413),
        ):
            response = await server.client.post("/v1/completions", content=content, headers=headers)
            assert (response.status_code, response.json()["error"]["type"]) == (status, "invalid_request_error")

        async def pieces() -> Any:
            for _ in range(200):
                yield b"x" * 1000

        response = await server.client.post("/v1/completions", content=pieces(), headers=json_type)
        assert response.status_code == 413

    serve(test)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("user_fault", "status"), [(True, 400), (False, 500)])
def test_engine_errors_before_the_first_token_are_a_status(stream: bool, user_fault: bool, status: int) -> None:
    async def test(server: Server) -> None:
        server.engine.error = Error("", "no room", user_fault)
        response = await server.client.post("/v1/chat/completions", json={**CHAT, "stream": stream})
        assert response.status_code == status
        assert "no room" in response.json()["error"]["message"]

    serve(test)


def test_engine_errors_in_a_stream_are_an_event() -> None:
    async def test(server: Server) -> None:
        server.engine.error, server.engine.error_after = Error("", "broke", False), 3
        response = await server.client.post("/v1/chat/completions", json={**CHAT, "stream": True})
        assert response.status_code == 200
        assert events(response)[-1]["error"]["type"] == "server_error"
        with pytest.raises(openai.APIError, match="broke"):
            async for _ in await sdk(server).chat.completions.create(**CHAT, stream=True):
                pass

    serve(test)


# --- vanished clients -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stall_after", [0, 3])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("n", [1, 2])
def test_a_vanished_clients_requests_are_aborted(stall_after: int, stream: bool, n: int) -> None:
    async def test(server: Server) -> None:
        server.engine.stall_after = stall_after
        gone = asyncio.Event()
        body = json.dumps({**CHAT, "stream": stream, "n": n}).encode()
        requests = iter([{"type": "http.request", "body": body, "more_body": False}])

        async def receive() -> dict[str, Any]:
            for message in requests:
                return message
            await gone.wait()
            return {"type": "http.disconnect"}

        sent: list[Any] = []

        async def send(message: Any) -> None:
            sent.append(message)

        scope = {
            "type": "http",
            "method": "POST",
            "path": "/v1/chat/completions",
            "headers": [(b"content-type", b"application/json")],
            "query_string": b"",
        }
        task = asyncio.create_task(server.app(scope, receive, send))
        while len(server.engine.commands) < n:
            await asyncio.sleep(0.001)
        await asyncio.sleep(0.02)
        assert server.engine.aborted == []
        gone.set()
        await asyncio.wait_for(task, 1)
        assert sorted(server.engine.aborted) == sorted(command.request for command in server.engine.commands)
        assert bool(sent) == (stream and stall_after > 0)
        assert server.service.metrics.finished["abort"] == n

    serve(test)


# --- the rest ---------------------------------------------------------------------------------------------------------


def test_models_with_the_sdk() -> None:
    async def test(server: Server) -> None:
        assert [model.id async for model in sdk(server).models.list()] == ["bytes/model"]
        assert (await sdk(server).models.retrieve("bytes/model")).owned_by == "toolkit"
        with pytest.raises(openai.NotFoundError):
            await sdk(server).models.retrieve("other")
        response = await server.client.get("/v1/models")
        assert response.json()["data"][0]["max_model_len"] == 256

    serve(test)


async def healthy(server: Server, status: int) -> httpx.Response:
    """The answer of /health once it has this status."""
    async with asyncio.timeout(10):
        while (response := await server.client.get("/health")).status_code != status:
            await asyncio.sleep(0.01)
    return response


def test_health_proves_a_live_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("toolkit.runtime.server.service.HEARTBEAT_SECONDS", 0.01)

    async def test(server: Server) -> None:
        assert (await server.client.get("/health")).status_code == 503
        await healthy(server, 200)
        server.engine.dead = "it was killed"
        assert "it was killed" in (await healthy(server, 503)).json()["error"]["message"]

    serve(test)


def test_a_stale_engine_is_not_healthy(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(server: Server) -> None:
        await healthy(server, 200)
        monkeypatch.setattr("toolkit.runtime.server.service.STALE_SECONDS", 0.0)
        assert "not turned" in (await healthy(server, 503)).json()["error"]["message"]

    serve(test)


def test_tokenize_and_detokenize() -> None:
    async def test(server: Server) -> None:
        answer = await post(server, "/tokenize", {"prompt": "é", "return_token_strs": True})
        assert answer == {"count": 2, "max_model_len": 256, "tokens": [195, 169], "token_strs": ["\ufffd", "\ufffd"]}
        answer = await post(server, "/tokenize", {"messages": CHAT["messages"]})
        assert bytes(answer["tokens"]) == b"user:hi\nassistant:"
        assert await post(server, "/detokenize", {"tokens": [195, 169]}) == {"prompt": "é"}

    serve(test)


def test_version() -> None:
    async def test(server: Server) -> None:
        assert (await server.client.get("/version")).json()["version"]

    serve(test)


def test_bad_words_become_token_ids_and_allowed_ones_are_checked() -> None:
    async def test(server: Server) -> None:
        await post(server, "/v1/completions", {"prompt": "a", "bad_words": ["no"], "allowed_token_ids": [65, 66]})
        params = server.engine.commands[0].params
        assert params.bad_words == ()
        assert set(params.bad_token_ids) == {tuple(b"no"), tuple(b" no")}
        assert params.allowed_token_ids == (65, 66)
        refused: list[dict[str, Any]] = [{"allowed_token_ids": [5000]}, {"allowed_token_ids": []}, {"bad_words": [""]}]
        for wrong in refused:
            assert (await server.client.post("/v1/completions", json={"prompt": "a"} | wrong)).status_code == 400

    serve(test)


@pytest.mark.parametrize("value", [2**64, 10**40, -(2**63) - 1, -(10**40)])
@pytest.mark.parametrize(
    "field", ["priority", "top_k", "min_tokens", "max_tokens", "seed", "n", "logprobs", "truncate_prompt_tokens"]
)
def test_numbers_too_large_for_the_engine_never_reach_it(field: str, value: int) -> None:
    """Messages to the engine hold 64 bits: a number beyond them would fail there, with all that is sent beside it."""

    async def test(server: Server) -> None:
        answer = await server.client.post("/v1/completions", json={"prompt": "a", field: value})
        commands = server.engine.commands
        assert (answer.status_code == 400) == (not commands), answer.text
        assert answer.status_code < 500
        msgspec.msgpack.encode(commands)
        sampling = {"token_ids": [65], "sampling_params": {field: value}}
        assert (await server.client.post("/inference/v1/generate", json=sampling)).status_code == 400

    serve(test)
