"""Prometheus metrics with vLLM's names and meanings under `toolkit:`, so that its dashboards carry over.

Written out here rather than with a client library: that would be the slowest import of the server, and recording a
token's latency costs one bisection this way.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Iterator, Sequence

from ..output import Delta
from ..plan import Plan
from ..request import Add, RequestMetrics, SamplingParams, Stats

PREFIX = "toolkit:"
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

FINE_SECONDS = tuple(base * 10.0**power for power in range(-4, 2) for base in (1.0, 2.5, 5.0))
COARSE_SECONDS = (
    0.01,
    0.03,
    0.1,
    0.3,
    0.5,
    0.8,
    1.0,
    1.5,
    2.0,
    2.5,
    5.0,
    10.0,
    15.0,
    20.0,
    30.0,
    60.0,
    120.0,
    240.0,
    960.0,
)
FINISH_REASONS = ("stop", "length", "abort", "error")


def token_bounds(limit: int) -> tuple[float, ...]:
    """1, 2, 5, 10, … up to a limit."""
    series = (float(base * 10**power) for power in range(12) for base in (1, 2, 5))
    bounds = []
    for bound in series:
        if bound >= limit:
            break
        bounds.append(bound)
    return (*bounds, float(limit))


class Histogram:
    """Counts of observations by upper bound."""

    def __init__(self, name: str, help_text: str, bounds: Sequence[float]) -> None:
        self.name = name
        self.help_text = help_text
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(self._bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def lines(self, labels: str) -> Iterator[str]:
        """The samples in Prometheus' text format."""
        total = 0
        for bound, count in zip((*self._bounds, float("inf")), self._counts, strict=True):
            total += count
            yield f'{PREFIX}{self.name}_bucket{{{labels},le="{_number(bound)}"}} {total}'
        yield f"{PREFIX}{self.name}_sum{{{labels}}} {self._sum}"
        yield f"{PREFIX}{self.name}_count{{{labels}}} {total}"


class Metrics:
    """The metrics of one served model."""

    def __init__(self, plan: Plan, model: str) -> None:
        tokens = token_bounds(plan.model.max_context)
        self._labels = f'model_name="{_escaped(model)}",engine="0"'
        self.prompt_tokens = 0
        self.generation_tokens = 0
        self.finished = dict.fromkeys(FINISH_REASONS, 0)
        self.first_token = Histogram("time_to_first_token_seconds", "Time to first token.", FINE_SECONDS)
        self.inter_token = Histogram("inter_token_latency_seconds", "Time between tokens of a request.", FINE_SECONDS)
        self.per_token = Histogram(
            "request_time_per_output_token_seconds",
            "Mean time of a request's output tokens after the first.",
            FINE_SECONDS,
        )
        self.total = Histogram("e2e_request_latency_seconds", "Time from arrival to the last token.", COARSE_SECONDS)
        self.queue = Histogram("request_queue_time_seconds", "Time spent waiting.", COARSE_SECONDS)
        self.inference = Histogram("request_inference_time_seconds", "Time spent running.", COARSE_SECONDS)
        self.prefill = Histogram("request_prefill_time_seconds", "Time from start to first token.", COARSE_SECONDS)
        self.decode = Histogram("request_decode_time_seconds", "Time from first to last token.", COARSE_SECONDS)
        self.prompts = Histogram("request_prompt_tokens", "Prompt tokens of a request.", tokens)
        self.outputs = Histogram("request_generation_tokens", "Output tokens of a request.", tokens)
        self._n = Histogram("request_params_n", "The parameter n.", (1, 2, 5, 10, 20))
        self._max_tokens = Histogram("request_params_max_tokens", "The parameter max_tokens.", tokens)

    def asked(self, params: SamplingParams) -> None:
        """Record a request's parameters."""
        self._n.observe(params.n)
        if params.max_tokens is not None:
            self._max_tokens.observe(params.max_tokens)

    def text(self, stats: Stats | None) -> str:
        """Everything in Prometheus' text format; the engine's own figures only if it answered."""
        lines: list[str] = []
        if stats is not None:
            lines += self._simple("gauge", "num_requests_running", "Requests running.", stats.running)
            lines += self._simple("gauge", "num_requests_waiting", "Requests waiting.", stats.waiting)
            lines += self._simple("gauge", "kv_cache_usage_perc", "Used share of the KV pages, 0 to 1.", stats.kv_usage)
            lines += self._simple("counter", "prefix_cache_queries", "Prompt tokens looked up.", stats.prefix_queries)
            lines += self._simple("counter", "prefix_cache_hits", "Prompt tokens found.", stats.prefix_hits)
            lines += self._simple("counter", "num_preemptions", "Requests put back to waiting.", stats.preemptions)
        lines += self._simple("counter", "prompt_tokens", "Prompt tokens of answered requests.", self.prompt_tokens)
        lines += self._simple("counter", "generation_tokens", "Tokens generated.", self.generation_tokens)
        lines += self._header("counter", "request_success", "Requests ended, by reason.")
        for reason, count in self.finished.items():
            lines.append(f'{PREFIX}request_success_total{{{self._labels},finished_reason="{reason}"}} {count}')
        for histogram in self._histograms():
            lines += self._header("histogram", histogram.name, histogram.help_text)
            lines += histogram.lines(self._labels)
        return "\n".join(lines) + "\n"

    def _histograms(self) -> list[Histogram]:
        return [value for value in vars(self).values() if isinstance(value, Histogram)]

    def _simple(self, kind: str, name: str, help_text: str, value: float) -> list[str]:
        suffix = "_total" if kind == "counter" else ""
        return [*self._header(kind, name, help_text), f"{PREFIX}{name}{suffix}{{{self._labels}}} {value}"]

    def _header(self, kind: str, name: str, help_text: str) -> list[str]:
        suffix = "_total" if kind == "counter" else ""
        return [f"# HELP {PREFIX}{name}{suffix} {help_text}", f"# TYPE {PREFIX}{name}{suffix} {kind}"]


class RequestTimer:
    """Times one choice by the server's clock. Without a finish reason the client went away."""

    def __init__(self, metrics: Metrics, command: Add) -> None:
        self._metrics = metrics
        self._prompt = len(command.prompt)
        self._arrival = self._last = command.arrival
        self._first = 0.0
        self._count = 0
        self._reason: str | None = "abort"
        self._engine: RequestMetrics | None = None

    def delta(self, delta: Delta) -> None:
        """Note what arrived."""
        if delta.finish_reason is not None:
            self._reason, self._engine = delta.finish_reason, delta.metrics
        if not delta.token_ids:
            return
        metrics, now = self._metrics, time.monotonic()
        if self._count == 0:
            self._first = now - self._arrival
            metrics.prompt_tokens += self._prompt
            metrics.first_token.observe(self._first)
        else:
            metrics.inter_token.observe(now - self._last)
        self._last = now
        self._count += len(delta.token_ids)
        metrics.generation_tokens += len(delta.token_ids)

    def refused(self) -> None:
        """The request was none; it is not counted."""
        self._reason = None

    def failed(self) -> None:
        self._reason = "error"

    def end(self) -> None:
        """Record it."""
        if self._reason is None:
            return
        metrics, total = self._metrics, self._last - self._arrival
        metrics.finished[self._reason] += 1
        metrics.prompts.observe(self._prompt)
        metrics.outputs.observe(self._count)
        metrics.total.observe(total)
        if self._count > 1:
            metrics.per_token.observe((total - self._first) / (self._count - 1))
        if self._engine is not None:
            metrics.queue.observe(self._engine.queue)
            metrics.inference.observe(self._engine.total - self._engine.queue)
            metrics.prefill.observe(self._engine.first_token - self._engine.queue)
            metrics.decode.observe(self._engine.total - self._engine.first_token)


def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


def _number(value: float) -> str:
    return "+Inf" if value == float("inf") else f"{value:g}"
