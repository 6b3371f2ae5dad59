"""`/v1/completions` and `/v1/chat/completions`: from a request's fields to its answer, streamed or whole."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import msgspec

from ..output import Delta, Output, TokenTexts
from ..prompt import Prompts
from ..request import Add, SamplingParams, TokenLogprob
from .answers import ChoiceReader, message
from .errors import ApiError
from .openai import ChatRequest, CompletionRequest, StreamOptions, parse, render_messages
from .render import (
    DONE,
    ROLE_FIELD,
    Chunks,
    CompletionLogprobs,
    Usage,
    chat_logprobs,
    delta_field,
    ids_field,
    prompt_logprobs,
    text_field,
)
from .service import Service, merge

Answer = dict[str, Any] | AsyncGenerator[bytes, None]
"""JSON data, or the chunks of a stream."""


class JobRequest(Protocol):
    """What a job needs to know of the request that asked for it."""

    id_prefix: ClassVar[str]
    """How the ids of its answers begin."""
    prompt_field: ClassVar[str]
    request_id: str | None
    priority: int
    cache_salt: str
    truncate_prompt_tokens: int | None
    """Keep only the last so many tokens of a prompt; -1: as many as fit."""
    return_tokens_as_token_ids: bool
    stream_options: StreamOptions | None

    @property
    def with_usage(self) -> bool:
        """Whether a stream ends with the usage."""


@dataclass
class Job:
    """One HTTP request's work: `n` choices for each of its prompts."""

    service: Service
    request: JobRequest
    id: str
    created: int
    prompts: list[list[int]]
    commands: list[Add]

    @classmethod
    async def make(
        cls,
        service: Service,
        request: JobRequest,
        prompts: Sequence[list[int]],
        params: SamplingParams,
        limit: int | None,
    ) -> Job:
        """Raises ApiError(400) if a prompt with the `limit` that was asked for does not fit the model's context."""
        number = uuid.uuid4().hex
        text = await service.prompts()
        prompts = [_fitted(service, request, prompt, limit) for prompt in prompts]
        commands: list[Add] = []
        for index, prompt in enumerate(prompts):
            commands += text.commands(
                f"{number}-{index}", prompt, params, priority=request.priority, cache_salt=request.cache_salt
            )
            service.metrics.asked(params)
        identity = request.id_prefix + (request.request_id or number)
        return cls(service, request, identity, int(time.time()), prompts, commands)

    def head(self, kind: str) -> dict[str, Any]:
        """The fields that every answer and chunk begins with."""
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.service.model,
            "system_fingerprint": self.service.fingerprint,
        }

    def chunks(self, kind: str, usage: Usage) -> Chunks:
        options = self.request.stream_options
        running = usage if options is not None and options.continuous_usage_stats else None
        return Chunks(self.head(kind), with_usage=self.request.with_usage, usage=running)

    def usage(self) -> Usage:
        return Usage(sum(map(len, self.prompts)))

    def prompt_of(self, index: int) -> int:
        """Which prompt a choice answers."""
        return index * len(self.prompts) // len(self.commands)

    async def deltas(self) -> AsyncGenerator[tuple[int, Delta], None]:
        """The deltas of all choices, with the choice's index."""
        lengths = [0] * len(self.commands)
        async with self.service.gate.admit(self.id, self.commands) as ticket:
            try:
                async with aclosing(merge([self.service.run(command) for command in self.commands])) as deltas:
                    async for item in deltas:
                        lengths[item[0]] += len(item[1].token_ids)
                        ticket.check(item[1])
                        yield item
            finally:
                each = len(lengths) // len(self.prompts)
                for start in range(0, len(lengths), each):
                    self.service.metrics.longest.observe(max(lengths[start : start + each]))

    async def collect(self, usage: Usage) -> list[Output]:
        """All choices, whole."""
        choices = [Output() for _ in self.commands]
        async with aclosing(self.deltas()) as deltas:
            async for index, delta in deltas:
                usage.add(delta)
                choices[index].add(delta)
        return choices

    async def texts(self) -> TokenTexts:
        """How log-probabilities name tokens."""
        return TokenTexts(None) if self.request.return_tokens_as_token_ids else await self.service.token_texts()


def _fitted(service: Service, request: JobRequest, prompt: list[int], limit: int | None) -> list[int]:
    context = service.plan.model.max_context
    room = context - (limit or 1)
    keep = request.truncate_prompt_tokens
    if keep is not None:
        keep = max(room, 0) if keep == -1 else keep
        prompt = prompt[len(prompt) - keep :] if len(prompt) > keep else prompt
    if len(prompt) > room:
        message = (
            f"This model's context is {context} tokens, but the prompt has {len(prompt)} and {limit or 1} are asked "
            "for: shorten the prompt or ask for fewer."
        )
        param = request.prompt_field
        raise ApiError(400, message, param=param, code="context_length_exceeded")
    return prompt


async def _params(request: CompletionRequest | ChatRequest, prompts: Prompts) -> SamplingParams:
    """The engine's parameters. A large grammar takes long to check, so other requests' tokens flow meanwhile."""
    return await asyncio.to_thread(request.params, prompts) if request.structured else request.params(prompts)


# --- chat -------------------------------------------------------------------------------------------------------------


async def chat_completions(service: Service, data: dict[str, Any]) -> Answer:
    """`POST /v1/chat/completions`."""
    request = parse(data, ChatRequest)
    service.check_model(request.model)
    job, readers = await make_chat(service, request)
    if request.stream:
        return _stream_chat(job, request, readers)
    return await _whole_chat(job, request, readers)


async def make_chat(service: Service, request: ChatRequest) -> tuple[Job, list[ChoiceReader]]:
    """The work that a chat amounts to, and what reads each choice of its answer."""
    prompts = await service.prompts()
    params = await _params(request, prompts)
    text = render_messages(request, prompts)
    ids = await service.encode(text, add_special_tokens=bool(request.add_special_tokens))
    job = await Job.make(service, request, [ids], params, request.limit)
    return job, [ChoiceReader(prompts.formats, text, request, constrained=bool(params.grammar)) for _ in job.commands]


async def _stream_chat(job: Job, request: ChatRequest, readers: list[ChoiceReader]) -> AsyncGenerator[bytes, None]:
    usage, texts = job.usage(), await job.texts()
    chunks = job.chunks("chat.completion.chunk", usage)
    started: set[int] = set()
    async with aclosing(job.deltas()) as deltas:
        async for index, delta in deltas:
            usage.add(delta)
            data = b""
            if index not in started:
                started.add(index)
                extra = ids_field("prompt_token_ids", job.prompts[0]) if request.return_token_ids else b""
                data = chunks.first(index, ROLE_FIELD, extra)
            reader = readers[index]
            field = reader.delta(reader.push(delta))
            if field or delta.logprobs or delta.finish_reason or request.return_token_ids:
                logprobs = msgspec.json.encode(chat_logprobs(delta.logprobs, texts)) if delta.logprobs else b"null"
                extra = ids_field("token_ids", delta.token_ids) if request.return_token_ids else b""
                reason = reader.reason(delta.finish_reason)
                data += chunks.chunk(index, delta_field(field), logprobs, delta, extra, reason=reason)
            if data:
                yield data
    yield (chunks.usage(usage) if request.with_usage else b"") + DONE


async def _whole_chat(job: Job, request: ChatRequest, readers: list[ChoiceReader]) -> dict[str, Any]:
    usage, texts = job.usage(), await job.texts()
    choices = await job.collect(usage)
    answer = job.head("chat.completion")
    answer["choices"] = [
        {
            "index": index,
            "message": message(reader.push(Delta(choice.text, [], finish_reason=choice.finish_reason))),
            "logprobs": chat_logprobs(choice.logprobs, texts) if request.logprobs else None,
            "finish_reason": reader.reason(choice.finish_reason),
            "stop_reason": choice.stop_reason,
            **({"token_ids": choice.token_ids} if request.return_token_ids else {}),
        }
        for index, (choice, reader) in enumerate(zip(choices, readers, strict=True))
    ]
    answer["usage"] = usage.data()
    if request.return_token_ids:
        answer["prompt_token_ids"] = job.prompts[0]
    if request.prompt_logprobs is not None:
        answer["prompt_logprobs"] = prompt_logprobs(choices[0].prompt_logprobs or [], texts)
    return answer


# --- completions ------------------------------------------------------------------------------------------------------


async def completions(service: Service, data: dict[str, Any]) -> Answer:
    """`POST /v1/completions`."""
    request = parse(data, CompletionRequest)
    service.check_model(request.model)
    params = await _params(request, await service.prompts())
    special = request.add_special_tokens is not False
    prompts = [await service.encode(prompt, add_special_tokens=special) for prompt in request.prompts]
    job = await Job.make(service, request, prompts, params, request.max_tokens)
    echoes = [await _echo(service, request, index, prompt) for index, prompt in enumerate(job.prompts)]
    if request.stream:
        return _stream_completion(job, request, echoes)
    return await _whole_completion(job, request, echoes)


async def _echo(service: Service, request: CompletionRequest, index: int, ids: list[int]) -> str:
    """The prompt's text, if the answer begins with it."""
    if not request.echo:
        return ""
    prompt = request.prompts[index]
    if isinstance(prompt, str) and request.truncate_prompt_tokens is None:
        return prompt
    prompts = await service.prompts()
    return prompts.decode(ids, skip_special_tokens=request.skip_special_tokens) if prompts.tokenizer else ""


def _logprobs_piece(
    request: CompletionRequest, logprobs: CompletionLogprobs, prompt: list[int], delta: Delta | Output, *, first: bool
) -> dict[str, Any] | None:
    """The log-probabilities of a piece; an echoed prompt's come before the first."""
    if request.logprobs is None:
        return None
    tokens: list[int] = []
    entries: list[TokenLogprob | None] = []
    if request.echo and first:
        tokens += prompt
        entries += delta.prompt_logprobs or [None] * len(prompt)
    if request.max_tokens != 0:
        tokens += delta.token_ids
        entries += delta.logprobs or []
    return logprobs.piece(tokens, entries)


async def _stream_completion(job: Job, request: CompletionRequest, echoes: list[str]) -> AsyncGenerator[bytes, None]:
    usage, texts = job.usage(), await job.texts()
    chunks = job.chunks("text_completion", usage)
    logprobs = [CompletionLogprobs(texts) for _ in job.commands]
    started: set[int] = set()
    async with aclosing(job.deltas()) as deltas:
        async for index, given in deltas:
            first, extra = index not in started, b""
            delta = _without_output(given) if request.max_tokens == 0 else given
            usage.add(delta)
            prompt = job.prompt_of(index)
            piece = _logprobs_piece(request, logprobs[index], job.prompts[prompt], delta, first=first)
            if request.return_token_ids:
                extra = ids_field("token_ids", delta.token_ids)
            if first:
                started.add(index)
                delta.text = echoes[prompt] + delta.text
                if request.return_token_ids:
                    extra += ids_field("prompt_token_ids", job.prompts[prompt])
            if first or delta.text or delta.logprobs or delta.finish_reason or request.return_token_ids:
                yield chunks.chunk(index, text_field(delta.text), msgspec.json.encode(piece), delta, extra)
    yield (chunks.usage(usage) if request.with_usage else b"") + DONE


def _without_output(delta: Delta) -> Delta:
    """A delta of an answer that is only the echoed prompt: the engine must generate a token, which is dropped."""
    return Delta("", [], None, delta.prompt_logprobs, delta.finish_reason, None, delta.metrics)


async def _whole_completion(job: Job, request: CompletionRequest, echoes: list[str]) -> dict[str, Any]:
    usage, texts = job.usage(), await job.texts()
    choices = await job.collect(usage)
    kept = _best(choices, len(job.prompts), request)
    answer = job.head("text_completion")
    answer["choices"] = [
        {"index": index, **_completion_choice(request, choice, job.prompts[prompt], echoes[prompt], texts)}
        for index, choice in enumerate(kept)
        for prompt in [index // request.n]
    ]
    if request.max_tokens == 0:
        usage.completion_tokens = 0
    answer["usage"] = usage.data()
    if request.prompt_logprobs is not None:
        for index, choice in enumerate(kept):
            answer["choices"][index]["prompt_logprobs"] = prompt_logprobs(choice.prompt_logprobs or [], texts)
    return answer


def _completion_choice(
    request: CompletionRequest, choice: Output, prompt: list[int], echo: str, texts: TokenTexts
) -> dict[str, Any]:
    data: dict[str, Any] = {
        "text": echo + ("" if request.max_tokens == 0 else choice.text),
        "logprobs": _logprobs_piece(request, CompletionLogprobs(texts), prompt, choice, first=True),
        "finish_reason": choice.finish_reason,
        "stop_reason": choice.stop_reason,
    }
    if request.return_token_ids:
        data |= {"token_ids": choice.token_ids, "prompt_token_ids": prompt}
    return data


def _best(choices: list[Output], prompts: int, request: CompletionRequest) -> list[Output]:
    """The `n` likeliest of the `best_of` choices of each prompt."""
    each = len(choices) // prompts
    if each == request.n:
        return choices
    kept = []
    for start in range(0, len(choices), each):
        ranked = sorted(choices[start : start + each], key=lambda choice: choice.mean_logprob, reverse=True)
        kept += ranked[: request.n]
    return kept
