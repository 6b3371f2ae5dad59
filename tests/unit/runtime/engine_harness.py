"""Driving an engine over the fake device."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from unit.runtime.fake_device import EOS, FakeDevice, fake_plan
from unit.runtime.queued_device import QueuedDevice

from toolkit.runtime.engine import Engine
from toolkit.runtime.options import EngineOptions
from toolkit.runtime.plan import Plan
from toolkit.runtime.request import Add, Error, Event, Finished, Profiled, SamplingParams, Stats, TokenLogprob, Tokens

PLENTY = 100
"""Pages for any test's load."""


_depth = 1


@pytest.fixture(scope="module", params=[1, 2])
def depth(request: pytest.FixtureRequest) -> Iterator[int]:
    """Steps that the engines of a module's tests keep in flight: for tests that use it, they run for each."""
    global _depth  # noqa: PLW0603
    _depth = request.param
    yield request.param
    _depth = 1


def make_engine(
    *, pages: int = PLENTY, options: Mapping[str, Any] | None = None, depth: int = 0, grammars: Any = None, **plan: Any
) -> Engine:
    """An engine over a fake device with so many pages a group."""
    device = FakeDevice(fake_plan(**plan), pages)
    queued = (depth or _depth) > 1
    return Engine(QueuedDevice(device) if queued else device, EngineOptions(**(options or {})), grammars=grammars)


def device_of(engine: Engine) -> FakeDevice:
    device = engine.device.inner if isinstance(engine.device, QueuedDevice) else engine.device
    assert isinstance(device, FakeDevice)
    return device


def make_request(name: str, prompt: Sequence[int], *, priority: int = 0, salt: str = "", **params: Any) -> Add:
    """A request, greedy unless told otherwise."""
    defaults: dict[str, Any] = {"temperature": 0.0, "max_tokens": 8}
    return Add(name, list(prompt), SamplingParams(**(defaults | params)), (EOS,), priority, salt)


def shared_prompts(
    count: int, *, vocabulary: int, trunk: int, begin: tuple[int, int], end: tuple[int, int], seed: int = 0
) -> list[list[int]]:
    """Random prompts; every other one begins with so many tokens, `begin` from and to, of a trunk that they share."""
    rng = np.random.default_rng(seed)
    tokens = rng.integers(3, vocabulary, trunk).tolist()
    return [
        (tokens if index % 2 else [])[: int(rng.integers(*begin))]
        + rng.integers(3, vocabulary, int(rng.integers(*end))).tolist()
        for index in range(count)
    ]


def make_requests(prompts: Sequence[Sequence[int]], **params: Any) -> list[Add]:
    """A request for each prompt, named by its number; it stops at no token."""
    return [make_request(str(index), prompt, **({"ignore_eos": True} | params)) for index, prompt in enumerate(prompts)]


def cache_bytes(plan: Plan, sequences: float) -> float:
    """Of caches that hold so many sequences of full length, and the trash page."""
    pages = [-(-plan.model.max_context // cache.page_tokens) for cache in plan.caches]
    costs = [len(cache.layers) * cache.page_bytes for cache in plan.caches]
    return sum((sequences * count + 1) * cost for count, cost in zip(pages, costs, strict=True))


@dataclass
class Output:
    """What came out for one request."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob | None] | None = None
    finished: Finished | None = None
    error: Error | None = None

    def take(self, event: Event) -> None:
        assert not isinstance(event, Stats | Profiled)
        assert self.finished is None, "an event came after the last one"
        assert self.error is None, "an event came after the last one"
        if isinstance(event, Tokens):
            assert event.prompt_logprobs is None or not self.tokens
            self.tokens += event.tokens
            self.logprobs += event.logprobs or []
            self.prompt_logprobs = event.prompt_logprobs or self.prompt_logprobs
        elif isinstance(event, Finished):
            self.finished = event
        else:
            self.error = event

    @property
    def result(self) -> tuple[object, ...]:
        """All that must not depend on how the request was scheduled."""
        reason = self.finished and (self.finished.reason, self.finished.stop_token)
        return self.tokens, self.logprobs, self.prompt_logprobs, reason, self.error


def run(
    engine: Engine,
    requests: Iterable[Add],
    *,
    arrivals: Sequence[int] = (),
    aborts: Mapping[str, int] | None = None,
    max_steps: int = 5000,
) -> dict[str, Output]:
    """Serve requests to the end, request i from step `arrivals[i]` (default 0) on, and audit the pages at every step.

    `aborts` maps requests to the step before which they are aborted.
    """
    queue = [(arrivals[index] if index < len(arrivals) else 0, add) for index, add in enumerate(requests)]
    outputs = {add.request: Output() for _, add in queue}
    for step in range(max_steps):
        for arrival, add in queue:
            if arrival == step:
                engine.add(add)
        for name, when in (aborts or {}).items():
            if when == step:
                engine.abort(name)
        if not engine.has_work and all(arrival <= step for arrival, _ in queue):
            assert engine.audit() == []
            assert engine.kv.usage == 0.0
            return outputs
        for event in engine.step():
            assert not isinstance(event, Stats | Profiled)
            outputs[event.request].take(event)
        engine.kv.check()
    raise AssertionError(f"requests did not end within {max_steps} steps")


def alone(request: Add, **plan: Any) -> Output:
    """The request's output when nothing else runs, a step at a time, in one chunk, without prefix cache or lack of
    pages."""
    engine = make_engine(depth=1, options={"prefix_cache": False}, **(plan | {"max_tokens": 512, "max_rows": 512}))
    output = Output()
    engine.add(request)
    while engine.has_work:
        for event in engine.step():
            output.take(event)
    return output
