"""`/metrics`: exact counts, read with Prometheus' own parser."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families
from unit.runtime.server.fakes import FakeEngine, Server, make_plan

from toolkit.runtime.request import STEP_TOKENS, RequestMetrics, Stats
from toolkit.runtime.server import metrics as module
from toolkit.runtime.server.metrics import Metrics, NamedHistogram

COUNT, PROMPT, OUTPUT = 10, 4, 10
BODY = {"prompt": "abcd", "max_tokens": OUTPUT, "ignore_eos": True}


def serve(test: Callable[[Server], Awaitable[None]]) -> None:
    async def main() -> None:
        async with Server() as server:
            await asyncio.wait_for(test(server), 20)

    asyncio.run(main())


def families(text: str) -> dict[str, Metric]:
    return {family.name: family for family in text_string_to_metric_families(text)}


async def scrape(server: Server) -> dict[str, float]:
    """Samples by name; labels other than those that all have are appended."""
    found = {}
    for family in families((await server.client.get("/metrics")).text).values():
        for sample in family.samples:
            assert sample.labels.pop("model_name") == "bytes/model"
            assert sample.labels.pop("engine") == "0"
            found[" ".join([sample.name.removeprefix("toolkit:"), *sample.labels.values()])] = sample.value
    return found


async def post(server: Server, **fields: Any) -> None:
    response = await server.client.post("/v1/completions", json=BODY | fields)
    assert response.status_code == 200, response.text


def test_counts_are_exact() -> None:
    async def test(server: Server) -> None:
        await asyncio.gather(*(post(server) for _ in range(COUNT)))
        found = await scrape(server)
        exact = {
            "prompt_tokens_total": COUNT * PROMPT,
            "generation_tokens_total": COUNT * OUTPUT,
            "request_success_total length": COUNT,
            "request_success_total stop": 0,
            "request_success_total abort": 0,
            "request_success_total error": 0,
            "time_to_first_token_seconds_count": COUNT,
            "inter_token_latency_seconds_count": COUNT * (OUTPUT - 1),
            "request_time_per_output_token_seconds_count": COUNT,
            "e2e_request_latency_seconds_count": COUNT,
            "request_queue_time_seconds_count": COUNT,
            "request_prefill_time_seconds_count": COUNT,
            "request_decode_time_seconds_count": COUNT,
            "request_inference_time_seconds_count": COUNT,
            "request_prompt_tokens_count": COUNT,
            "request_prompt_tokens_sum": COUNT * PROMPT,
            "request_prefill_kv_computed_tokens_sum": COUNT * PROMPT / 2,
            "request_generation_tokens_sum": COUNT * OUTPUT,
            "request_generation_tokens_bucket 5.0": 0,
            "request_generation_tokens_bucket 10.0": COUNT,
            "request_max_num_generation_tokens_sum": COUNT * OUTPUT,
            "request_params_n_count": COUNT,
            "request_params_n_sum": COUNT,
            "request_params_max_tokens_count": COUNT,
            "request_params_max_tokens_sum": COUNT * OUTPUT,
        }
        assert {name: found[name] for name in exact} == exact
        assert 0 < found["time_to_first_token_seconds_sum"] < 600
        assert 0 < found["e2e_request_latency_seconds_sum"] < 600

    serve(test)


def test_no_limit_is_the_room_that_the_prompt_leaves() -> None:
    async def test(server: Server) -> None:
        body = {"messages": [{"role": "user", "content": "hi"}]}
        assert (await server.client.post("/v1/chat/completions", json=body)).status_code == 200
        found = await scrape(server)
        assert found["request_params_max_tokens_sum"] == 256 - len("user:hi\nassistant:")

    serve(test)


def test_times_are_the_engines() -> None:
    async def test(server: Server) -> None:
        times = RequestMetrics(queue=0.5, first_token=2.0, total=9.0, cached_tokens=0)
        server.engine._metrics = lambda command: times  # type: ignore[method-assign]
        await post(server)
        found = await scrape(server)
        assert found["request_queue_time_seconds_sum"] == 0.5
        assert found["request_prefill_time_seconds_sum"] == 1.5
        assert found["request_decode_time_seconds_sum"] == 7.0
        assert found["request_inference_time_seconds_sum"] == 8.5

    serve(test)


def test_choices_prompts_and_stop_strings() -> None:
    async def test(server: Server) -> None:
        await post(server, n=3, prompt=["ab", "cd"])
        await post(server, stop=[","], ignore_eos=False)  # "Hello,"
        found = await scrape(server)
        assert found["request_params_n_sum"] == 3 + 3 + 1
        assert found["request_params_max_tokens_count"] == 7
        assert found["request_max_num_generation_tokens_count"] == 3
        assert found["request_success_total length"] == 6
        assert found["request_success_total stop"] == 1
        assert found["generation_tokens_total"] == 6 * OUTPUT + 6
        assert found["request_queue_time_seconds_count"] == 7

    serve(test)


def test_the_engines_figures() -> None:
    async def test(server: Server) -> None:
        counts = tuple(range(1, len(STEP_TOKENS) + 2))
        stats = Stats(
            number=0,
            running=3,
            waiting=5,
            kv_usage=0.25,
            prefix_queries=100,
            prefix_hits=60,
            preemptions=7,
            prompt_tokens=0,
            generation_tokens=0,
            steps=9,
            last_step=0.0,
            memory={"kv": 4096},
            kv_pages=(12,),
            page_tokens=16,
            step_tokens=counts,
            step_tokens_sum=1234,
            spec_drafts=8,
            spec_draft_tokens=24,
            spec_accepted_tokens=15,
            spec_accepted_per_position=(7, 5, 3),
        )

        async def answer(self: FakeEngine) -> Stats:
            return stats

        server.engine.stats = answer.__get__(server.engine)  # type: ignore[method-assign]
        found = await scrape(server)
        exact = {
            "num_requests_running": 3,
            "num_requests_waiting": 5,
            "kv_cache_usage_perc": 0.25,
            "prefix_cache_queries_total": 100,
            "prefix_cache_hits_total": 60,
            "num_preemptions_total": 7,
            "iteration_tokens_total_bucket 1.0": 1,
            "iteration_tokens_total_bucket 8.0": 3,
            "iteration_tokens_total_count": sum(counts),
            "iteration_tokens_total_sum": 1234,
            "spec_decode_num_drafts_total": 8,
            "spec_decode_num_draft_tokens_total": 24,
            "spec_decode_num_accepted_tokens_total": 15,
            "spec_decode_num_accepted_tokens_per_pos_total 0": 7,
            "spec_decode_num_accepted_tokens_per_pos_total 2": 3,
        }
        assert {name: found[name] for name in exact} == exact
        text = (await server.client.get("/metrics")).text
        (info,) = families(text)["toolkit:cache_config_info"].samples
        assert info.value == 1
        assert info.labels.items() >= {
            ("block_size", "16"),
            ("num_gpu_blocks", "12"),
            ("enable_prefix_caching", "True"),
            ("kv_cache_memory_bytes", "4096"),
        }

    serve(test)


@given(st.lists(st.floats(0, 1e4), max_size=20))
def test_histograms_are_those_of_the_client_library(values: list[float]) -> None:
    registry = CollectorRegistry()
    theirs = Histogram("toolkit:x", "X.", registry=registry, buckets=module.REQUEST_SECONDS)
    mine = NamedHistogram("x", "X.", module.REQUEST_SECONDS)
    for value in values:
        theirs.observe(value)
        mine.observe(value)
    lines = Metrics(make_plan(), "m")._histogram("x", "X.", mine.bounds, mine.counts, mine.sum)
    expected, found = (families(text)["toolkit:x"] for text in (generate_latest(registry).decode(), "\n".join(lines)))
    assert found.type == expected.type == "histogram"
    rows = [
        [
            (sample.name, sample.labels.get("le"), sample.value)
            for sample in family.samples
            if "created" not in sample.name
        ]
        for family in (expected, found)
    ]
    counts = [sorted(row[:3] for row in each if not row[0].endswith("_sum")) for each in rows]
    assert counts[0] == counts[1]
    sums = [next(row[2] for row in each if row[0].endswith("_sum")) for each in rows]
    np.testing.assert_allclose(sums[0], sums[1])


def test_labels_are_escaped() -> None:
    name = 'a "quoted" \\ name\nof two lines'
    (family, *_) = text_string_to_metric_families(Metrics(make_plan(), name).text(None))
    assert family.samples[0].labels["model_name"] == name
