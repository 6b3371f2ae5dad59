"""Routes that manage a server, and those that take and give token ids."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import openai
import pytest
from unit.runtime.server.fakes import EOS, Server
from unit.runtime.server.test_app import CHAT, REPLY, events, post, sdk, serve

from toolkit.runtime.server.manage import EMBEDDING_ROUTES


async def started(server: Server, count: int) -> None:
    while len(server.engine.commands) < count:
        await asyncio.sleep(0.001)


def test_ready_only_when_a_request_would_be_answered() -> None:
    async def test(server: Server) -> None:
        assert (await server.client.get("/ready")).status_code == 503
        await asyncio.sleep(0.02)
        assert (await server.client.get("/ready")).status_code == 200
        await server.client.post("/pause")
        assert (await server.client.get("/ready")).status_code == 503
        assert (await server.client.get("/health")).status_code == 200
        await server.client.post("/resume")
        assert (await server.client.get("/ready")).status_code == 200

    serve(test)


def test_server_info() -> None:
    async def test(server: Server) -> None:
        info = (await server.client.get("/server_info")).json()
        assert (info["model"], info["max_model_len"], info["tokenizer"]) == ("bytes/model", 256, True)
        assert info["default_sampling_params"] == {"top_k": 5}

    serve(test, defaults={"top_k": 5})


def test_tokenizer_info() -> None:
    async def test(server: Server) -> None:
        info = (await server.client.get("/tokenizer_info")).json()
        assert (info["eos_token"], info["model_max_length"]) == ("<eos>", 256)
        assert info["bos_token"] is None or info["bos_token"]

    serve(test)


def test_the_load_counts_open_requests_and_they_can_be_aborted_by_id() -> None:
    async def test(server: Server) -> None:
        server.engine.stall_after = 2
        tasks = [
            asyncio.create_task(post(server, "/v1/completions", {"prompt": "a", "n": 2, "request_id": name}))
            for name in ("one", "two")
        ]
        await started(server, 4)
        assert (await server.client.get("/load")).json()["server_load"] == 2
        assert await post(server, "/abort_requests", {"request_ids": ["cmpl-one", "gone"]}) == {"aborted": 1}
        answer = await tasks[0]
        assert [(each["text"], each["finish_reason"]) for each in answer["choices"]] == [("He", "abort")] * 2
        assert not tasks[1].done()
        repeated = await server.client.post("/v1/completions", json={"prompt": "a", "request_id": "two"})
        assert (repeated.status_code, repeated.json()["error"]["param"]) == (400, "request_id")
        assert await post(server, "/abort_requests", {}) == {"aborted": 1}
        await tasks[1]
        assert (await server.client.get("/load")).json()["server_load"] == 0
        assert server.engine.aborted == [], "the engine itself ended them"

    serve(test)


@pytest.mark.parametrize("mode", ["abort", "wait"])
def test_pause_and_resume(mode: str) -> None:
    async def test(server: Server) -> None:
        server.engine.stall_after = 2
        running = asyncio.create_task(post(server, "/v1/completions", {"prompt": "a"}))
        await started(server, 1)
        pausing = asyncio.create_task(server.client.post(f"/pause?mode={mode}"))
        await asyncio.sleep(0.02)
        assert pausing.done() == (mode == "abort")
        server.engine.told |= {command.request for command in server.engine.commands}
        assert (await pausing).status_code == 200
        assert (await running)["choices"][0]["finish_reason"] == "abort"
        assert server.engine.resets == 1
        server.engine.stall_after = -1
        waiting = asyncio.create_task(post(server, "/v1/completions", {"prompt": "b"}))
        await asyncio.sleep(0.02)
        assert len(server.engine.commands) == 1
        assert (await server.client.get("/is_paused")).json() == {"is_paused": True}
        await server.client.post("/resume")
        assert (await waiting)["choices"][0]["text"] == REPLY
        for wrong in ("mode=keep", "clear_cache=maybe"):
            response = await server.client.post(f"/pause?{wrong}")
            assert (response.status_code, response.json()["error"]["param"]) == (400, wrong.partition("=")[0])

    serve(test)


def test_sleep_and_wake_up() -> None:
    async def test(server: Server) -> None:
        assert (await server.client.get("/is_sleeping")).json() == {"is_sleeping": False}
        server.engine.stall_after = 2
        running = asyncio.create_task(post(server, "/v1/completions", {"prompt": "a"}))
        await started(server, 1)
        assert (await server.client.post("/sleep?level=2")).status_code == 200
        assert (await running)["choices"][0]["finish_reason"] == "abort"
        assert (await server.client.get("/is_sleeping")).json() == {"is_sleeping": True}
        server.engine.stall_after = -1
        waiting = asyncio.create_task(post(server, "/v1/completions", {"prompt": "b"}))
        await server.client.post("/wake_up?tags=weights")
        await asyncio.sleep(0.02)
        assert len(server.engine.commands) == 1
        assert (await server.client.get("/is_sleeping")).json() == {"is_sleeping": True}
        await server.client.post("/wake_up?tags=kv_cache")
        assert (await waiting)["choices"][0]["text"] == REPLY
        for wrong in ("sleep?mode=keep", "sleep?level=3", "wake_up?tags=lora"):
            response = await server.client.post(f"/{wrong}")
            name = wrong.partition("?")[2].partition("=")[0]
            assert (response.status_code, response.json()["error"]["param"]) == (400, name)

    serve(test)


def test_the_prefix_cache_is_reset() -> None:
    async def test(server: Server) -> None:
        assert (await server.client.post("/reset_prefix_cache")).status_code == 200
        assert server.engine.resets == 1

    serve(test)


def test_a_model_that_generates_says_that_it_cannot_embed() -> None:
    async def test(server: Server) -> None:
        with pytest.raises(openai.BadRequestError, match="can't embed") as caught:
            await sdk(server).embeddings.create(model="bytes/model", input="a")
        assert caught.value.code == "unsupported_model"
        with pytest.raises(openai.NotFoundError):
            await sdk(server).embeddings.create(model="other", input="a")
        for path in EMBEDDING_ROUTES:
            assert (await server.client.post(path, json={"input": "a"})).status_code == 400

    serve(test)


# --- token ids in, token ids out --------------------------------------------------------------------------------------


def test_a_rendered_chat_generates_what_the_chat_answers() -> None:
    async def test(server: Server) -> None:
        body = {
            **CHAT,
            "seed": 3,
            "n": 2,
            "max_completion_tokens": 7,
            "logprobs": True,
            "cache_salt": "s",
            "priority": 4,
        }
        whole = await post(server, "/v1/chat/completions", {**body, "return_token_ids": True})
        rendered = await post(server, "/v1/chat/completions/render", body)
        answer = await post(server, "/inference/v1/generate", rendered)
        for mine, theirs in zip(answer["choices"], whole["choices"], strict=True):
            for name in ("index", "token_ids", "logprobs", "finish_reason", "stop_reason"):
                assert mine[name] == theirs[name]
        chat, tokens = server.engine.commands[:2], server.engine.commands[2:]
        for one, other in zip(chat, tokens, strict=True):
            assert (one.prompt, one.params, one.priority, one.cache_salt, one.eos) == (
                other.prompt,
                other.params,
                other.priority,
                other.cache_salt,
                other.eos,
            )

    serve(test, defaults={"temperature": 0.5})


def test_a_rendered_completion_has_a_request_for_each_prompt() -> None:
    async def test(server: Server) -> None:
        rendered = await post(server, "/v1/completions/render", {"prompt": ["ab", "c"], "max_tokens": 2})
        answers = [await post(server, "/inference/v1/generate", each) for each in rendered["requests"]]
        assert [answer["choices"][0]["token_ids"] for answer in answers] == [list(b"He")] * 2
        assert [bytes(command.prompt) for command in server.engine.commands] == [b"ab", b"c"]

    serve(test)


def test_streamed_tokens_equal_whole() -> None:
    async def test(server: Server) -> None:
        body: dict[str, Any] = {"token_ids": [1, 2], "sampling_params": {"n": 2, "max_tokens": None, "logprobs": 1}}
        whole = await post(server, "/inference/v1/generate", body)
        assert whole["choices"][1]["token_ids"] == [*REPLY.encode(), EOS]
        options = {"stream": True, "stream_options": {"include_usage": True}}
        chunks = events(await server.client.post("/inference/v1/generate", json=body | options))
        assert chunks[-1]["usage"] == whole["usage"]
        for choice in whole["choices"]:
            mine = [part for chunk in chunks for part in chunk["choices"] if part["index"] == choice["index"]]
            assert [token for part in mine for token in part["token_ids"]] == choice["token_ids"]
            entries = [entry for part in mine if part["logprobs"] for entry in part["logprobs"]["content"]]
            assert entries == choice["logprobs"]["content"]
            assert mine[-1]["finish_reason"] == choice["finish_reason"] == "stop"

    serve(test)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "token_ids"),
        ({"token_ids": "a"}, "token_ids"),
        ({"token_ids": [1] * 300}, "token_ids"),
        ({"token_ids": [1], "sampling_params": {"bogus": 1}}, "sampling_params"),
        ({"token_ids": [1], "sampling_params": {"n": 0}}, "sampling_params"),
        ({"token_ids": [1], "sampling_params": {"top_p": "x"}}, "sampling_params"),
        ({"token_ids": [1], "bogus": 1}, "bogus"),
    ],
)
def test_bad_token_requests_are_named(body: Any, param: str) -> None:
    async def test(server: Server) -> None:
        response = await server.client.post("/inference/v1/generate", content=json.dumps(body), headers=JSON)
        assert (response.status_code, response.json()["error"]["param"]) == (400, param)

    serve(test)


JSON = {"content-type": "application/json"}
