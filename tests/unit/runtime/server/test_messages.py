"""Anthropic's API, asked by its own SDK."""

from __future__ import annotations

from typing import Any

import anthropic
import httpx2
import pytest
from anthropic.types import message_count_tokens_params, message_create_params
from unit.runtime.server.fakes import Server
from unit.runtime.server.test_app import REPLY, serve

from toolkit.runtime.formats import Formats
from toolkit.runtime.request import Error
from toolkit.runtime.server.errors import ApiError
from toolkit.runtime.server.messages import REFUSED, CountRequest, MessagesRequest
from toolkit.runtime.server.openai import parse

ASK: dict[str, Any] = {"model": "bytes/model", "max_tokens": 50, "messages": [{"role": "user", "content": "hi"}]}


def sdk(server: Server) -> Any:
    """The SDK, untyped: some fields go beyond its types. It has an HTTP library of its own."""
    transport = httpx2.ASGITransport(server.app, raise_app_exceptions=False)
    client = httpx2.AsyncClient(transport=transport, base_url="http://server")
    return anthropic.AsyncAnthropic(base_url="http://server", api_key="none", http_client=client, max_retries=0)


def test_all_fields_of_the_sdk_are_known() -> None:
    asked = set(message_create_params.MessageCreateParamsBase.__annotations__) | {"stream"}
    assert asked - set(MessagesRequest.__struct_fields__) - set(REFUSED) == set()
    asked = set(message_count_tokens_params.MessageCountTokensParams.__annotations__)
    assert asked - set(CountRequest.__struct_fields__) - set(REFUSED) == set()


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_refused_fields_are_named_unless_they_ask_for_nothing(name: str) -> None:
    neutral, reason = REFUSED[name]
    for value in (*neutral, None):
        parse({**ASK, name: value}, MessagesRequest, REFUSED)
    with pytest.raises(ApiError, match=reason) as caught:
        parse({**ASK, name: {"something": 1}}, MessagesRequest, REFUSED)
    assert (caught.value.status, caught.value.param) == (400, name)


def test_a_message_streamed_equals_whole() -> None:
    async def test(server: Server) -> None:
        system = [
            {"type": "text", "text": "be", "cache_control": {"type": "ephemeral"}},
            {"type": "text", "text": "kind"},
        ]
        whole = await sdk(server).messages.create(**ASK, system=system, metadata={"user_id": "me"})
        assert [block.text for block in whole.content] == [REPLY]
        assert (whole.stop_reason, whole.stop_sequence, whole.role) == ("end_turn", None, "assistant")
        prompt = b"system:be\nkind\nuser:hi\nassistant:"
        assert bytes(server.engine.commands[0].prompt) == prompt
        assert whole.usage.input_tokens + whole.usage.cache_read_input_tokens == len(prompt)
        assert whole.usage.output_tokens == len(REPLY.encode()) + 1
        async with sdk(server).messages.stream(**ASK, system=system) as stream:
            assert "".join([text async for text in stream.text_stream]) == REPLY
            final = await stream.get_final_message()
        assert (final.content[0].text, final.stop_reason) == (REPLY, whole.stop_reason)
        assert final.usage.output_tokens == whole.usage.output_tokens
        assert final.usage.input_tokens == whole.usage.input_tokens

    serve(test)


def test_fields_reach_the_sampler_and_the_end_is_named() -> None:
    async def test(server: Server) -> None:
        options = {"temperature": 0.5, "top_k": 3, "top_p": 0.5}
        raw = await server.client.post("/v1/messages", json={**ASK, **options, "stop_sequences": ["wör"]})
        assert raw.json()["content"][0]["text"] == "Hello, "
        assert (raw.json()["stop_reason"], raw.json()["stop_sequence"]) == ("stop_sequence", "wör")
        params = server.engine.commands[0].params
        assert (params.temperature, params.top_k, params.top_p, params.max_tokens) == (0.5, 3, 0.5, 50)
        short = await sdk(server).messages.create(**{**ASK, "max_tokens": 2})
        assert (short.content[0].text, short.stop_reason) == ("He", "max_tokens")

    serve(test)


def test_the_assistants_last_message_is_continued() -> None:
    async def test(server: Server) -> None:
        messages = [*ASK["messages"], {"role": "assistant", "content": "It is"}]
        await sdk(server).messages.create(**{**ASK, "messages": messages})
        assert bytes(server.engine.commands[0].prompt) == b"user:hi\nassistant:It is"

    serve(test)


def test_tokens_are_counted_as_they_are_used() -> None:
    async def test(server: Server) -> None:
        counted = await sdk(server).messages.count_tokens(model=ASK["model"], messages=ASK["messages"], system="s")
        assert counted.input_tokens == len("system:s\nuser:hi\nassistant:")
        assert server.engine.commands == []

    serve(test)


def test_the_sdk_understands_our_errors() -> None:
    async def test(server: Server) -> None:
        client = sdk(server)
        with pytest.raises(anthropic.NotFoundError, match="does not exist"):
            await client.messages.create(**{**ASK, "model": "other"})
        with pytest.raises(anthropic.BadRequestError, match="tools is not supported") as caught:
            await client.messages.create(**ASK, tools=[{"name": "f", "input_schema": {"type": "object"}}])
        body: Any = caught.value.body
        assert body["error"]["type"] == "invalid_request_error"
        wrong: list[dict[str, Any]] = [
            {"max_tokens": 0},
            {"max_tokens": 1000},
            {"messages": []},
            {"stop_sequences": ["a"] * 17},
        ]
        for bad in wrong:
            with pytest.raises(anthropic.BadRequestError):
                await client.messages.create(**{**ASK, **bad})
        server.engine.error, server.engine.error_after = Error("", "broke", False), 3
        async with client.messages.stream(**ASK) as stream:
            with pytest.raises(anthropic.APIError, match="broke"):
                await stream.get_final_message()

    serve(test)


WEATHER = {
    "name": "weather",
    "description": "Weather of a city",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
HERMES = Formats(tools="hermes", reasoning="qwen3")
THOUGHT = '<think>Rain?</think>Let me see.<tool_call>{"name": "weather", "arguments": {"city": "Paris"}}</tool_call>'


def test_thinking_text_and_tools_are_blocks_streamed_and_whole() -> None:
    async def test(server: Server) -> None:
        server.engine.reply = THOUGHT
        client, ask = sdk(server), ASK | {"tools": [WEATHER], "max_tokens": 200, "thinking": {"type": "adaptive"}}
        whole = await client.messages.create(**ask)
        kinds = []
        async with client.messages.stream(**ask) as stream:
            async for event in stream:
                kinds.append(event.type)
            final = await stream.get_final_message()
        for answer in (whole, final):
            thinking, text, use = answer.content
            assert (thinking.type, thinking.thinking) == ("thinking", "Rain?")
            assert (text.type, text.text) == ("text", "Let me see.")
            assert (use.type, use.name, use.input) == ("tool_use", "weather", {"city": "Paris"})
            assert answer.stop_reason == "tool_use"
        assert kinds.count("content_block_start") == kinds.count("content_block_stop") == 3
        assert {"thinking", "text", "input_json"} <= set(kinds)
        assert kinds.count("input_json") > 10, "arguments come while they are written"
        cut = await client.messages.create(**ask | {"max_tokens": THOUGHT.index("ris")})
        assert (cut.stop_reason, cut.content[2].input) == ("max_tokens", {"arguments": '{"city": "Pa'})

    serve(test, formats=HERMES)


def test_results_of_tools_reach_the_model() -> None:
    async def test(server: Server) -> None:
        use = {"type": "tool_use", "id": "1", "name": "weather", "input": {"city": "Paris"}}
        said = [{"type": "thinking", "thinking": "hm", "signature": ""}, {"type": "text", "text": "I look."}, use]
        result = {"type": "tool_result", "tool_use_id": "1", "content": [{"type": "text", "text": "sunny"}]}
        turns = [
            {"role": "user", "content": "Rain?"},
            {"role": "assistant", "content": said},
            {"role": "user", "content": [result, {"type": "text", "text": "So?"}]},
        ]
        ask = ASK | {"messages": turns, "tools": [WEATHER]}
        await sdk(server).messages.create(**ask)
        prompt = bytes(server.engine.commands[0].prompt).decode()
        assert prompt == "user:Rain?\nassistant:I look.\ntool:sunny\nuser:So?\nassistant:"
        counted = await sdk(server).messages.count_tokens(
            **{name: ask[name] for name in ("model", "messages", "tools")}
        )
        assert counted.input_tokens == len(prompt)

    serve(test, formats=HERMES)


@pytest.mark.parametrize(
    ("choice", "most"), [({"type": "any"}, None), ({"type": "tool", "name": "weather"}, 1), ({"type": "none"}, None)]
)
def test_tool_choice(choice: dict[str, Any], most: int | None) -> None:
    async def test(server: Server) -> None:
        server.engine.reply = (
            "no" if choice["type"] == "none" else '[{"name": "weather", "arguments": {"city": "Rome"}}]'
        )
        answer = await sdk(server).messages.create(
            **ASK | {"tools": [WEATHER], "tool_choice": choice, "max_tokens": 90}
        )
        grammar = server.engine.commands[0].params.grammar
        if choice["type"] == "none":
            assert (answer.content[0].text, grammar) == ("no", "")
        else:
            assert answer.content[0].input == {"city": "Rome"}
            assert "weather" in grammar
            assert ("maxItems" in grammar) == (most == 1)

    serve(test)


def test_output_of_a_schema() -> None:
    async def test(server: Server) -> None:
        schema = {"type": "object", "properties": {"age": {"type": "integer"}}}
        config = {"format": {"type": "json_schema", "schema": schema}}
        await sdk(server).messages.create(**ASK, output_config=config)
        assert "age" in server.engine.commands[0].params.grammar

    serve(test)


def test_calls_that_are_no_objects_stay_readable() -> None:
    async def test(server: Server) -> None:
        server.engine.reply = '<tool_call>{"name": "weather", "arguments": ["Paris"]}</tool_call>'
        answer = await sdk(server).messages.create(**ASK | {"tools": [WEATHER], "max_tokens": 200})
        assert all(isinstance(block.input, dict) for block in answer.content if block.type == "tool_use")

    serve(test, formats=HERMES)


@pytest.mark.parametrize(
    "fields",
    [
        {"thinking": {"type": "enabled", "budget_tokens": 2000}},
        {"tools": [{"type": "web_search_20250305", "name": "web_search"}]},
        {"tools": [WEATHER], "tool_choice": {"type": "tool", "name": "other"}},
        {"messages": [{"role": "user", "content": [{"type": "image", "source": {"type": "url", "url": "http://a"}}]}]},
        {"output_config": {"effort": "high"}},
    ],
)
def test_what_cannot_be_honored_is_refused(fields: dict[str, Any]) -> None:
    async def test(server: Server) -> None:
        with pytest.raises(anthropic.BadRequestError):
            await sdk(server).messages.create(**ASK | fields)
        assert not server.engine.commands

    serve(test, formats=HERMES)
