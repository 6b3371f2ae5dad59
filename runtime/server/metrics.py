"""Prometheus metrics with vLLM's names and meanings under `toolkit:`, so that its dashboards carry over.

Written out here rather than with a client library: that would be the slowest import of the server, and recording a
token's latency costs one bisection this way.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence

from ..histogram import Histogram
from ..output import Delta
from ..plan import Plan
from ..request import STEP_TOKENS, Add, RequestMetrics, SamplingParams, Stats

PREFIX = "toolkit:"
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

# vLLM's bounds, and finer ones below: small models on fast machines take milliseconds.
FIRST_TOKEN_SECONDS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5),
    *(10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
TOKEN_SECONDS = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
REQUEST_SECONDS = (
    *(0.01, 0.03, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
FINISH_REASONS = ("stop", "length", "abort", "error")


def token_bounds(limit: int) -> tuple[float, ...]:
    """1, 2, 5, 10, … up to a limit."""
    series = (float(base * 10**power) for power in range(12) for base in (1, 2, 5))
    return tuple(bound for bound in series if bound <= limit)


class NamedHistogram(Histogram):
    """A histogram as it is shown."""

    def __init__(self, name: str, help_text: str, bounds: Sequence[float]) -> None:
        super().__init__(bounds)
        self.name = name
        self.help_text = help_text


class Metrics:
    """The metrics of one served model."""

    def __init__(self, plan: Plan, model: str) -> None:
        tokens = token_bounds(plan.model.max_context)
        self._plan = plan
        self.context = plan.model.max_context
        self._labels = {"model_name": model, "engine": "0"}
        self.prompt_tokens = 0
        self.generation_tokens = 0
        self.finished = dict.fromkeys(FINISH_REASONS, 0)

        def seconds(name: str, help_text: str, bounds: Sequence[float] = REQUEST_SECONDS) -> NamedHistogram:
            return NamedHistogram(name, help_text, bounds)

        def counts(name: str, help_text: str, bounds: Sequence[float] = tokens) -> NamedHistogram:
            return NamedHistogram(name, help_text, bounds)

        self.first_token = seconds("time_to_first_token_seconds", "Time to first token.", FIRST_TOKEN_SECONDS)
        self.inter_token = seconds("inter_token_latency_seconds", "Time between tokens of a request.", TOKEN_SECONDS)
        self.per_token = seconds(
            "request_time_per_output_token_seconds", "Mean time of output tokens after the first.", TOKEN_SECONDS
        )
        self.total = seconds("e2e_request_latency_seconds", "Time from arrival to the end.")
        self.queue = seconds("request_queue_time_seconds", "Time spent waiting.")
        self.inference = seconds("request_inference_time_seconds", "Time spent running.")
        self.prefill = seconds("request_prefill_time_seconds", "Time from start to first token.")
        self.decode = seconds("request_decode_time_seconds", "Time from first to last token.")
        self.prompts = counts("request_prompt_tokens", "Prompt tokens of a request.")
        self.computed = counts("request_prefill_kv_computed_tokens", "Prompt tokens that no cache had.")
        self.outputs = counts("request_generation_tokens", "Output tokens of a request.")
        self.longest = counts("request_max_num_generation_tokens", "Output tokens of the longest of n choices.")
        self.n = counts("request_params_n", "The parameter n.", (1, 2, 5, 10, 20))
        self.max_tokens = counts(
            "request_params_max_tokens", "The parameter max_tokens; without it, the room that the prompt leaves."
        )

    def asked(self, params: SamplingParams) -> None:
        """Record a prompt's parameters."""
        self.n.observe(params.n)

    def text(self, stats: Stats | None) -> str:
        """Everything in Prometheus' text format; the engine's own figures only if it answered."""
        lines: list[str] = []
        if stats is not None:
            lines += self._engine(stats)
        lines += self._single("counter", "prompt_tokens", "Prompt tokens of answered requests.", self.prompt_tokens)
        lines += self._single("counter", "generation_tokens", "Tokens generated.", self.generation_tokens)
        reasons = [({"finished_reason": reason}, count) for reason, count in self.finished.items()]
        lines += self._family("counter", "request_success", "Requests ended, by reason.", reasons)
        for each in vars(self).values():
            if isinstance(each, NamedHistogram):
                lines += self._histogram(each.name, each.help_text, each.bounds, each.counts, each.sum)
        return "\n".join(lines) + "\n"

    def _engine(self, stats: Stats) -> Iterator[str]:
        yield from self._single("gauge", "num_requests_running", "Requests running.", stats.running)
        yield from self._single("gauge", "num_requests_waiting", "Requests waiting.", stats.waiting)
        yield from self._single("gauge", "kv_cache_usage_perc", "Used share of the KV pages, 0 to 1.", stats.kv_usage)
        yield from self._single("counter", "prefix_cache_queries", "Prompt tokens looked up.", stats.prefix_queries)
        yield from self._single("counter", "prefix_cache_hits", "Prompt tokens found.", stats.prefix_hits)
        yield from self._single("counter", "num_preemptions", "Requests put back to waiting.", stats.preemptions)
        yield from self._histogram(
            "iteration_tokens_total",
            "Tokens that a step computed of prompts and generated.",
            STEP_TOKENS,
            stats.step_tokens or [0] * (len(STEP_TOKENS) + 1),
            stats.step_tokens_sum,
        )
        yield from self._single("counter", "spec_decode_num_drafts", "Drafts proposed.", stats.spec_drafts)
        yield from self._single("counter", "spec_decode_num_draft_tokens", "Tokens of drafts.", stats.spec_draft_tokens)
        yield from self._single(
            "counter", "spec_decode_num_accepted_tokens", "Tokens of drafts accepted.", stats.spec_accepted_tokens
        )
        accepted = [({"position": str(place)}, count) for place, count in enumerate(stats.spec_accepted_per_position)]
        yield from self._family(
            "counter", "spec_decode_num_accepted_tokens_per_pos", "Accepted, by place in the draft.", accepted
        )
        yield from self._family("gauge", "cache_config_info", "The KV cache.", [(self._cache(stats), 1)])

    def _cache(self, stats: Stats) -> dict[str, str]:
        """Labels by vLLM's names: `num_gpu_blocks` are pages, on whatever device they are."""
        caches = self._plan.caches
        return {
            "block_size": str(stats.page_tokens),
            "cache_dtype": ",".join(dict.fromkeys(cache.dtype for cache in caches)),
            "enable_prefix_caching": str(stats.prefix_cache),
            "num_gpu_blocks": str(sum(stats.kv_pages)),
            "kv_cache_memory_bytes": str(stats.memory.get("kv", 0)),
        }

    # --- Prometheus' text format --------------------------------------------------------------------------------------

    def _single(self, kind: str, name: str, help_text: str, value: float) -> Iterator[str]:
        return self._family(kind, name, help_text, [({}, value)])

    def _family(
        self, kind: str, name: str, help_text: str, samples: Iterable[tuple[Mapping[str, str], float]]
    ) -> Iterator[str]:
        full = PREFIX + name + ("_total" if kind == "counter" else "")
        yield f"# HELP {full} {help_text}"
        yield f"# TYPE {full} {kind}"
        for labels, value in samples:
            yield f"{full}{self._shown(labels)} {value}"

    def _histogram(
        self, name: str, help_text: str, bounds: Sequence[float], counts: Sequence[int], total: float
    ) -> Iterator[str]:
        yield from self._family("histogram", name, help_text, ())
        below = 0
        for bound, count in zip((*bounds, float("inf")), counts, strict=True):
            below += count
            yield f"{PREFIX}{name}_bucket{self._shown({'le': _number(bound)})} {below}"
        yield f"{PREFIX}{name}_sum{self._shown({})} {total}"
        yield f"{PREFIX}{name}_count{self._shown({})} {below}"

    def _shown(self, labels: Mapping[str, str]) -> str:
        return "{" + ",".join(f'{name}="{_escaped(value)}"' for name, value in {**self._labels, **labels}.items()) + "}"


class RequestTimer:
    """Times one choice by the server's clock. Without a finish reason the client went away."""

    def __init__(self, metrics: Metrics, command: Add) -> None:
        self._metrics = metrics
        self.command = command
        self._last = command.arrival
        self._first = 0.0
        self.seconds = 0.0
        """From arrival to the end, once it is there."""
        self._ended = False  # by the engine, rather than by a stop string or the client
        self.tokens = 0
        self.reason: str | None = "abort"
        self.engine: RequestMetrics | None = None
        """What the engine told last."""

    def delta(self, delta: Delta) -> None:
        """Note what arrived."""
        if delta.metrics is not None:
            self.engine = delta.metrics
        if delta.finish_reason is not None:
            self.reason = delta.finish_reason
            self._ended = delta.metrics is not None
        count = len(delta.token_ids)
        if not count:
            return
        metrics, now = self._metrics, time.monotonic()
        if self.tokens == 0:
            self._first = self._last = now
            metrics.prompt_tokens += len(self.command.prompt)
            metrics.first_token.observe(now - self.command.arrival)
            count -= 1
        if count:
            metrics.inter_token.observe((now - self._last) / count, count)
        self._last = now
        self.tokens += len(delta.token_ids)
        metrics.generation_tokens += len(delta.token_ids)

    @property
    def last_token(self) -> float:
        """Seconds from arrival: by the engine's clock if it ended the request, else by ours."""
        return self.engine.total if self.engine is not None and self._ended else self._last - self.command.arrival

    def refused(self) -> None:
        """The request was none; it is not counted."""
        self.reason = None

    def failed(self) -> None:
        self.reason = "error"

    def end(self) -> None:
        """Record it."""
        metrics, command, count = self._metrics, self.command, self.tokens
        self.seconds = time.monotonic() - command.arrival
        if self.reason is None:
            return
        metrics.finished[self.reason] += 1
        metrics.prompts.observe(len(command.prompt))
        metrics.outputs.observe(count)
        metrics.total.observe(self.seconds)
        metrics.max_tokens.observe(command.params.max_tokens or metrics.context - len(command.prompt))
        if count > 1:
            metrics.per_token.observe((self._last - self._first) / (count - 1))
        if self.engine is not None:
            engine, end = self.engine, self.last_token
            metrics.computed.observe(len(command.prompt) - engine.cached_tokens)
            metrics.queue.observe(engine.queue)
            metrics.inference.observe(end - engine.queue)
            metrics.prefill.observe(engine.first_token - engine.queue)
            metrics.decode.observe(end - engine.first_token)


def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


def _number(value: float) -> str:
    return "+Inf" if value == float("inf") else str(float(value))
