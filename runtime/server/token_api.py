"""Token ids in, token ids out: `/inference/v1/generate`, and the `render` routes that make its requests of text."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any, ClassVar

import msgspec

from ..errors import UserError
from ..output import Output, TokenTexts
from ..request import SamplingParams
from .errors import ApiError
from .generate import Answer, Job
from .openai import ChatRequest, CompletionRequest, StreamOptions, parse, render_messages
from .render import DONE, chat_logprobs, event, prompt_logprobs
from .service import Service


class GenerateRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """`POST /inference/v1/generate`."""

    id_prefix: ClassVar[str] = "gen-"
    prompt_field: ClassVar[str] = "token_ids"

    token_ids: list[int]
    sampling_params: dict[str, Any] = {}
    """Fields of `SamplingParams`; what is left out is the model's own default."""
    model: str | None = None
    request_id: str | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    priority: int = 0
    cache_salt: str = ""
    truncate_prompt_tokens: int | None = None
    return_tokens_as_token_ids: bool = False

    @property
    def with_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage


async def generate_tokens(service: Service, data: dict[str, Any]) -> Answer:
    """`POST /inference/v1/generate`."""
    request = parse(data, GenerateRequest)
    service.check_model(request.model)
    prompts = await service.prompts()
    try:
        params = msgspec.convert(prompts.defaults | request.sampling_params, SamplingParams, str_keys=True)
    except (msgspec.ValidationError, UserError) as error:
        raise ApiError(400, f"sampling_params: {error}", param="sampling_params") from None
    ids = prompts.encode(request.token_ids)
    job = await Job.make(service, request, [ids], params, params.max_tokens)
    return _stream(job, request.with_usage) if request.stream else await _whole(job, params)


async def _stream(job: Job, with_usage: bool) -> AsyncGenerator[bytes, None]:
    usage, texts = job.usage(), await job.texts()
    async with aclosing(job.deltas()) as deltas:
        async for index, delta in deltas:
            usage.add(delta)
            if delta.token_ids or delta.finish_reason:
                logprobs = chat_logprobs(delta.logprobs, texts) if delta.logprobs else None
                choice = _choice(index, delta.token_ids, logprobs, delta.finish_reason, delta.stop_reason)
                yield event({"request_id": job.id, "choices": [choice]})
    yield (event({"request_id": job.id, "choices": [], "usage": usage.data()}) if with_usage else b"") + DONE


async def _whole(job: Job, params: SamplingParams) -> dict[str, Any]:
    usage, texts = job.usage(), await job.texts()
    choices = await job.collect(usage)
    return {
        "request_id": job.id,
        "choices": [_whole_choice(index, choice, params, texts) for index, choice in enumerate(choices)],
        "prompt_logprobs": prompt_logprobs(choices[0].prompt_logprobs or [], texts)
        if params.prompt_logprobs is not None
        else None,
        "usage": usage.data(),
    }


def _whole_choice(index: int, choice: Output, params: SamplingParams, texts: TokenTexts) -> dict[str, Any]:
    logprobs = chat_logprobs(choice.logprobs, texts) if params.logprobs is not None else None
    return _choice(index, choice.token_ids, logprobs, choice.finish_reason, choice.stop_reason)


def _choice(
    index: int, ids: list[int], logprobs: dict[str, Any] | None, reason: str | None, stop: str | int | None
) -> dict[str, Any]:
    return {"index": index, "token_ids": ids, "logprobs": logprobs, "finish_reason": reason, "stop_reason": stop}


# --- render -----------------------------------------------------------------------------------------------------------


async def render_chat(service: Service, data: dict[str, Any]) -> dict[str, Any]:
    """`POST /v1/chat/completions/render`: the request of `/inference/v1/generate` that a chat request amounts to."""
    request = parse(data, ChatRequest)
    service.check_model(request.model)
    prompts = await service.prompts()
    text = render_messages(request, prompts)
    ids = await service.encode(text, add_special_tokens=bool(request.add_special_tokens))
    return _rendered(service, request, ids, request.params(prompts))


async def render_completion(service: Service, data: dict[str, Any]) -> dict[str, Any]:
    """`POST /v1/completions/render`: the same of a completion, a request for each prompt."""
    request = parse(data, CompletionRequest)
    service.check_model(request.model)
    params = request.params(await service.prompts())
    special = request.add_special_tokens is not False
    each = [await service.encode(prompt, add_special_tokens=special) for prompt in request.prompts]
    return {"requests": [_rendered(service, request, ids, params) for ids in each]}


def _rendered(
    service: Service, request: ChatRequest | CompletionRequest, ids: list[int], params: SamplingParams
) -> dict[str, Any]:
    return {
        "model": service.model,
        "token_ids": ids,
        "sampling_params": msgspec.to_builtins(params),
        "priority": request.priority,
        "cache_salt": request.cache_salt,
        "stream": request.stream,
        "truncate_prompt_tokens": request.truncate_prompt_tokens,
    }
