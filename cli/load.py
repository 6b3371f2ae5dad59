"""Load for benchmarks: random prompts, sent to a plan in this process or to a server, and what was measured."""

from __future__ import annotations

import asyncio
import random
import re
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import aclosing, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Protocol

import msgspec

from ..runtime.errors import UserError
from ..runtime.options import EngineOptions
from .client import Client, is_url

_URL_VOCABULARY = 1000
"""Prompts for servers hold token ids below this, which every vocabulary has."""
_FIRST_ID = 10
"""Lower ids are often special tokens."""


class Sample(msgspec.Struct):
    """One request: when it was sent, and when its tokens came. Times in seconds."""

    sent: float
    arrivals: list[float]


class Target(Protocol):
    """What is measured."""

    vocabulary: int

    async def run(self, prompt: list[int], tokens: int) -> Sample:
        """Complete a prompt by exactly so many tokens."""


class PlanTarget:
    """A plan in this process."""

    def __init__(self, plan: str, options: EngineOptions) -> None:
        from ..runtime.llm import AsyncLLM

        self.llm = AsyncLLM(plan, **msgspec.structs.asdict(options))
        self.vocabulary = self.llm.plan.model.vocab_size

    async def run(self, prompt: list[int], tokens: int) -> Sample:
        from ..runtime.request import SamplingParams

        sample = Sample(time.perf_counter(), [])
        params = SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True)
        async with aclosing(self.llm.stream(prompt, params)) as deltas:
            async for delta in deltas:
                sample.arrivals += [time.perf_counter()] * len(delta.token_ids)
        return sample


class UrlTarget:
    """A server."""

    vocabulary = _URL_VOCABULARY

    def __init__(self, url: str, model: str) -> None:
        self._client = Client(url)
        self._model = model

    @classmethod
    async def open(cls, url: str) -> UrlTarget:
        return cls(url, (await Client(url).get("/v1/models"))["data"][0]["id"])

    async def run(self, prompt: list[int], tokens: int) -> Sample:
        body = {
            "model": self._model,
            "prompt": prompt,
            "max_tokens": tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream_options": {"include_usage": True},
        }
        sample, count = Sample(time.perf_counter(), []), 0
        async with aclosing(self._client.stream("/v1/completions", body)) as events:
            async for event in events:
                if event["choices"]:
                    sample.arrivals.append(time.perf_counter())
                count = (event.get("usage") or {}).get("completion_tokens", count)
        return Sample(sample.sent, _spread(sample.arrivals, count))


def _spread(arrivals: list[float], count: int) -> list[float]:
    """One time a token, where chunks held several tokens or, like the last, none."""
    if not count or not arrivals:
        return arrivals
    return [arrivals[index * len(arrivals) // count] for index in range(count)]


@asynccontextmanager
async def open_target(target: str, options: EngineOptions) -> AsyncIterator[Target]:
    """The plan or server that a command's argument names."""
    if is_url(target):
        yield await UrlTarget.open(target)
        return
    plan = PlanTarget(target, options)
    try:
        yield plan
    finally:
        await plan.llm.close()


@contextmanager
def running_server(plan: str) -> Iterator[tuple[str, float]]:
    """A server of the plan in processes of its own: its URL, and when it was started."""
    began = time.perf_counter()
    command = [sys.executable, "-m", "toolkit.cli.main", "serve", plan, "--port", "0"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    try:
        said = ""
        for line in process.stderr:
            said = line
            if match := re.match(r"Serving .* at (\S+)", line):
                yield match[1], began
                break
        else:
            raise UserError(f"the server did not start: {said.strip()}")
    finally:
        process.terminate()
        process.wait()


def random_prompts(count: int, length: int, vocabulary: int, *, seed: int = 0) -> list[list[int]]:
    """Prompts of token ids, the same for the same seed, without a common prefix."""
    generator = random.Random(seed)
    return [[generator.randrange(_FIRST_ID, vocabulary) for _ in range(length)] for _ in range(count)]


async def run_load(
    target: Target, prompts: Sequence[list[int]], tokens: int, *, concurrency: int = 0, rate: float = 0.0
) -> list[Sample]:
    """Send prompts at `rate` a second on average (0: all at once), at most `concurrency` at a time (0: any number)."""
    slots = asyncio.Semaphore(concurrency or len(prompts))
    generator, delay, jobs = random.Random(1), 0.0, []

    async def one(prompt: list[int], after: float) -> Sample:
        await asyncio.sleep(after)
        async with slots:
            return await target.run(prompt, tokens)

    for prompt in prompts:
        jobs.append(one(prompt, delay))
        delay += generator.expovariate(rate) if rate else 0.0
    return await asyncio.gather(*jobs)


class Percentiles(msgspec.Struct, frozen=True):
    """Of times in seconds."""

    mean: float
    p50: float
    p90: float
    p99: float


class LoadReport(msgspec.Struct, frozen=True, kw_only=True):
    """What a load came to."""

    benchmark: str
    target: str
    requests: int
    prompt_tokens: int
    output_tokens: int
    """Of each request."""
    seconds: float
    """From the first request to the last token."""
    requests_per_second: float
    output_tokens_per_second: float
    total_tokens_per_second: float
    first_token: Percentiles
    between_tokens: Percentiles
    request: Percentiles
    start_seconds: float | None = None
    """From the start of the server's process to the first token it streamed."""


def percentiles(values: Sequence[float]) -> Percentiles:
    """Nearest-rank percentiles; all 0 without values."""
    ordered = sorted(values) or [0.0]
    at = [ordered[min(len(ordered) - 1, int(len(ordered) * share))] for share in (0.5, 0.9, 0.99)]
    return Percentiles(sum(ordered) / len(ordered), *at)


def report(
    benchmark: str, target: str, prompt_tokens: int, samples: Sequence[Sample], *, start: float | None = None
) -> LoadReport:
    """Sum samples up. Raises UserError if one got no token."""
    if not all(sample.arrivals for sample in samples):
        raise UserError(f"{target} sent no tokens for some requests")
    outputs = sum(len(sample.arrivals) for sample in samples)
    seconds = max(sample.arrivals[-1] for sample in samples) - min(sample.sent for sample in samples)
    gaps = [
        after - before
        for sample in samples
        for before, after in zip(sample.arrivals, sample.arrivals[1:], strict=False)
    ]
    return LoadReport(
        benchmark=benchmark,
        target=target,
        requests=len(samples),
        prompt_tokens=prompt_tokens,
        output_tokens=outputs // len(samples),
        seconds=seconds,
        requests_per_second=len(samples) / seconds,
        output_tokens_per_second=outputs / seconds,
        total_tokens_per_second=(outputs + prompt_tokens * len(samples)) / seconds,
        first_token=percentiles([sample.arrivals[0] - sample.sent for sample in samples]),
        between_tokens=percentiles(gaps),
        request=percentiles([sample.arrivals[-1] - sample.sent for sample in samples]),
        start_seconds=start,
    )


def plan_name(target: str) -> str:
    """How reports name a target."""
    return target if is_url(target) else Path(target).name
