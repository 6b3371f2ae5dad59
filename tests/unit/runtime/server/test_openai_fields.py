"""Every field is honored or refused by name."""

from __future__ import annotations

from typing import Any

import pytest
from openai.types import completion_create_params
from openai.types.chat import completion_create_params as chat_create_params
from unit.runtime.server.fakes import ByteTokenizer, RoleTemplate, make_plan

from toolkit.runtime.errors import UserError
from toolkit.runtime.prompt import Prompts
from toolkit.runtime.request import SamplingParams
from toolkit.runtime.server.errors import ApiError
from toolkit.runtime.server.openai import (
    REFUSED,
    ChatRequest,
    CompletionRequest,
    TokenizeChat,
    parse,
    parse_json,
    render_messages,
)

MESSAGES = [{"role": "user", "content": "hi"}]


def prompts(**defaults: Any) -> Prompts:
    return Prompts(make_plan(), ByteTokenizer(), RoleTemplate(), defaults)


def chat(**fields: Any) -> ChatRequest:
    return parse({"messages": MESSAGES, **fields}, ChatRequest)


def completion(**fields: Any) -> CompletionRequest:
    return parse({"prompt": "hi", **fields}, CompletionRequest)


def test_all_fields_of_the_sdk_are_known() -> None:
    asked = set(chat_create_params.CompletionCreateParamsBase.__annotations__) | {"stream"}
    assert asked - set(ChatRequest.__struct_fields__) - set(REFUSED) == set()
    asked = set(completion_create_params.CompletionCreateParamsBase.__annotations__) | {"stream"}
    assert asked - set(CompletionRequest.__struct_fields__) - set(REFUSED) == set()


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_refused_fields_are_named_unless_they_ask_for_nothing(name: str) -> None:
    kinds = [kind for kind in (ChatRequest, CompletionRequest) if name not in kind.__struct_fields__]
    for kind in kinds:
        body = {"messages": MESSAGES} if kind is ChatRequest else {"prompt": "hi"}
        neutral, reason = REFUSED[name]
        for value in (*neutral, None):
            parse({**body, name: value}, kind)
        with pytest.raises(ApiError, match=reason) as caught:
            parse({**body, name: {"something": 1}}, kind)
        assert (caught.value.status, caught.value.param) == (400, name)
        assert name in caught.value.message


def test_a_number_is_no_boolean() -> None:
    with pytest.raises(ApiError, match="store"):
        chat(store=0)


HONORED: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"temperature": 0}, {"temperature": 0.0}),
    ({"top_p": 0.5, "top_k": 7, "min_p": 0.25}, {"top_p": 0.5, "top_k": 7, "min_p": 0.25}),
    ({"frequency_penalty": -1, "presence_penalty": 2}, {"frequency_penalty": -1.0, "presence_penalty": 2.0}),
    ({"repetition_penalty": 1.5}, {"repetition_penalty": 1.5}),
    ({"n": 3, "seed": 11}, {"n": 3, "seed": 11}),
    ({"stop": "a"}, {"stop": ("a",)}),
    ({"stop": ["a", "", "bc"]}, {"stop": ("a", "bc")}),
    ({"stop_token_ids": [1, 2]}, {"stop_token_ids": (1, 2)}),
    ({"logit_bias": {"5": -100, "7": 1.5}}, {"logit_bias": {5: -100.0, 7: 1.5}}),
    ({"max_tokens": 3, "min_tokens": 2, "ignore_eos": True}, {"max_tokens": 3, "min_tokens": 2, "ignore_eos": True}),
    ({"include_stop_str_in_output": True}, {"include_stop_str_in_output": True}),
    ({"skip_special_tokens": False}, {"skip_special_tokens": False}),
    ({"prompt_logprobs": 4}, {"prompt_logprobs": 4}),
    ({"user": "me", "metadata": {"a": "b"}, "safety_identifier": "x", "prompt_cache_key": "y"}, {}),
    ({"seed": None, "stop": None, "tools": None}, {}),
]


@pytest.mark.parametrize(("fields", "expected"), HONORED)
def test_sampling_fields_are_honored(fields: dict[str, Any], expected: dict[str, Any]) -> None:
    assert chat(**fields).params(prompts()) == SamplingParams(**{"max_tokens": None, **expected})
    assert completion(**fields).params(prompts()) == SamplingParams(**expected)


def test_logprobs() -> None:
    assert chat(logprobs=True).params(prompts()).logprobs == 0
    assert chat(logprobs=True, top_logprobs=5).params(prompts()).logprobs == 5
    assert completion(logprobs=2).params(prompts()).logprobs == 2
    assert completion(logprobs=2, echo=True).params(prompts()).prompt_logprobs == 2
    assert completion(best_of=3).params(prompts()) == SamplingParams(n=3, logprobs=0)


def test_limits() -> None:
    assert chat(max_completion_tokens=9).params(prompts()).max_tokens == 9
    assert chat(max_completion_tokens=9, max_tokens=9).limit == 9
    assert completion(max_tokens=0, echo=True).params(prompts()).max_tokens == 1


def test_the_models_defaults_apply_where_the_request_says_nothing() -> None:
    defaults = prompts(temperature=0.5, top_k=9)
    params = chat(temperature=1.0).params(defaults)
    assert (params.temperature, params.top_k) == (1.0, 9)


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"bogus": 1}, "bogus", "not a field"),
        ({"max_tokens": "x"}, "max_tokens", "Expected `int"),
        ({"max_tokens": 1.5}, "max_tokens", "Expected `int"),
        ({"temperature": True}, "temperature", "Expected `float"),
        ({"stop": ["a"] * 17}, "stop", "16 strings"),
        ({"stop": "a" * 5000}, "stop", "4096 characters"),
        ({"logit_bias": {"1": 101}}, "logit_bias", "-100 to 100"),
        ({"logit_bias": {"x": 1}}, "logit_bias", "Expected `int"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "stream to be true"),
        ({"stream": True, "stream_options": {"x": 1}}, "x", "not a field"),
        ({"stream": True, "stream_options": {"include_obfuscation": True}}, "stream_options", "not supported"),
        ({"stream": True, "prompt_logprobs": 1}, "prompt_logprobs", "stream to false"),
        ({"prompt_logprobs": -1}, "prompt_logprobs", "Python only"),
        ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens", "-1 or more"),
    ],
)
def test_bad_fields_are_named(fields: dict[str, Any], param: str, message: str) -> None:
    for make in (chat, completion):
        with pytest.raises(ApiError, match=message) as caught:
            make(**fields)
        assert (caught.value.status, caught.value.param) == (400, param)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"max_tokens": 1, "max_completion_tokens": 2}, "max_tokens"),
        ({"messages": None}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [{"content": "hi"}]}, "role"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, "messages"),
    ],
)
def test_bad_chat_fields_are_named(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as caught:
        chat(**fields)
    assert (caught.value.status, caught.value.param) == (400, param)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": None}, "prompt"),
        ({"prompt": 3}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [1, "a"]}, "prompt"),
        ({"prompt": ["a"] * 2000}, "prompt"),
        ({"best_of": 1, "n": 2}, "best_of"),
        ({"best_of": 2, "stream": True}, "best_of"),
        ({"max_tokens": 0}, "max_tokens"),
    ],
)
def test_bad_completion_fields_are_named(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as caught:
        completion(**fields)
    assert (caught.value.status, caught.value.param) == (400, param)


@pytest.mark.parametrize("fields", [{"temperature": -1}, {"n": 0}, {"n": 10**6}, {"top_p": 0}, {"min_tokens": 20}])
def test_values_out_of_range_are_the_users_fault(fields: dict[str, Any]) -> None:
    name = next(iter(fields))
    with pytest.raises(ApiError, match=name) as caught:
        completion(**fields).params(prompts())
    assert (caught.value.status, caught.value.param) == (400, name)


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("a", ["a"]),
        (["a", "b"], ["a", "b"]),
        ([1, 2], [[1, 2]]),
        ([[1], [2, 3]], [[1], [2, 3]]),
        ([[1], "a"], [[1], "a"]),
    ],
)
def test_prompts(prompt: Any, expected: Any) -> None:
    assert completion(prompt=prompt).prompts == expected


def test_messages_become_what_templates_expect() -> None:
    request = chat(
        messages=[
            {"role": "developer", "content": "be kind"},
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "name": "me"},
            {
                "role": "assistant",
                "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}],
            },
            {"role": "tool", "content": "2", "tool_call_id": "1"},
            {"role": "assistant", "refusal": "no"},
        ]
    )
    assert [message.as_dict() for message in request.messages] == [
        {"role": "system", "content": "be kind"},
        {"role": "user", "content": "a\nb", "name": "me"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": {"x": 1}}}],
        },
        {"role": "tool", "content": "2", "tool_call_id": "1"},
        {"role": "assistant", "content": "no"},
    ]


def test_templates_get_their_arguments() -> None:
    assert render_messages(chat(chat_template_kwargs={"thinking": False}), prompts()).endswith(
        "[thinking=False]assistant:"
    )
    assert render_messages(chat(add_generation_prompt=False), prompts()) == "user:hi\n"
    with pytest.raises(ApiError, match="can't set tools"):
        render_messages(chat(chat_template_kwargs={"tools": []}), prompts())


def test_the_final_message_is_continued() -> None:
    open_ended = {"continue_final_message": True, "add_generation_prompt": False}
    messages = [*MESSAGES, {"role": "assistant", "content": "The capital is"}]
    assert render_messages(chat(messages=messages, **open_ended), prompts()) == "user:hi\nassistant:The capital is"
    request = parse({"messages": messages, **open_ended}, TokenizeChat)
    assert render_messages(request, prompts()).endswith("is")
    with pytest.raises(UserError, match="add_generation_prompt"):
        render_messages(chat(continue_final_message=True), prompts())


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[1]", b"3", b"\xff", b'{"a":NaN}', b"[" * 100_000, b'{"a":1e999}', b'{"a":"\xff"}', b'"\\ud800"'],
)
def test_bodies_that_are_no_json_object(body: bytes) -> None:
    with pytest.raises(ApiError) as caught:
        parse_json(body)
    assert caught.value.status == 400
