"""Generation from Python: `LLM` runs the engine in the calling thread, `AsyncLLM` in a thread of its own."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Callable, Generator, Iterator, Sequence
from contextlib import aclosing, closing, contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import msgspec

from .client import ThreadEngine
from .engine import Engine, open_engine
from .errors import UserError
from .options import EngineOptions, parse_memory
from .output import Delta, Output, OutputStream, logprob_table
from .prompt import Message, Prompt, Prompts
from .request import (
    SLEEP_TAGS,
    Add,
    Event,
    FinishReason,
    Profiled,
    RequestMetrics,
    SamplingParams,
    SleepTag,
    Stats,
)

Logprobs = dict[int, float]
Params = SamplingParams | Sequence[SamplingParams] | None


class Completion(msgspec.Struct, frozen=True, kw_only=True):
    """One output of a prompt."""

    text: str
    """"" from plans without a tokenizer."""
    token_ids: list[int]
    finish_reason: FinishReason | None
    stop_reason: str | int | None
    """The stop string or stop token id that ended it, if one did."""
    logprobs: list[Logprobs] | None
    """A token each: the token's log-probability first, then the alternatives'."""
    metrics: RequestMetrics | None
    """None for outputs that a stop string ended."""


class Generation(msgspec.Struct, frozen=True, kw_only=True):
    """A prompt with its outputs, `params.n` of them; the first one's fields are also the generation's."""

    prompt: str | None
    """None if the prompt was token ids."""
    prompt_token_ids: list[int]
    prompt_logprobs: list[Logprobs | None] | None
    """A prompt token each, None for the first."""
    outputs: list[Completion]

    @property
    def text(self) -> str:
        return self.outputs[0].text

    @property
    def token_ids(self) -> list[int]:
        return self.outputs[0].token_ids

    @property
    def finish_reason(self) -> FinishReason | None:
        return self.outputs[0].finish_reason

    @property
    def logprobs(self) -> list[Logprobs] | None:
        return self.outputs[0].logprobs

    @property
    def metrics(self) -> RequestMetrics | None:
        return self.outputs[0].metrics


class _Request:
    """A prompt's commands, and its outputs so far."""

    def __init__(self, prompt: str | None, ids: list[int], commands: list[Add]) -> None:
        self._prompt = prompt
        self._ids = ids
        self.commands = commands
        self.outputs = [Output() for _ in commands]

    def result(self) -> Generation:
        scores = self.outputs[0].prompt_logprobs
        return Generation(
            prompt=self._prompt,
            prompt_token_ids=self._ids,
            prompt_logprobs=None
            if scores is None
            else [None if entry is None else logprob_table(entry) for entry in scores],
            outputs=[_completion(output, command) for output, command in zip(self.outputs, self.commands, strict=True)],
        )


def _completion(output: Output, command: Add) -> Completion:
    asked = command.params.logprobs is not None
    return Completion(
        text=output.text,
        token_ids=output.token_ids,
        finish_reason=output.finish_reason,
        stop_reason=output.stop_reason,
        logprobs=[logprob_table(entry) for entry in output.logprobs] if asked else None,
        metrics=output.metrics,
    )


class _Requests:
    """Makes requests of prompts: what both kinds of LLM share.

    Everything is checked before anything runs: the methods raise UserError if a prompt or parameter can't be used.
    """

    def __init__(self, prompts: Prompts) -> None:
        self._prompts = prompts
        self._numbers = count()

    def params(self, **changes: Any) -> SamplingParams:
        return self._prompts.params(**changes)

    def of_prompts(self, prompts: Prompt | Sequence[Prompt], params: Params) -> list[_Request]:
        """Requests of one prompt or several."""
        many = _prompt_list(prompts)
        ids = [self._prompts.encode(prompt) for prompt in many]
        return self._make([prompt if isinstance(prompt, str) else None for prompt in many], ids, params)

    def of_messages(
        self, messages: Sequence[Message] | Sequence[Sequence[Message]], params: Params, options: dict[str, Any]
    ) -> list[_Request]:
        """Requests of one conversation or several."""
        texts = [self._prompts.render(conversation, **options) for conversation in _conversation_list(messages)]
        ids = [self._prompts.encode(text, add_special_tokens=False) for text in texts]
        return self._make(texts, ids, params)

    def _make(self, texts: Sequence[str | None], ids: Sequence[list[int]], params: Params) -> list[_Request]:
        if params is None or isinstance(params, SamplingParams):
            each = [params or self._prompts.params()] * len(ids)
        else:
            each = list(params)
        if len(each) != len(ids):
            raise UserError(f"expected one params for all prompts or one each: {len(ids)} prompts, {len(each)} params")
        return [
            _Request(text, prompt, self._prompts.commands(str(next(self._numbers)), prompt, one))
            for text, prompt, one in zip(texts, ids, each, strict=True)
        ]

    def stream(self, command: Add) -> OutputStream:
        return OutputStream(command, self._prompts.tokenizer)


def _prompt_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str):
        return [prompts]
    ids: list[int] = []
    many: list[Prompt] = []
    for item in prompts:
        if isinstance(item, str):
            many.append(item)
        elif isinstance(item, Sequence):
            many.append([int(token) for token in item])
        else:
            ids.append(int(item))
    if ids and many:
        raise UserError("a prompt is text or a list of token ids: this list mixes ids with prompts")
    return [ids] if ids else many


def _conversation_list(messages: Sequence[Message] | Sequence[Sequence[Message]]) -> list[list[Message]]:
    single: list[Message] = []
    many: list[list[Message]] = []
    for item in messages:
        if isinstance(item, dict):
            single.append(item)
        else:
            many.append(list(item))
    return many or [single]


def _options(options: dict[str, Any]) -> EngineOptions:
    """Engine options by name; `memory` may be text such as "8GiB". Raises UserError for what is none."""
    if isinstance(options.get("memory"), str):
        options = options | {"memory": parse_memory(options["memory"])}
    try:
        return msgspec.convert(options, EngineOptions)
    except msgspec.ValidationError as error:
        known = ", ".join(EngineOptions.__struct_fields__)
        raise UserError(f"engine options are {known}: {error}") from None


class LLM:
    """A plan ready to generate, in this thread. One call at a time: `AsyncLLM` serves several at once.

    with LLM("plan/") as llm:
        for result in llm.generate(["The capital of France is"], SamplingParams(max_tokens=8)):
            print(result.text)
    """

    def __init__(self, plan: str | Path, **options: Any) -> None:
        """Load a plan. `options` are those of `EngineOptions`: memory, max_num_seqs, max_batched_tokens, threads, …

        Raises UserError if the plan or an option can't be used.
        """
        self._engine: Engine = open_engine(Path(plan), _options(options))
        self._requests = _Requests(Prompts.open(Path(plan), self._engine.plan))
        self._lock = threading.Lock()
        self.plan = self._engine.plan

    def params(self, **changes: Any) -> SamplingParams:
        """The model's own sampling parameters, changed."""
        return self._requests.params(**changes)

    def generate(
        self, prompts: Prompt | Sequence[Prompt], params: Params = None, *, progress: bool = False
    ) -> list[Generation]:
        """Complete one prompt or several, each text or token ids; results are in the prompts' order.

        Without `params` the model's own defaults apply. `progress` shows a bar on a terminal.
        """
        return self._collect(self._requests.of_prompts(prompts, params), progress)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        params: Params = None,
        *,
        progress: bool = False,
        **template: Any,
    ) -> list[Generation]:
        """Answer one conversation or several; `template` goes to the chat template."""
        return self._collect(self._requests.of_messages(messages, params, template), progress)

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Iterator[Delta]:
        """The completion of one prompt, piece by piece. Closing the iterator ends the request."""
        return self._stream(self._requests.of_prompts([prompt], params))

    def stream_chat(
        self, messages: Sequence[Message], params: SamplingParams | None = None, **template: Any
    ) -> Iterator[Delta]:
        """The answer to one conversation, piece by piece."""
        return self._stream(self._requests.of_messages(messages, params, template))

    def _stream(self, requests: list[_Request]) -> Iterator[Delta]:
        return (delta for _, delta in self._run(requests[0].commands[:1]))

    def sleep(self, level: int = 1) -> None:
        """Give back the memory of weights and caches until `wake_up`; both levels, 1 and 2, do the same. Raises
        UserError if another call is running."""
        _check_level(level)
        with self._alone():
            self._engine.sleep()

    def wake_up(self, tags: Sequence[SleepTag] | None = None) -> None:
        """Take the memory again, once both "weights" and "kv_cache" are awake, and load the weights."""
        with self._alone():
            self._engine.wake_up(SLEEP_TAGS if tags is None else tags)

    @property
    def is_sleeping(self) -> bool:
        """Whether it must be woken before it can generate."""
        return bool(self._engine.asleep)

    def stats(self) -> Stats:
        """The engine's state and counters, also of memory in bytes and of speculation."""
        return self._engine.stats()

    @contextmanager
    def _alone(self) -> Iterator[None]:
        if not self._lock.acquire(blocking=False):
            raise UserError("this LLM is busy with another call: finish it first, or use AsyncLLM")
        try:
            yield
        finally:
            self._lock.release()

    def close(self) -> None:
        """Free the plan's memory."""
        self._engine.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _collect(self, requests: list[_Request], progress: bool) -> list[Generation]:
        outputs = [output for request in requests for output in request.outputs]
        commands = [command for request in requests for command in request.commands]
        with closing(self._run(commands)) as deltas, progress_bar(len(outputs), shown=progress) as advance:
            for index, delta in deltas:
                outputs[index].add(delta)
                advance(delta)
        return [request.result() for request in requests]

    def _run(self, commands: Sequence[Add]) -> Generator[tuple[int, Delta], None, None]:
        """Deltas with the index of their command, until all have ended."""
        engine = self._engine
        if engine.asleep:
            raise UserError("this LLM is asleep: call wake_up() first")
        running: dict[str, tuple[int, OutputStream]] = {}
        with self._alone():
            try:
                for index, command in enumerate(commands):
                    running[command.request] = index, self._requests.stream(command)
                    engine.add(command)
                while running:
                    for event in engine.step():
                        yield from self._deliver(event, running)
            finally:
                for name in running:
                    engine.abort(name)

    def _deliver(self, event: Event, running: dict[str, tuple[int, OutputStream]]) -> Iterator[tuple[int, Delta]]:
        if isinstance(event, Stats | Profiled) or event.request not in running:
            return
        index, stream = running[event.request]
        delta = stream.push(event)
        if delta.finish_reason is not None:
            del running[event.request]
            self._engine.abort(event.request)  # does nothing unless a stop string ended it
        yield index, delta


def _check_level(level: int) -> None:
    """Of sleep, as vLLM has it. Raises UserError."""
    if level not in (1, 2):
        raise UserError(f"level must be 1 or 2, not {level}")


class AsyncLLM:
    """A plan ready to generate, for any number of tasks of one event loop; the engine runs in a thread."""

    def __init__(self, plan: str | Path, **options: Any) -> None:
        """Load a plan (see `LLM`)."""
        self._engine = ThreadEngine.open(Path(plan), _options(options))
        self._requests = _Requests(Prompts.open(Path(plan), self._engine.plan))
        self.plan = self._engine.plan

    async def generate(self, prompts: Prompt | Sequence[Prompt], params: Params = None) -> list[Generation]:
        """Complete one prompt or several (see `LLM.generate`)."""
        return await self._collect(self._requests.of_prompts(prompts, params))

    async def chat(
        self, messages: Sequence[Message] | Sequence[Sequence[Message]], params: Params = None, **template: Any
    ) -> list[Generation]:
        """Answer one conversation or several (see `LLM.chat`)."""
        return await self._collect(self._requests.of_messages(messages, params, template))

    async def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> AsyncGenerator[Delta, None]:
        """The completion of a prompt, piece by piece. Closing the generator ends the request."""
        (request,) = self._requests.of_prompts([prompt], params)
        async with aclosing(self._deltas(request.commands[0])) as deltas:
            async for delta in deltas:
                yield delta

    async def sleep(self, level: int = 1) -> None:
        """End all requests and give back the memory of weights and caches; later requests wait for `wake_up`."""
        _check_level(level)
        await self._engine.sleep()

    async def wake_up(self, tags: Sequence[SleepTag] | None = None) -> None:
        """Take the memory again, once both "weights" and "kv_cache" are awake, and load the weights."""
        await self._engine.wake_up(SLEEP_TAGS if tags is None else tags)

    async def close(self) -> None:
        """Stop the engine and free the plan's memory."""
        await self._engine.close()

    async def __aenter__(self) -> AsyncLLM:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    async def _collect(self, requests: list[_Request]) -> list[Generation]:
        async def one(command: Add, output: Output) -> None:
            async with aclosing(self._deltas(command)) as deltas:
                async for delta in deltas:
                    output.add(delta)

        pairs = [pair for request in requests for pair in zip(request.commands, request.outputs, strict=True)]
        tasks = [asyncio.ensure_future(one(command, output)) for command, output in pairs]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
        return [request.result() for request in requests]

    async def _deltas(self, command: Add) -> AsyncGenerator[Delta, None]:
        stream = self._requests.stream(command)
        async with aclosing(self._engine.generate(command)) as events:
            async for event in events:
                delta = stream.push(event)
                yield delta
                if delta.finish_reason is not None:
                    return


@contextmanager
def progress_bar(total: int, *, shown: bool) -> Iterator[Callable[[Delta], None]]:
    """A bar of finished outputs with the tokens generated so far; yields what to call with each delta."""
    if not shown:
        yield lambda delta: None
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    tokens = 0
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.fields[tokens]} tokens"))
    with Progress(*columns) as progress:
        task = progress.add_task("", total=total, tokens=0)

        def advance(delta: Delta) -> None:
            nonlocal tokens
            tokens += len(delta.token_ids)
            progress.update(task, advance=delta.finish_reason is not None, tokens=tokens)

        yield advance
