"""`toolkit serve` on a real model, asked by real clients."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from e2e.serving import ServerProcess, StartServer
from prometheus_client.parser import text_string_to_metric_families
from unit.runtime.server.collector import attributes, collecting

from toolkit.runtime.load import read_plan

QUESTION: list[dict[str, str]] = [
    {"role": "system", "content": "You answer in one short sentence."},
    {"role": "user", "content": "What is the capital of France?"},
]
BANNED = ("torch", "triton", "transformers", "onnx", "tvm", "opentelemetry", "requests", "google")


def sdk(server: ServerProcess) -> Any:
    """The SDK, untyped: some fields go beyond its types."""
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60)


def ask(client: Any, **options: Any) -> Any:
    model = client.models.list().data[0].id
    return client.chat.completions.create(model=model, messages=QUESTION, temperature=0, **options)


def wait_until(condition: Callable[[], bool], seconds: float) -> float:
    """How long it took."""
    began = time.monotonic()
    while not condition():
        assert time.monotonic() - began < seconds, "it did not happen in time"
        time.sleep(0.01)
    return time.monotonic() - began


def metric(server: ServerProcess, name: str) -> float:
    text = httpx.get(f"{server.url}/metrics").text
    return sum(float(line.rsplit(" ", 1)[1]) for line in text.splitlines() if line.startswith(f"toolkit:{name}{{"))


# --- metrics ----------------------------------------------------------------------------------------------------------


def scrape(server: ServerProcess) -> dict[str, float]:
    """Samples by name, those that differ only in labels summed."""
    found: dict[str, float] = defaultdict(float)
    for family in text_string_to_metric_families(httpx.get(f"{server.url}/metrics").text):
        for sample in family.samples:
            found[sample.name.removeprefix("toolkit:")] += sample.value
    return found


def test_ten_requests_of_ten_tokens_are_counted_exactly(server: ServerProcess) -> None:
    body = {"prompt": [5, 6, 7, 8], "max_tokens": 10, "ignore_eos": True, "temperature": 0}
    before = scrape(server)

    def one(_: int) -> int:
        return httpx.post(f"{server.url}/v1/completions", json=body, timeout=60).status_code

    with ThreadPoolExecutor(10) as pool:
        assert set(pool.map(one, range(10))) == {200}
    after = scrape(server)
    change = {name: after[name] - before[name] for name in after}
    exact = {
        "prompt_tokens_total": 40,
        "generation_tokens_total": 100,
        "request_success_total": 10,
        "inter_token_latency_seconds_count": 90,
        "iteration_tokens_total_sum": 140 - change["prefix_cache_hits_total"],
        "prefix_cache_queries_total": 40,
        "request_prefill_kv_computed_tokens_sum": 40 - change["prefix_cache_hits_total"],
    }
    each = ("time_to_first_token", "e2e_request_latency", "request_queue_time", "request_prefill_time")
    exact |= {f"{name}_seconds_count": 10 for name in (*each, "request_decode_time", "request_inference_time")}
    assert {name: change[name] for name in exact} == exact


def test_gauges_are_zero_soon_after_aborts(server: ServerProcess) -> None:
    gauges = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
    body = {"prompt": [5, 6, 7, 8], "n": 24, "max_tokens": 900, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=60) as response:
        assert response.status_code == 200
        lines = response.iter_lines()  # which closes the response when dropped
        next(lines)
        wait_until(lambda: all(metric(server, name) > 0 for name in gauges[::2]), 10)
    assert wait_until(lambda: all(metric(server, name) == 0 for name in gauges), 10) < 10


# --- traces -----------------------------------------------------------------------------------------------------------


def test_traces_have_the_engines_times(own_server: StartServer) -> None:
    with collecting() as collector:
        server = own_server("--otlp-traces-endpoint", collector.url)
        headers = {"traceparent": f"00-{'ab' * 16}-{'cd' * 8}-01"}
        body = {"prompt": [5, 6, 7, 8], "max_tokens": 10, "ignore_eos": True}
        began = time.time_ns()
        httpx.post(f"{server.url}/v1/completions", json=body, headers=headers, timeout=60).raise_for_status()
        ended = time.time_ns()
        assert server.stop() == 0
    spans = {span.name: span for span in collector.spans}
    root = spans.pop("text_completion smollm2")
    assert (root.trace_id.hex(), root.parent_span_id.hex()) == ("ab" * 16, "cd" * 8)
    assert spans.keys() == {"queue", "prefill", "decode"}
    assert {span.parent_span_id for span in spans.values()} == {root.span_id}
    moments = [began, root.start_time_unix_nano, spans["queue"].start_time_unix_nano]
    for name in ("queue", "prefill", "decode"):
        moments.append(spans[name].end_time_unix_nano)
    moments += [root.end_time_unix_nano, ended]
    assert moments == sorted(moments)
    found = attributes(root.attributes)
    assert (found["gen_ai.usage.input_tokens"], found["gen_ai.usage.output_tokens"]) == (4, 10)


# --- profiles ---------------------------------------------------------------------------------------------------------


def test_a_profile_shows_every_launch_and_changes_no_answer(server: ServerProcess, smollm2_plan: Path) -> None:
    body = {"prompt": [5, 6, 7, 8], "max_tokens": 6, "temperature": 0, "ignore_eos": True, "return_token_ids": True}

    def ask_once() -> Any:
        answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60).json()
        return answer["choices"][0]["token_ids"]

    expected = ask_once()
    assert httpx.post(f"{server.url}/start_profile?steps=3").json() == {"status": "profiling", "steps": 3}
    assert httpx.post(f"{server.url}/start_profile").status_code == 400
    assert ask_once() == expected
    trace = httpx.post(f"{server.url}/stop_profile").json()
    assert httpx.post(f"{server.url}/stop_profile").status_code == 400
    assert ask_once() == expected
    spans = [each for each in trace["traceEvents"] if each["ph"] == "X"]
    runs = [each for each in spans if each["name"] == "run"]
    assert len(runs) == 3
    assert runs[-1]["args"] == {"tokens": 1, "sequences": 1, "rows": 1}
    for phase in ("step", "schedule", "build", "submit", "wait", "update"):
        assert [each for each in spans if each["name"] == phase], phase  # steps may be queued ahead of updates
    launches = [each for each in spans if each["tid"] == 2]
    names = {launch.op for bucket in read_plan(smollm2_plan).buckets for launch in bucket.launches}
    assert {each["name"] for each in launches} <= names
    assert len(launches) >= 3 * 60
    assert all(each["dur"] >= 0 for each in spans)
    for run in runs:
        inside = [each for each in launches if run["ts"] <= each["ts"] <= run["ts"] + run["dur"]]
        assert 0 < sum(each["dur"] for each in inside) <= run["dur"]


@pytest.mark.parametrize("steps", ["0", "1001", "-1", "x", "9" * 30])
def test_a_profile_has_bounds(server: ServerProcess, steps: str) -> None:
    answer = httpx.post(f"{server.url}/start_profile", params={"steps": steps})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "steps")


# --- structured output ------------------------------------------------------------------------------------------------


def test_outputs_keep_to_grammars_side_by_side(server: ServerProcess) -> None:
    client = sdk(server)
    schema = {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 12}, "big": {"type": "boolean"}},
        "required": ["city", "big"],
        "additionalProperties": False,
    }
    wanted = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
    tool = {"type": "function", "function": {"name": "look_up", "parameters": schema}}
    answers: dict[str, Any] = {}

    def one(name: str, **options: Any) -> None:
        answers[name] = ask(client, max_tokens=60, **options).choices[0]

    named = {"type": "function", "function": {"name": "look_up"}}
    threads = [
        threading.Thread(target=one, args=("json",), kwargs={"response_format": wanted}),
        threading.Thread(
            target=one, args=("choice",), kwargs={"extra_body": {"structured_outputs": {"choice": ["Rome", "Oslo"]}}}
        ),
        threading.Thread(target=one, args=("regex",), kwargs={"extra_body": {"guided_regex": "[0-9]{3}"}}),
        threading.Thread(target=one, args=("tool",), kwargs={"tools": [tool], "tool_choice": named}),
        threading.Thread(target=one, args=("plain",)),
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    data = json.loads(answers["json"].message.content)
    assert (type(data["city"]), type(data["big"]), answers["json"].finish_reason) == (str, bool, "stop")
    assert answers["choice"].message.content in {"Rome", "Oslo"}
    assert re.fullmatch("[0-9]{3}", answers["regex"].message.content)
    (call,) = answers["tool"].message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments).keys()) == ("look_up", {"city", "big"})
    assert answers["tool"].finish_reason == "tool_calls"
    assert "Paris" in answers["plain"].message.content


def test_a_wrong_grammar_is_refused_alone(server: ServerProcess) -> None:
    bodies: list[dict[str, Any]] = [
        {"guided_regex": "(("},
        {"guided_choice": []},
        {"structured_outputs": {"json": {"type": "foo"}}},
    ]
    for body in bodies:
        with pytest.raises(openai.BadRequestError, match="can't be used") as caught:
            ask(sdk(server), extra_body=body)
        assert caught.value.param == next(iter(body))
    assert "Paris" in ask(sdk(server), max_tokens=40).choices[0].message.content


# --- the openai SDK ---------------------------------------------------------------------------------------------------


def test_the_answer_is_right_streamed_and_whole(server: ServerProcess) -> None:
    whole = ask(sdk(server), max_tokens=40)
    chunks = list(ask(sdk(server), max_tokens=40, stream=True, stream_options={"include_usage": True}))
    assert "Paris" in whole.choices[0].message.content
    text = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert whole.usage.total_tokens == whole.usage.prompt_tokens + whole.usage.completion_tokens


def test_async_clients_get_what_they_would_get_alone(server: ServerProcess) -> None:
    prompts = [f"Count from {number} to ten:" for number in range(6)]

    async def main() -> list[str]:
        url = f"{server.url}/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0, timeout=60) as client:
            jobs = [client.completions.create(model=name, prompt=prompt, **fixed) for prompt in prompts]
            return [answer.choices[0].text for answer in await asyncio.gather(*jobs)]

    name = sdk(server).models.list().data[0].id
    fixed: Any = {"max_tokens": 4, "temperature": 0}
    together = asyncio.run(main())
    alone = [sdk(server).completions.create(model=name, prompt=prompt, **fixed).choices[0].text for prompt in prompts]
    # Batches round differently, so a near-tie may flip: most must be equal.
    assert sum(a == b for a, b in zip(together, alone, strict=True)) >= len(prompts) - 1


def test_sampling_options_reach_the_sampler(server: ServerProcess) -> None:
    client = sdk(server)
    name = client.models.list().data[0].id

    def sample(**options: Any) -> list[str]:
        answer = client.completions.create(model=name, prompt="Once upon a time", max_tokens=12, **options)
        return [choice.text for choice in answer.choices]

    assert sample(seed=7, temperature=1.0) == sample(seed=7, temperature=1.0)
    assert len(set(sample(n=4, seed=7, temperature=1.5))) > 1
    assert sample(temperature=1.5, extra_body={"top_k": 1}) == sample(temperature=0)
    token = httpx.post(f"{server.url}/tokenize", json={"prompt": " banana"}).json()["tokens"][0]
    forced = httpx.post(f"{server.url}/detokenize", json={"tokens": [token] * 12}).json()["prompt"]
    assert sample(temperature=0, logit_bias={str(token): 100}) == [forced]


def test_logprobs_are_consistent(server: ServerProcess) -> None:
    client = sdk(server)
    answer = ask(client, max_tokens=8, logprobs=True, top_logprobs=3)
    entries = answer.choices[0].logprobs.content
    joined = b"".join(bytes(entry.bytes) for entry in entries)
    assert answer.choices[0].message.content in joined.decode()
    for entry in entries:
        best = entry.top_logprobs[0]
        assert (best.token, best.logprob) == (entry.token, entry.logprob), "greedy takes the likeliest"
        assert entry.logprob <= 0
        assert [each.logprob for each in entry.top_logprobs] == sorted(
            (each.logprob for each in entry.top_logprobs), reverse=True
        )


def test_a_scored_prompt_agrees_with_its_generation(server: ServerProcess) -> None:
    """Log-probabilities of generated tokens equal those of the same tokens sent back as a prompt."""
    client = sdk(server)
    name = client.models.list().data[0].id
    options: dict[str, Any] = {"model": name, "temperature": 0, "logprobs": 0}
    ids = httpx.post(f"{server.url}/tokenize", json={"prompt": "The capital of France is"}).json()["tokens"]
    first = client.completions.create(
        prompt=ids, max_tokens=6, extra_body={"return_token_ids": True, "ignore_eos": True}, **options
    ).choices[0]
    second = client.completions.create(prompt=ids + first.token_ids, max_tokens=0, echo=True, **options).choices[0]
    assert second.logprobs.token_logprobs[0] is None
    assert second.logprobs.token_logprobs[len(ids) :] == pytest.approx(first.logprobs.token_logprobs, abs=0.05)


def test_stop_strings_cut_the_text(server: ServerProcess) -> None:
    whole = ask(sdk(server), max_tokens=40).choices[0].message.content
    stop = whole[len(whole) // 2 : len(whole) // 2 + 3]
    answer = ask(sdk(server), max_tokens=40, stop=[stop, "never seen"])
    assert answer.choices[0].message.content == whole[: whole.index(stop)]
    assert (answer.choices[0].finish_reason, answer.choices[0].stop_reason) == ("stop", stop)


def test_the_sdk_understands_our_errors(server: ServerProcess) -> None:
    client = sdk(server)
    with pytest.raises(openai.NotFoundError, match="does not exist"):
        client.completions.create(model="other", prompt="a")
    with pytest.raises(openai.BadRequestError, match="tools is not supported") as caught:
        ask(client, tools=[{"type": "function", "function": {"name": "f"}}])
    assert caught.value.param == "tools"
    with pytest.raises(openai.BadRequestError) as caught:
        ask(client, max_tokens=100_000)
    assert caught.value.code == "context_length_exceeded"


# --- raw HTTP ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "kind", "status"),
    [
        (b"{", "application/json", 400),
        (b"\xff", "application/json", 400),
        (b"[" * 100_000, "application/json", 400),
        (b'{"prompt": "a", "bogus": 1}', "application/json", 400),
        (b'{"prompt": "a", "n": 1000000}', "application/json", 400),
        (b'{"prompt": "' + b"word " * 200_000 + b'"}', "application/json", 400),
        (b'{"prompt": "' + b"x" * (17 << 20) + b'"}', "application/json", 413),
        (b'{"prompt": "a"}', "text/plain", 415),
    ],
)
def test_bad_requests_leave_the_server_alive(server: ServerProcess, content: bytes, kind: str, status: int) -> None:
    url = f"{server.url}/v1/completions"
    response = httpx.post(url, content=content, headers={"content-type": kind}, timeout=60)
    assert response.status_code == status
    assert response.json()["error"]["message"]
    assert httpx.get(f"{server.url}/health").status_code == 200


def test_bytes_that_are_no_http(server: ServerProcess) -> None:
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=10) as connection:
        connection.sendall(b"\x16\x03\x01 this is no http\r\n\r\n")
        assert b"400" in connection.recv(1000)
    assert httpx.get(f"{server.url}/health").status_code == 200


@pytest.mark.parametrize("stream", [False, True])
def test_pages_of_a_vanished_client_are_free_within_a_second(server: ServerProcess, stream: bool) -> None:
    body = {"prompt": "Once upon a time", "max_tokens": 900, "ignore_eos": True, "stream": stream}
    with (
        suppress(httpx.ReadTimeout),
        httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=0.5) as response,
    ):
        lines = response.iter_lines()  # closes the connection when it is collected
        next(lines)
        wait_until(lambda: metric(server, "num_requests_running") == 1, 10)
    wait_until(lambda: metric(server, "num_requests_running") == 0 and metric(server, "kv_cache_usage_perc") == 0, 1.0)


def test_counters(server: ServerProcess) -> None:
    before = metric(server, "generation_tokens_total"), metric(server, "request_success_total")
    body = {"prompt": ["a", "b"], "max_tokens": 10, "n": 5, "ignore_eos": True}
    httpx.post(f"{server.url}/v1/completions", json=body, timeout=60).raise_for_status()
    after = metric(server, "generation_tokens_total"), metric(server, "request_success_total")
    assert (after[0] - before[0], after[1] - before[1]) == (100, 10)


# --- the processes ----------------------------------------------------------------------------------------------------


def test_a_busy_port_is_said_in_one_sentence(server: ServerProcess, smollm2_plan: Path) -> None:
    port = server.url.rsplit(":", 1)[1]
    command = [sys.executable, "-m", "toolkit.cli.main", "serve", str(smollm2_plan), "--port", port]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert f"port {port} on 127.0.0.1 is in use" in line


def test_too_little_memory_is_said_in_one_sentence(smollm2_plan: Path) -> None:
    command = [sys.executable, "-m", "toolkit.cli.main", "serve", str(smollm2_plan), "--port", "0", "--memory", "10MiB"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert "--memory" in line


def test_a_full_disk_under_the_log_stops_nothing(smollm2_plan: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "toolkit.cli.main", "serve", str(smollm2_plan), "--port", str(port)]
    path = os.pathsep.join(filter(None, sys.path))
    with open("/dev/full", "wb", buffering=0) as full:
        process = subprocess.Popen(
            [*command, "--memory", "1GiB", "--log-level", "debug", "--enable-log-requests"],
            stderr=full,
            env=os.environ | {"PYTHONPATH": path, "TOOLKIT_DEBUG": "2"},
        )
    try:
        url = f"http://127.0.0.1:{port}"

        def ready() -> bool:
            with suppress(httpx.TransportError):
                return httpx.get(f"{url}/ready").status_code == 200
            return False

        wait_until(ready, 30)
        for _ in range(3):
            answer = httpx.post(f"{url}/v1/completions", json={"prompt": "Hello", "max_tokens": 5}, timeout=60)
            assert answer.status_code == 200
        assert httpx.get(f"{url}/health").status_code == 200
        process.terminate()
        assert process.wait(30) == 0
    finally:
        process.kill()


def test_a_signal_lets_streams_end(own_server: StartServer) -> None:
    server = own_server()
    engine = server.engine
    stream = ask(sdk(server), max_tokens=60, stream=True, extra_body={"ignore_eos": True})
    next(stream)
    server.process.send_signal(signal.SIGTERM)
    time.sleep(0.3)
    with pytest.raises(httpx.HTTPError):
        httpx.get(f"{server.url}/health", timeout=2)
    chunks = list(stream)
    assert chunks[-1].choices[0].finish_reason == "length"
    assert server.wait(20) == 0
    assert not Path(f"/proc/{engine}").exists()


def test_a_second_signal_does_not(own_server: StartServer) -> None:
    server = own_server()
    body = {"prompt": "a", "max_tokens": 900, "ignore_eos": True}
    thread = threading.Thread(target=_ignore_errors, args=(server, body))
    thread.start()
    wait_until(lambda: metric(server, "num_requests_running") == 1, 10)
    server.process.send_signal(signal.SIGINT)
    time.sleep(0.2)
    server.process.send_signal(signal.SIGINT)
    assert server.wait(3) == 0
    thread.join(10)


def _ignore_errors(server: ServerProcess, body: dict[str, Any]) -> None:
    with suppress(httpx.HTTPError):
        httpx.post(f"{server.url}/v1/completions", json=body, timeout=60)


def test_a_killed_engine_is_back_soon(own_server: StartServer) -> None:
    server = own_server()
    stream = ask(sdk(server), max_tokens=500, stream=True, extra_body={"ignore_eos": True})
    next(stream)
    os.kill(server.engine, signal.SIGKILL)
    killed = time.monotonic()
    with pytest.raises(openai.APIError, match="SIGKILL"):
        list(stream)
    answer = httpx.post(f"{server.url}/v1/completions", json={"prompt": "a", "max_tokens": 3}, timeout=10)
    assert answer.status_code == 200
    assert time.monotonic() - killed < 5.0
    wait_until(lambda: httpx.get(f"{server.url}/ready").status_code == 200, 3)
    assert metric(server, "num_requests_running") == 0
    assert server.stop() == 0


def test_an_engine_that_keeps_dying_ends_the_server(own_server: StartServer) -> None:
    server = own_server()
    for attempt in range(4):
        os.kill(server.engine, signal.SIGKILL)
        if attempt < 3:
            wait_until(lambda: httpx.get(f"{server.url}/ready").status_code == 503, 3)
            wait_until(lambda: httpx.get(f"{server.url}/ready").status_code == 200, 10)
    assert server.wait(10) == 1


_LIST_MODULES = """
import atexit, os, pathlib, sys
atexit.register(lambda: pathlib.Path(os.environ["MODULES"], str(os.getpid())).write_text("\\n".join(sys.modules)))
"""


def test_serving_loads_nothing_of_the_compiler(own_server: StartServer, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(_LIST_MODULES)
    path = os.pathsep.join([str(tmp_path), *filter(None, sys.path)])
    server = own_server(PYTHONPATH=path, MODULES=str(tmp_path))
    pids = {server.process.pid, server.engine}
    assert ask(sdk(server), max_tokens=4).choices[0].message.content
    assert httpx.get(f"{server.url}/metrics").status_code == 200
    assert server.stop() == 0
    loaded = {pid: set((tmp_path / str(pid)).read_text().split()) for pid in pids}
    for modules in loaded.values():
        assert "toolkit.runtime.request" in modules
        assert {module.partition(".")[0] for module in modules}.isdisjoint(BANNED)
    assert "numpy" not in loaded[server.process.pid], "the API process starts without it"


def test_tls_over_a_unix_socket_with_a_key(own_server: StartServer, tmp_path: Path) -> None:
    key, certificate, path = tmp_path / "key.pem", tmp_path / "certificate.pem", tmp_path / "socket"
    make = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=server", "-days", "2"]
    options = ["-addext", "subjectAltName=DNS:server", "-keyout", str(key), "-out", str(certificate)]
    subprocess.run([*make, *options], check=True, capture_output=True)
    files = ("--ssl-certfile", str(certificate), "--ssl-keyfile", str(key))
    server = own_server("--uds", str(path), *files, "--root-path", "/llm", TOOLKIT_API_KEY="one two")
    assert server.url == f"unix:{path}"
    trusted = ssl.create_default_context(cafile=str(certificate))
    with httpx.Client(
        transport=httpx.HTTPTransport(uds=str(path), verify=trusted), base_url="https://server"
    ) as client:
        assert client.get("/ready").status_code == 200
        assert client.get("/v1/models").status_code == 401
        assert client.get("/v1/models", headers={"authorization": "Bearer two"}).status_code == 200
    assert server.stop() == 0
    assert not path.exists()
