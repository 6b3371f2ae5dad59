"""OpenTelemetry traces: a span for each request that generates, by the conventions for generative AI, sent over OTLP.

https://opentelemetry.io/docs/specs/semconv/gen-ai/. Attributes of `gen_ai.latency` are vLLM's.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Mapping
from itertools import chain
from urllib.parse import urlsplit

from ... import __version__
from ..errors import UserError
from .metrics import RequestTimer
from .record import CLIENT_GONE, Record

OPERATIONS: Mapping[str, str] = {
    "/v1/chat/completions": "chat",
    "/v1/responses": "chat",
    "/v1/messages": "chat",
    "/v1/completions": "text_completion",
    "/inference/v1/generate": "text_completion",
}
"""Routes that generate, and what the conventions call it."""

CLOSE_SECONDS = 2.0
"""How long the last spans may take at the end."""
Attribute = str | int | float | tuple[str, ...]


class Tracer:
    """Sends a span for each record it is called with, in a thread (a `record.Observer`).

    A request is a child of the span that its `traceparent` names, and has children of its own: `queue`, `prefill` and
    `decode` of each choice, by the engine's clock. `OTEL_SERVICE_NAME`, `OTEL_TRACES_SAMPLER`,
    `OTEL_EXPORTER_OTLP_HEADERS` and others are the SDK's.
    """

    def __init__(self, endpoint: str, model: str) -> None:
        """Raises UserError if the endpoint is no URL or the SDK is not installed."""
        address = urlsplit(endpoint)
        if address.scheme not in ("http", "https") or not address.netloc:
            raise UserError(f"--otlp-traces-endpoint must be a URL such as http://localhost:4318, not {endpoint!r}")
        if address.path in ("", "/"):
            endpoint = address._replace(path="/v1/traces").geturl()
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
            from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
        except ModuleNotFoundError as error:
            raise UserError(
                f"--otlp-traces-endpoint needs {error.name}, which is not installed: pip install 'plan-toolkit[otel]'"
            ) from None
        name = {"service.name": os.environ.get("OTEL_SERVICE_NAME", "toolkit")}
        self._provider = TracerProvider(resource=Resource.create(name), shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint)))
        self._tracer = self._provider.get_tracer("toolkit", __version__)
        self._propagator = TraceContextTextMapPropagator()
        self._model = model

    def __call__(self, record: Record) -> None:
        operation = OPERATIONS.get(record.route)
        if operation is None:
            return
        from opentelemetry.trace import SpanKind, StatusCode, set_span_in_context

        def nanoseconds(moment: float) -> int:
            return record.wall_ns + round((moment - record.began) * 1e9)

        attributes = dict(chain(self._general(record, operation), _generated(record)))
        span = self._tracer.start_span(
            f"{operation} {self._model}",
            context=self._propagator.extract(record.headers),
            kind=SpanKind.SERVER,
            attributes=attributes,
            start_time=record.wall_ns,
        )
        if "error.type" in attributes:
            span.set_status(StatusCode.ERROR)
        parent = set_span_in_context(span)
        for index, choice in enumerate(record.choices):
            for phase, begin, end in _phases(choice):
                arrival = choice.command.arrival
                child = self._tracer.start_span(
                    phase,
                    context=parent,
                    attributes={"toolkit.choice": index},
                    start_time=nanoseconds(arrival + begin),
                )
                child.end(nanoseconds(arrival + end))
        span.end(nanoseconds(record.ended))

    def close(self) -> None:
        """Send what waits; a collector that is away is not waited for."""
        sending = threading.Thread(target=self._provider.shutdown, daemon=True)
        sending.start()
        sending.join(CLOSE_SECONDS)

    def _general(self, record: Record, operation: str) -> Iterator[tuple[str, Attribute]]:
        yield "gen_ai.operation.name", operation
        yield "gen_ai.provider.name", "toolkit"
        yield "gen_ai.request.model", self._model
        yield "gen_ai.response.model", self._model
        yield "gen_ai.request.id", record.id
        yield "http.request.method", record.method
        yield "http.route", record.route
        if record.status != CLIENT_GONE:
            yield "http.response.status_code", record.status
        if record.answer:
            yield "gen_ai.response.id", record.answer
        if (record.status >= 500) or "error" in record.finish_reasons:
            yield "error.type", str(record.status) if record.status >= 500 else "engine"


def _generated(record: Record) -> Iterator[tuple[str, Attribute]]:
    if not record.choices:
        return
    first = record.choices[0]
    params, engine = first.command.params, first.engine
    asked: dict[str, Attribute | None] = {
        "max_tokens": params.max_tokens,
        "temperature": params.temperature,
        "top_p": params.top_p,
        "top_k": params.top_k if params.top_k > 0 else None,
        "frequency_penalty": params.frequency_penalty or None,
        "presence_penalty": params.presence_penalty or None,
        "seed": params.seed if params.seed is None or -(2**63) <= params.seed < 2**63 else str(params.seed),
        "stop_sequences": params.stop or None,
        "choice.count": len(record.choices) if len(record.choices) > 1 else None,
    }
    yield from ((f"gen_ai.request.{name}", value) for name, value in asked.items() if value is not None)
    yield "gen_ai.usage.input_tokens", record.prompt_tokens
    yield "gen_ai.usage.output_tokens", record.output_tokens
    yield "gen_ai.response.finish_reasons", tuple(record.finish_reasons)
    if engine is not None:
        yield "gen_ai.usage.cache_read.input_tokens", engine.cached_tokens
        yield "gen_ai.latency.time_in_queue", engine.queue
        yield "gen_ai.latency.time_to_first_token", engine.first_token
        yield "gen_ai.latency.time_in_model_prefill", engine.first_token - engine.queue
        yield "gen_ai.latency.time_in_model_decode", first.last_token - engine.first_token
        yield "gen_ai.latency.time_in_model_inference", first.last_token - engine.queue
        yield "gen_ai.latency.e2e", first.seconds


def _phases(choice: RequestTimer) -> Iterator[tuple[str, float, float]]:
    """Name, begin and end in seconds since arrival."""
    if choice.engine is not None:
        times = (0.0, choice.engine.queue, choice.engine.first_token, choice.last_token)
        yield from zip(("queue", "prefill", "decode"), times, times[1:], strict=False)
