"""Traces, as a collector receives them over OTLP."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status
from unit.runtime.server.collector import Collector, attributes, collecting
from unit.runtime.server.fakes import Server
from unit.runtime.server.test_app import CHAT, serve

from toolkit.runtime.errors import UserError
from toolkit.runtime.request import Error, RequestMetrics
from toolkit.runtime.server.http import guarded
from toolkit.runtime.server.options import HttpOptions
from toolkit.runtime.server.tracing import Tracer

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
BODY: dict[str, Any] = {"prompt": "a secret", "max_tokens": 5}


@pytest.fixture
def collector() -> Iterator[Collector]:
    with collecting() as each:
        yield each


def traced(collector: Collector, *requests: dict[str, Any], error: Error | None = None) -> list[Span]:
    """The spans of requests to a server whose engine has known times."""
    tracer = Tracer(collector.url, "bytes/model")

    async def test(server: Server) -> None:
        times = RequestMetrics(queue=0.25, first_token=0.5, total=2.0, cached_tokens=3)
        server.engine._metrics = lambda command: times  # type: ignore[method-assign]
        server.engine.error = error
        app = guarded(server.app, HttpOptions(), [tracer])
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://server") as http:
            for request in requests:
                await http.request(request.pop("method", "POST"), **request)

    serve(test)
    tracer.close()
    return collector.spans


def test_a_request_is_a_span_by_the_conventions(collector: Collector) -> None:
    body = BODY | {"temperature": 0.5, "seed": 7, "stop": ["x"], "stream": True, "request_id": "mine"}
    headers = {"traceparent": f"00-{TRACE}-{PARENT}-01", "x-request-id": "asked"}
    began = time.time_ns()
    spans = traced(collector, {"url": "/v1/completions", "json": body, "headers": headers})
    assert set(collector.paths) == {"/v1/traces"}
    (span,) = [span for span in spans if span.parent_span_id.hex() == PARENT]
    assert {each.trace_id.hex() for each in spans} == {TRACE}
    assert (span.name, span.kind) == ("text_completion bytes/model", Span.SPAN_KIND_SERVER)
    assert began <= span.start_time_unix_nano <= span.end_time_unix_nano <= time.time_ns()
    found = attributes(span.attributes)
    assert 0 < found.pop("gen_ai.latency.e2e") < 60
    assert found == {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": "toolkit",
        "gen_ai.request.model": "bytes/model",
        "gen_ai.response.model": "bytes/model",
        "gen_ai.response.id": "cmpl-mine",
        "gen_ai.request.id": "asked",
        "gen_ai.request.max_tokens": 5,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 1.0,
        "gen_ai.request.seed": 7,
        "gen_ai.request.stop_sequences": ["x"],
        "gen_ai.usage.input_tokens": 8,
        "gen_ai.usage.output_tokens": 5,
        "gen_ai.usage.cache_read.input_tokens": 3,
        "gen_ai.response.finish_reasons": ["length"],
        "gen_ai.latency.time_in_queue": 0.25,
        "gen_ai.latency.time_to_first_token": 0.5,
        "gen_ai.latency.time_in_model_prefill": 0.25,
        "gen_ai.latency.time_in_model_decode": 1.5,
        "gen_ai.latency.time_in_model_inference": 1.75,
        "http.request.method": "POST",
        "http.route": "/v1/completions",
        "http.response.status_code": 200,
    }
    children = {each.name: each for each in spans if each.parent_span_id == span.span_id}
    lengths = {name: (each.end_time_unix_nano - each.start_time_unix_nano) / 1e9 for name, each in children.items()}
    assert lengths == pytest.approx({"queue": 0.25, "prefill": 0.25, "decode": 1.5}, abs=1e-6)
    assert children["queue"].end_time_unix_nano == children["prefill"].start_time_unix_nano
    resource = attributes(collector.received[0].resource_spans[0].resource.attributes)
    assert resource["service.name"] == "toolkit"
    assert "secret" not in str(collector.received)


def test_a_chat_of_several_choices_and_what_is_no_generation(collector: Collector) -> None:
    chat = {"url": "/v1/chat/completions", "json": CHAT | {"n": 2}}
    spans = traced(collector, chat, {"method": "GET", "url": "/health"}, {"url": "/tokenize", "json": {"prompt": "a"}})
    (root,) = [span for span in spans if not span.parent_span_id]
    assert root.name == "chat bytes/model"
    assert len(spans) == 7
    found = attributes(root.attributes)
    assert found["gen_ai.response.finish_reasons"] == ["stop", "stop"]
    assert found["gen_ai.request.choice.count"] == 2
    assert {attributes(span.attributes).get("toolkit.choice") for span in spans} == {0, 1, None}


def test_failures(collector: Collector) -> None:
    refused = {"url": "/v1/completions", "json": {"bogus": 1}}
    error = Error("", "the kernel exploded", user_fault=False)
    spans = traced(collector, refused, {"url": "/v1/completions", "json": BODY}, error=error)
    four, five = sorted(
        (span for span in spans if not span.parent_span_id),
        key=lambda span: attributes(span.attributes)["http.response.status_code"],
    )
    assert "error.type" not in attributes(four.attributes)
    assert four.status.code == Status.STATUS_CODE_UNSET
    assert attributes(five.attributes)["error.type"] == "500"
    assert five.status.code == Status.STATUS_CODE_ERROR


def test_what_the_client_does_not_sample_is_not_sent(collector: Collector) -> None:
    headers = {"traceparent": f"00-{TRACE}-{PARENT}-00"}
    assert traced(collector, {"url": "/v1/completions", "json": BODY, "headers": headers}) == []


def test_an_endpoint_must_be_a_url() -> None:
    for endpoint in ("localhost:4317", "grpc://x", "http://"):
        with pytest.raises(UserError, match="must be a URL"):
            Tracer(endpoint, "m")


def test_a_missing_package_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [*sys.modules]:
        if name.startswith("opentelemetry.exporter"):
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter", None)
    with pytest.raises(UserError, match=r"pip install 'plan-toolkit\[otel\]'"):
        Tracer("http://localhost:4318", "m")


def test_a_collector_that_is_away_holds_nothing_up() -> None:
    tracer = Tracer("http://127.0.0.1:9", "bytes/model")

    async def test(server: Server) -> None:
        app = guarded(server.app, HttpOptions(), [tracer])
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://server") as http:
            for _ in range(20):
                assert (await http.post("/v1/completions", json=BODY)).status_code == 200

    serve(test)
    began = time.monotonic()
    tracer.close()
    assert time.monotonic() - began < 5
