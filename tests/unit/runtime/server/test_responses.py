"""`/v1/responses` as OpenAI's SDK uses it."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import openai
import pydantic
import pytest
from openai.types.responses import response_create_params
from unit.runtime.server.fakes import Server
from unit.runtime.server.test_app import REPLY, sdk, serve
from unit.runtime.server.test_manage import started

from toolkit.runtime.formats import Formats
from toolkit.runtime.request import Error
from toolkit.runtime.server.response_input import REFUSED, ResponsesRequest, messages_of
from toolkit.runtime.server.response_store import ResponseStore, Stored

MODEL = "bytes/model"
WEATHER = {
    "type": "function",
    "name": "weather",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
HERMES = Formats(tools="hermes", reasoning="qwen3")
THOUGHT = '<think>Rain?</think>Let me see.<tool_call>{"name": "weather", "arguments": {"city": "Paris"}}</tool_call>'


def test_all_fields_of_the_sdk_are_known() -> None:
    asked = set(response_create_params.ResponseCreateParamsBase.__annotations__) | {"stream"}
    assert asked <= set(ResponsesRequest.__struct_fields__) | REFUSED.keys()


def test_a_whole_response() -> None:
    async def test(server: Server) -> None:
        response = await sdk(server).responses.create(
            model=MODEL, input="hi", instructions="Be kind.", max_output_tokens=100, metadata={"a": "b"}
        )
        assert (response.status, response.output_text, response.metadata) == ("completed", REPLY, {"a": "b"})
        assert response.usage.output_tokens == len(REPLY.encode()) + 1
        prompt = bytes(server.engine.commands[0].prompt).decode()
        assert prompt == "system:Be kind.\nuser:hi\nassistant:"
        assert response.usage.input_tokens == len(prompt)

    serve(test)


def test_what_was_cut_says_so() -> None:
    async def test(server: Server) -> None:
        response = await sdk(server).responses.create(model=MODEL, input="hi", max_output_tokens=3)
        assert (response.status, response.incomplete_details.reason) == ("incomplete", "max_output_tokens")
        assert response.output[0].status == "incomplete"

    serve(test)


def test_a_stream_tells_of_items_that_the_sdk_puts_together() -> None:
    """The SDK's own accumulation of events equals what `response.completed` says, and what is stored."""

    async def test(server: Server) -> None:
        server.engine.reply = THOUGHT
        client = sdk(server)
        kinds, numbers = [], []
        arguments: dict[str, Any] = {"model": MODEL, "input": "Rain in Paris?", "tools": [WEATHER]}
        async with client.responses.stream(**arguments) as stream:
            async for event in stream:
                kinds.append(event.type)
                numbers.append(event.sequence_number)
            final = await stream.get_final_response()
        assert numbers == list(range(len(numbers)))
        assert kinds[:2] == ["response.created", "response.in_progress"]
        assert kinds[-1] == "response.completed"
        assert kinds.count("response.function_call_arguments.delta") > 10, "arguments come while they are written"
        reasoning, message, call = final.output
        assert (reasoning.type, reasoning.content[0].text) == ("reasoning", "Rain?")
        assert (message.type, message.content[0].text) == ("message", "Let me see.")
        assert (call.type, call.name, json.loads(call.arguments)) == ("function_call", "weather", {"city": "Paris"})
        assert {item.status for item in final.output} == {"completed"}
        assert final.usage.output_tokens_details.reasoning_tokens > 0
        stored = await client.responses.retrieve(final.id)
        assert stored.model_dump(exclude={"output"}) == final.model_dump(exclude={"output"})
        assert [item.id for item in stored.output] == [item.id for item in final.output]
        whole = await client.responses.create(**arguments)
        assert [item.type for item in whole.output] == ["reasoning", "message", "function_call"]

    serve(test, formats=HERMES)


def test_a_conversation_goes_on_with_its_calls_and_their_results() -> None:
    async def test(server: Server) -> None:
        server.engine.reply = THOUGHT
        client = sdk(server)
        first = await client.responses.create(
            model=MODEL, input="Rain?", instructions="Be kind.", tools=[WEATHER], store=True
        )
        server.engine.reply = "No rain."
        result = {"type": "function_call_output", "call_id": first.output[2].call_id, "output": "sunny"}
        second = await client.responses.create(
            model=MODEL, input=[result], previous_response_id=first.id, tools=[WEATHER]
        )
        assert (second.output_text, second.previous_response_id) == ("No rain.", first.id)
        prompt = bytes(server.engine.commands[-1].prompt).decode()
        assert prompt.startswith("user:Rain?\nassistant:Let me see.\ntool:sunny\nassistant:"), "no instructions"
        items = await client.responses.input_items.list(second.id)
        assert [item.type for item in items.data] == ["function_call_output"]
        await client.responses.delete(first.id)
        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve(first.id)
        with pytest.raises(openai.NotFoundError):
            await client.responses.create(model=MODEL, input="a", previous_response_id=first.id)
        unkept = await client.responses.create(model=MODEL, input="a", store=False)
        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve(unkept.id)

    serve(test, formats=HERMES)


def test_items_become_messages() -> None:
    items: list[dict[str, Any]] = [
        {"role": "user", "content": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "c"}]},
        {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"},
        {"type": "function_call", "call_id": "2", "name": "g", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "1", "output": "x"},
    ]
    calls = [
        {"id": number, "type": "function", "function": {"name": name, "arguments": "{}"}}
        for number, name in (("1", "f"), ("2", "g"))
    ]
    assert messages_of(items) == [
        {"role": "user", "content": "a\nb"},
        {"role": "assistant", "reasoning_content": "hm", "content": "c", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "1", "content": "x"},
    ]


class Person(pydantic.BaseModel):
    name: str
    age: int


def test_structured_output_is_parsed() -> None:
    async def test(server: Server) -> None:
        server.engine.reply = '{"name": "Ada", "age": 36}'
        response = await sdk(server).responses.parse(model=MODEL, input="who?", text_format=Person)
        assert response.output_parsed == Person(name="Ada", age=36)
        assert "age" in server.engine.commands[0].params.grammar

    serve(test)


def test_a_background_response_is_waited_for_or_cancelled() -> None:
    async def test(server: Server) -> None:
        client = sdk(server)
        response = await client.responses.create(model=MODEL, input="hi", background=True)
        assert response.status == "queued"
        while (response := await client.responses.retrieve(response.id)).status in {"queued", "in_progress"}:
            await asyncio.sleep(0.005)
        assert (response.status, response.output_text) == ("completed", REPLY)
        assert (await client.responses.cancel(response.id)).status == "completed"
        server.engine.stall_after = 2
        slow = await client.responses.create(model=MODEL, input="hi", background=True)
        await started(server, 2)
        while (await client.responses.retrieve(slow.id)).status == "queued":
            await asyncio.sleep(0.005)
        cancelled = await client.responses.cancel(slow.id)
        assert (cancelled.status, cancelled.output_text) == ("cancelled", REPLY[:2])
        assert (await server.client.get("/load")).json()["server_load"] == 0
        server.engine.stall_after = -1
        waited = await client.responses.create(model=MODEL, input="hi")
        with pytest.raises(openai.BadRequestError, match="background"):
            await client.responses.cancel(waited.id)

    serve(test)


@pytest.mark.parametrize("after", [0, 3])
def test_a_failure_is_a_status_before_the_first_event_and_an_event_later(after: int) -> None:
    async def test(server: Server) -> None:
        server.engine.error, server.engine.error_after = Error("", "boom", user_fault=False), after
        client = sdk(server)
        if after == 0:
            with pytest.raises(openai.InternalServerError, match="boom"):
                await client.responses.create(model=MODEL, input="hi", stream=True)
            return
        stream = await client.responses.create(model=MODEL, input="hi", stream=True)
        last = [event async for event in stream][-1]
        assert last.type == "response.failed"
        assert "boom" in last.response.error.message
        assert last.response.output[0].status == "incomplete"
        with pytest.raises(openai.InternalServerError, match="boom"):
            await client.responses.create(model=MODEL, input="hi")

    serve(test)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"truncation": "auto"}, "truncation"),
        ({"conversation": "c"}, "conversation"),
        ({"tools": [{"type": "web_search"}]}, "tools"),
        ({"tool_choice": {"type": "function", "name": "g"}, "tools": [WEATHER]}, "tool_choice"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "http://10.0.0.1"}]}]}, "input"),
        ({"input": [{"role": "user"}]}, "input"),
        ({"input": [{"type": "function_call", "name": 3}]}, "input"),
        ({"include": ["file_search_call.results"]}, "include"),
        ({"background": True, "store": False}, "background"),
        ({"max_output_tokens": -1}, "max_tokens"),
        ({"reasoning": {"effort": "high"}}, "reasoning_effort"),
        ({"unheard": 1}, "unheard"),
    ],
)
def test_what_cannot_be_honored_is_refused_by_name(fields: dict[str, Any], param: str) -> None:
    async def test(server: Server) -> None:
        answer = await server.client.post("/v1/responses", json={"model": MODEL, "input": "hi"} | fields)
        assert answer.status_code == 400, answer.text
        assert answer.json()["error"]["param"] == param
        assert not server.engine.commands

    serve(test, formats=HERMES)


def test_old_responses_are_forgotten() -> None:
    store = ResponseStore()
    for index in range(1005):
        store.put(Stored({"id": str(index)}, [], [{"content": "x" * (10 << 20) if index == 3 else "y"}], ""))
    assert store["1004"].data == {"id": "1004"}
    for forgotten in ("0", "3", "4"):
        with pytest.raises(Exception, match="no response"):
            store[forgotten]
    for index in range(20):
        store.put(Stored({"id": f"big{index}"}, [], [{"content": "x" * (10 << 20)}], ""))
    assert sum(f"big{index}" in store._found for index in range(20)) == 6
