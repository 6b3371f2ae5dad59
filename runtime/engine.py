"""The engine: requests in, events out; each turn schedules a step, runs it and draws tokens from its results.

Where the device can queue steps, the next one is scheduled and queued before the last one's results are read. Steps
take effect in order, so pages of a request that ends are free at once: what a queued step still writes there, later
owners write over.
"""

from __future__ import annotations

import time
import traceback
from collections import deque
from collections.abc import Callable, Container
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from .batch import BatchBuilder
from .debug import debug_phase
from .device.base import Device, Ticket
from .errors import DeviceLost, InternalError, UserError
from .grammar import Grammars
from .histogram import Histogram
from .kv.events import Sink, ZmqPublisher
from .kv.manager import KVManager
from .kv.prefix import PageKeys
from .options import EngineOptions
from .plan import Plan
from .profiler import Profiler
from .request import (
    SLEEP_TAGS,
    STEP_TOKENS,
    Add,
    Error,
    Event,
    Finished,
    FinishReason,
    Profile,
    Profiled,
    RequestMetrics,
    SamplingParams,
    SleepTag,
    Stats,
    TokenLogprob,
    Tokens,
)
from .sampling import make_sampling
from .scheduler import Limits, Scheduler
from .sequence import Chunk, Sequence
from .speculator import Speculator
from .step import StepBatch, StepResult
from .steplog import StepLog
from .token_rules import TokenRules

if TYPE_CHECKING:
    from llguidance import LLMatcher

MAX_SCORE_BYTES = 1 << 30
"""Most memory that one request's whole-vocabulary prompt log-probabilities may take."""

COMPILE_SECONDS = 0.02
"""How long a turn waits for a grammar if there is nothing else to do."""

_STATUS = {
    1: ("the model's logits were not finite: its weights or the prompt's numbers are damaged", False),
    2: ("the request's constraints leave no token that could come next", True),
}
"""What a row's status means, and whether it is the user's fault."""


def open_engine(directory: Path, options: EngineOptions) -> Engine:
    """An engine for a plan on this machine. Raises UserError if the plan or an option can't be used."""
    from .device.open import open_device
    from .load import read_plan

    with debug_phase("Plan"):
        plan = read_plan(directory)
        step_limits(plan, options)
    events = _open_events(options)
    try:
        device = open_device(directory, plan, options)
    except BaseException:
        if events is not None:
            events.close()
        raise
    return Engine(device, options, grammars=Grammars(directory, plan), kv_events=events)


def _open_events(options: EngineOptions) -> Sink | None:
    config = options.kv_events_config
    if config is None or not config.enabled:
        return None
    if not options.prefix_cache:
        raise UserError("KV events tell of the prefix cache, which is off: leave prefix_cache on, or the events out")
    return ZmqPublisher(config)


def step_limits(plan: Plan, options: EngineOptions) -> Limits:
    """What a step may hold: the plan's largest bucket within the user's options.

    Raises UserError if an option asks for more than the plan was compiled for.
    """
    bucket = max(plan.buckets, key=lambda bucket: bucket.max_tokens)
    tokens = options.max_batched_tokens or bucket.max_tokens
    if not 1 <= tokens <= bucket.max_tokens:
        raise UserError(
            f"max_batched_tokens must be 1 to {bucket.max_tokens}, the largest step of this plan, not {tokens}"
        )
    most = min(plan.max_batch, bucket.max_sequences, bucket.max_rows)
    sequences = options.max_num_seqs or min(most, tokens)
    if not 1 <= sequences <= most:
        raise UserError(
            f"max_num_seqs must be 1 to {most}, which this plan was compiled for, not {sequences}: lower it, or "
            f"compile with --max-batch {sequences}"
        )
    if sequences > tokens:
        raise UserError(f"max_num_seqs ({sequences}) must not be above max_batched_tokens ({tokens})")
    return Limits(tokens, sequences, bucket.max_rows)


@dataclass(frozen=True, slots=True)
class _Flight:
    """A step whose results are still to come."""

    chunks: list[Chunk]
    batch: StepBatch
    ticket: Ticket
    submitted: float

    @property
    def drafts(self) -> bool:
        """Whether it verifies guessed tokens: how far its sequences are is then known only afterwards."""
        return any(chunk.samples > 1 for chunk in self.chunks)


class Engine:
    """Serves requests on one device. One thread at a time may call it."""

    def __init__(
        self,
        device: Device,
        options: EngineOptions,
        *,
        grammars: Grammars | None = None,
        kv_events: Sink | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Raises UserError if an option asks for more than the plan was compiled for."""
        plan = self.plan = device.plan
        self.device = device
        self._clock = clock
        self._grammars = grammars
        limits = step_limits(plan, options)
        self.kv = KVManager(
            plan.caches,
            device.pages,
            lanes=limits.sequences,
            max_context=plan.model.max_context,
            prefix_cache=options.prefix_cache,
            medium="" if kv_events is None else "GPU" if plan.kind == "cuda" else "CPU",
        )
        self._kv_events = kv_events
        self.scheduler = Scheduler(self.kv, limits)
        self.max_tokens = min(plan.model.max_context, self.kv.capacity + 1)
        """Most tokens of a sequence: the last one need not be in the cache."""
        self._rope_switch = plan.model.rope_changes.switch if plan.model.rope_changes else None
        self._batches = BatchBuilder(self.kv, limits.sequences, plan.model.vocab_size)
        config = options.speculative_config
        self._speculator = Speculator(config, min(limits.tokens, limits.rows)) if config is not None else None
        self._sequences: dict[str, Sequence] = {}
        self._compiling: dict[str, tuple[Add, Future[LLMatcher]]] = {}
        """Requests whose grammars are being compiled."""
        self._arrivals = count()
        self._pending: list[Event] = []
        self._flight: deque[_Flight] = deque()
        self.asleep: tuple[SleepTag, ...] = ()
        """What sleeps."""
        self._audited = True
        self.lost: DeviceLost | None = None
        """Why the device can run nothing more: who turns the engine should end it."""
        self._prompt_tokens = self._generation_tokens = self._steps = 0
        self._step_tokens = Histogram(STEP_TOKENS)
        self._profiler: Profiler | None = None
        self._log = StepLog(clock, self._describe)
        self._turn = clock()
        self._retired = 0.0
        """When the last step ended, while there is work."""

    # --- commands -----------------------------------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        """Whether `step` has anything to do or to tell."""
        return bool(self._pending or (not self.asleep and (self._sequences or self._flight or self._compiling)))

    def add(self, command: Add) -> None:
        """Take a request; if it can't be served, `step` says so. Raises InternalError if its id is in use."""
        if command.request in self._sequences or command.request in self._compiling:
            raise InternalError(f"request id {command.request!r} is in use")
        try:
            if not command.params.grammar:
                self._take(command)
            elif self._grammars is None:
                raise UserError("this engine has no tokenizer, so it can't keep to a grammar")
            else:
                self._compiling[command.request] = command, self._grammars.compile(command.params.grammar)
                self._take_compiled()
        except UserError as error:
            self._pending.append(Error(command.request, str(error), user_fault=True))

    def _take(self, command: Add, matcher: LLMatcher | None = None) -> None:
        sequence = self._sequence(command, matcher)
        self._sequences[command.request] = sequence
        self.scheduler.add(sequence)

    def _take_compiled(self) -> None:
        """Take the requests whose grammars are compiled."""
        for request, (command, future) in list(self._compiling.items()):
            if not future.done():
                continue
            del self._compiling[request]
            try:
                self._take(command, future.result().deep_copy())
            except UserError as error:
                self._pending.append(Error(request, str(error), user_fault=True))

    def _sequence(self, command: Add, matcher: LLMatcher | None) -> Sequence:
        prompt, params, vocabulary = command.prompt, command.params, self.plan.model.vocab_size
        self._check_prompt(command)
        most = self.max_tokens if params.max_tokens is None else min(self.max_tokens, len(prompt) + params.max_tokens)
        tokens = np.empty(most, np.int32)
        tokens[: len(prompt)] = prompt
        sampling = make_sampling(command, tokens, vocabulary)
        return Sequence(
            request=command.request,
            order=(command.priority, next(self._arrivals)),
            tokens=tokens,
            prompt_length=len(prompt),
            sampling=sampling,
            rules=self._rules(params, matcher),
            keys=PageKeys(command.cache_salt, self.kv.page_tokens, self._rope_class(len(prompt))),
            arrival=command.arrival or self._clock(),
            length=len(prompt),
            known=len(prompt),
            last=prompt[-1],
            horizon=self._horizon(len(prompt), most),
            rope_length=len(prompt),
            prompt_logprobs=[] if params.prompt_logprobs is None else [None],
        )

    def _rules(self, params: SamplingParams, matcher: LLMatcher | None) -> TokenRules | None:
        allowed, forbidden = params.allowed_token_ids, params.bad_token_ids
        if matcher is None and allowed is None and not forbidden:
            return None
        return TokenRules(self.plan.model.vocab_size, allowed=allowed, forbidden=forbidden, matcher=matcher)

    def _horizon(self, prompt: int, most: int) -> int:
        switch = self._rope_switch
        return switch if switch is not None and prompt < switch < most else most

    def _rope_class(self, length: int) -> int:
        """A number that is the same for prompts, of so many tokens, that RoPE rotates alike."""
        changes = self.plan.model.rope_changes
        return changes.clip(length) if changes else 0

    def _check_prompt(self, command: Add) -> None:
        prompt, vocabulary, context = command.prompt, self.plan.model.vocab_size, self.plan.model.max_context
        if not prompt:
            raise UserError("the prompt is empty: it must have at least one token")
        if min(prompt) < 0 or max(prompt) >= vocabulary:
            wrong = next(token for token in prompt if not 0 <= token < vocabulary)
            raise UserError(f"token ids must be from 0 to {vocabulary - 1}, found {wrong} in the prompt")
        if len(prompt) >= context:
            raise UserError(
                f"the prompt has {len(prompt)} tokens, but prompt and output together may have {context}: shorten it, "
                "or compile the plan with a larger --max-context"
            )
        if len(prompt) >= self.max_tokens:
            raise UserError(
                f"the prompt has {len(prompt)} tokens, but the cache holds {self.kv.capacity}: shorten it, or give "
                "more --memory"
            )
        if command.params.prompt_logprobs == -1 and len(prompt) * vocabulary * 4 > MAX_SCORE_BYTES:
            raise UserError(
                f"prompt_logprobs -1 is for prompts of at most {MAX_SCORE_BYTES // (vocabulary * 4)} tokens, this one "
                f"has {len(prompt)}: ask for at most 20 alternatives"
            )

    def abort(self, request: str) -> None:
        """End a request and free its pages at once; one that is not running any more is left alone."""
        sequence = self._sequences.get(request)
        if sequence is not None:
            self._finish(sequence, "abort", self._pending)
        elif request in self._compiling:
            command, _ = self._compiling.pop(request)
            waited = self._clock() - (command.arrival or self._clock())
            self._pending.append(Finished(request, "abort", None, RequestMetrics(waited, waited, waited, 0, 0)))

    def abort_all(self) -> None:
        """Abort every request."""
        for request in [*self._sequences, *self._compiling]:
            self.abort(request)

    def reset_prefix_cache(self) -> None:
        """Forget every cached prefix that no running request uses."""
        self.kv.forget_unused()
        self._tell_events()

    def sleep(self) -> None:
        """End all requests and give back the memory of weights and caches. Requests that come later wait."""
        awake, self.asleep = not self.asleep, SLEEP_TAGS
        if not awake:
            return
        self.abort_all()
        while self._flight:
            self.device.wait(self._flight.popleft().ticket)
        self.scheduler.clear_running()
        self._tell_events()
        self.device.sleep()

    def wake_up(self, tags: Container[SleepTag] = SLEEP_TAGS) -> None:
        """Wake parts of what sleeps; once all are awake the memory is taken again, and requests run.

        Raises UserError if the weights can't be loaded.
        """
        left = tuple(tag for tag in self.asleep if tag not in tags)
        if self.asleep and not left:
            self.device.wake()
        self.asleep = left

    def profile(self, command: Profile) -> Profiled:
        """Begin or end a recording of steps."""
        if command.steps and self._profiler is not None:
            return Profiled(command.number, error="a profile is being recorded already: end it first")
        if not command.steps and self._profiler is None:
            return Profiled(command.number, error="no profile is being recorded")
        if self._profiler is None:
            self._profiler = Profiler(self, command.steps)
            return Profiled(command.number)
        profiler, self._profiler = self._profiler, None
        return Profiled(command.number, profiler.stop())

    def stats(self, number: int = 0) -> Stats:
        """The state now."""
        scheduler, speculator = self.scheduler, self._speculator
        return Stats(
            number=number,
            running=len(scheduler.running),
            waiting=len(scheduler.waiting) + len(self._compiling),
            kv_usage=self.kv.usage,
            prefix_queries=scheduler.prefix_queries,
            prefix_hits=scheduler.prefix_hits,
            preemptions=scheduler.preemptions,
            prompt_tokens=self._prompt_tokens,
            generation_tokens=self._generation_tokens,
            steps=self._steps,
            last_step=self._clock() - self._turn,
            memory=self.device.memory(),
            prefix_cache=self.kv.prefix_cache,
            kv_pages=tuple(pages - 1 for pages in self.device.pages),
            page_tokens=self.kv.page_tokens,
            step_tokens=tuple(self._step_tokens.counts),
            step_tokens_sum=int(self._step_tokens.sum),
            asleep=self.asleep,
            **(speculator.stats() if speculator is not None else {}),
        )

    # --- the loop -----------------------------------------------------------------------------------------------------

    def turn(self) -> None:
        """Note that the loop turned, which is what `Stats.last_step` counts from, also when there is nothing to do."""
        self._turn = self._clock()

    def step(self) -> list[Event]:
        """One turn: schedule, execute, sample, update.

        If it fails, every running request ends with an Error, all pages are free again and the waiting requests go on.
        """
        events, self._pending = self._pending, []
        self.turn()
        if self.asleep:
            self._tell_events()
            return events
        self._audited = False
        if self._compiling:
            if not self._sequences:
                wait([future for _, future in self._compiling.values()], COMPILE_SECONDS, FIRST_COMPLETED)
            self._take_compiled()
        try:
            while len(self._flight) < self.device.queue_depth:
                chunks = self._schedule()
                if not chunks:
                    break
                self._flight.append(self._submit(chunks))
            if self._flight:
                self._retire(events)
        except Exception as error:
            traceback.print_exc()
            self._fail_running(error, events)
            if isinstance(error, DeviceLost):
                self.lost = error
        if not self._sequences:
            self._log.flush()
            self._retired = 0.0
        self._tell_events()
        return events

    def _tell_events(self) -> None:
        if self._kv_events is not None and self.kv.events is not None and (events := self.kv.events.take()):
            self._kv_events.publish(events)

    def close(self) -> None:
        """Release the device; the engine can't be used any more."""
        self.device.close()
        if self._grammars is not None:
            self._grammars.close()
        if self._kv_events is not None:
            self._kv_events.close()

    def _schedule(self) -> list[Chunk]:
        """The chunks of the next step, if there is something that can be done now."""
        ahead = bool(self._flight)
        if self._speculator is not None:
            decoding = [sequence for sequence in self.scheduler.running if sequence.ready]
            if ahead:
                if self._flight[-1].drafts or self._speculator.is_promising(decoding):
                    return []
            # Pages for guesses must be no reason to preempt a sequence.
            elif self.kv.available > len(decoding) and all(each.length - each.computed == 1 for each in decoding):
                self._speculator.choose(decoding)
        return self.scheduler.schedule(ahead=ahead)

    def _submit(self, chunks: list[Chunk]) -> _Flight:
        device = self.device
        for chunk in chunks:
            if not chunk.sequence.started:
                chunk.sequence.started = self._turn
                if self._speculator is not None:
                    self._speculator.start(chunk.sequence)
        batch = self._batches.build(chunks)
        for group, source, destination in self.kv.take_copies():
            device.copy_pages(group, [(source, destination)])
        submitted = self._clock()
        return _Flight(chunks, batch, device.submit(batch), submitted)

    def _retire(self, events: list[Event]) -> None:
        """Wait for the oldest step in flight, and take its results."""
        flight = self._flight[0]
        result = self.device.wait(flight.ticket)
        self._flight.popleft()
        self._steps += 1
        self._log.add(flight.batch, result)
        now = self._clock()
        if self._speculator is not None and all(chunk.samples == chunk.count for chunk in flight.chunks):
            self._speculator.measured(len(result.rows), now - (self._retired or flight.submitted))
        self._retired = now
        self._update(flight.chunks, result, events, now)

    def _describe(self) -> str:
        scheduler = self.scheduler
        return f"{len(scheduler.running)} running, {len(scheduler.waiting)} waiting, K/V {self.kv.usage:.0%} full"

    def _fail_running(self, error: Exception, events: list[Event]) -> None:
        for flight in self._flight:
            with suppress(Exception):
                self.device.wait(flight.ticket)
        self._flight.clear()
        for sequence in self.scheduler.running:
            del self._sequences[sequence.request]
            events.append(Error(sequence.request, f"the engine failed in a step: {error}", user_fault=False))
        self.scheduler.clear_running()

    def audit(self) -> list[Event]:
        """To be called when idle: checks, once after work, that no page is lost.

        A mismatch is reported as an Error of the engine itself, after which all pages are free again.
        """
        if self._audited or self.has_work:
            return []
        self._audited = True
        try:
            self.kv.check()
            if self.kv.usage:
                raise InternalError("pages are held although no request is running")
        except InternalError as error:
            self.scheduler.clear_running()
            self._tell_events()
            return [Error("", f"the page audit failed, and the cache was reset: {error}", user_fault=False)]
        return []

    # --- results ------------------------------------------------------------------------------------------------------

    def _update(self, chunks: list[Chunk], result: StepResult, events: list[Event], now: float) -> None:
        page_tokens = self.kv.page_tokens
        tokens: list[int] = result.rows["token"].tolist()
        statuses: list[int] | None = result.rows["status"].tolist() if result.rows["status"].any() else None
        row = prompt = 0
        generated = self._generation_tokens
        for chunk in chunks:
            sequence, first = chunk.sequence, row
            row += chunk.scores + chunk.samples
            if chunk.start < sequence.prompt_length:
                prompt += min(chunk.count, sequence.prompt_length - chunk.start)
            if sequence.table is not chunk.table:
                continue  # it ended while the step was in flight
            drawn = [tokens[first]] if chunk.samples == 1 and not chunk.scores else tokens[row - chunk.samples : row]
            computed = chunk.start + chunk.count
            if chunk.samples > 1:
                drawn = self._accept(sequence, drawn)
                computed -= chunk.samples - len(drawn)
            if statuses is not None and any(failed := statuses[first : first + chunk.scores + len(drawn)]):
                self._refuse(sequence, max(failed), events)
                continue
            if computed // page_tokens > chunk.table.settled:
                keys = self._keys(sequence, computed)
                self.kv.settle(chunk.table, keys, computed, sequence.tokens, sequence.keys.salt)
            if chunk.scores:
                _score(chunk, result, first)
            if drawn:
                wanted, first = sequence.sampling.logprobs, row - chunk.samples
                logprobs = (
                    None
                    if wanted is None
                    else [_logprob(result, each, wanted) for each in range(first, first + len(drawn))]
                )
                self._append(sequence, drawn, logprobs, now, events)
        self._step_tokens.observe(prompt + self._generation_tokens - generated)

    def _accept(self, sequence: Sequence, drawn: list[int]) -> list[int]:
        """The draws after tokens that the sequence really has: the first, and each after a guess that was right."""
        guessed = sequence.tokens[sequence.known : sequence.known + len(drawn) - 1].tolist()
        right = next((i for i, (a, b) in enumerate(zip(drawn, guessed, strict=False)) if a != b), len(guessed))
        sequence.computed += right
        sequence.length += right
        if self._speculator is not None:
            self._speculator.verified(len(guessed), right)
        return drawn[: right + 1]

    def _keys(self, sequence: Sequence, computed: int) -> list[bytes]:
        if not self.kv.prefix_cache:
            return []
        return sequence.keys(sequence.tokens, computed // self.kv.page_tokens)

    def _append(
        self, sequence: Sequence, drawn: list[int], logprobs: list[TokenLogprob] | None, now: float, events: list[Event]
    ) -> None:
        """Add drawn tokens to a sequence: all, or those until one that ends it."""
        sampling, length = sequence.sampling, sequence.known
        if len(drawn) > 1:
            ends = next((i for i, token in enumerate(drawn, 1) if token in sampling.stops), len(drawn))
            del drawn[ends:]
            if logprobs is not None:
                del logprobs[ends:]
        for token in drawn:
            sequence.tokens[length] = token
            length += 1
        sequence.known, sequence.last = length, token
        self._generation_tokens += len(drawn)
        prompt_logprobs: list[TokenLogprob | None] | None = None
        metrics = None
        if not sequence.first_token:
            sequence.first_token = now
            metrics = _metrics(sequence, now)
            self._prompt_tokens += sequence.prompt_length
            if sampling.prompt_logprobs is not None:
                prompt_logprobs, sequence.prompt_logprobs = sequence.prompt_logprobs, []
        events.append(Tokens(sequence.request, drawn, logprobs, prompt_logprobs, metrics))
        if token in sampling.stops:
            self._finish(sequence, "stop", events, token)
            return
        if length >= sequence.horizon:
            if length == len(sequence.tokens):
                self._finish(sequence, "length", events)
                return
            self._rebase(sequence)
        if sequence.rules is not None:
            sequence.rules.push(drawn)
        if sequence.drafter is not None:
            sequence.drafter.take(drawn)

    def _rebase(self, sequence: Sequence) -> None:
        """Compute a sequence anew that has become so long that all its keys must be rotated by other frequencies."""
        sequence.rope_length, sequence.horizon = sequence.length, len(sequence.tokens)
        sequence.keys = sequence.keys.of_class(self._rope_class(sequence.length))
        self.scheduler.restart(sequence)

    def _finish(
        self, sequence: Sequence, reason: FinishReason, events: list[Event], stop_token: int | None = None
    ) -> None:
        self.scheduler.remove(sequence)
        del self._sequences[sequence.request]
        if self._speculator is not None:
            self._speculator.finish(sequence)
        events.append(Finished(sequence.request, reason, stop_token, _metrics(sequence, self._clock())))

    def _refuse(self, sequence: Sequence, status: int, events: list[Event]) -> None:
        """End a request whose row failed; what it computed may be damaged and is not reused."""
        self.scheduler.remove(sequence, forget=True)
        del self._sequences[sequence.request]
        message, user_fault = _STATUS.get(status, (f"the sampler returned status {status}", False))
        if sequence.rules is not None:
            message = sequence.rules.problem or message
        events.append(Error(sequence.request, message, user_fault))


def _metrics(sequence: Sequence, now: float) -> RequestMetrics:
    arrival = sequence.arrival
    return RequestMetrics(
        queue=(sequence.started or now) - arrival,
        first_token=(sequence.first_token or now) - arrival,
        total=now - arrival,
        cached_tokens=sequence.cached_tokens,
        preemptions=sequence.preemptions,
    )


def _logprob(result: StepResult, row: int, alternatives: int, whole: bytes = b"") -> TokenLogprob:
    token, rank, logprob, _ = result.rows[row].item()
    tokens, values = result.top_tokens[row, :alternatives], result.top_logprobs[row, :alternatives]
    return TokenLogprob(token, logprob, rank, list(zip(tokens.tolist(), values.tolist(), strict=True)), whole)


def _score(chunk: Chunk, result: StepResult, first: int) -> None:
    sequence, whole = chunk.sequence, chunk.vocabulary_logprobs
    alternatives = max(0, sequence.sampling.prompt_logprobs or 0)
    for index in range(chunk.scores):
        row = b"" if whole is None else whole[index].tobytes()
        sequence.prompt_logprobs.append(_logprob(result, first + index, alternatives, row))
    sequence.scored = chunk.first_score + chunk.scores
