"""`toolkit serve --api-workers 2`: two API processes that answer as one server."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import psutil  # type: ignore[import-untyped]
import pytest
from e2e.serving import ServerProcess, StartServer, start_server
from prometheus_client.parser import text_string_to_metric_families

WORKER = "toolkit.runtime.server.worker"


@pytest.fixture(scope="module")
def server(smollm2_plan: Path) -> Iterator[ServerProcess]:
    running = start_server(smollm2_plan, "--api-workers", "2")
    yield running
    assert running.stop() == 0


def children(server: ServerProcess) -> tuple[list[psutil.Process], psutil.Process]:
    """The workers, and the engine."""
    found = psutil.Process(server.process.pid).children()
    workers = [each for each in found if WORKER in each.cmdline()]
    (engine,) = [each for each in found if each not in workers]
    return workers, engine


def post(server: ServerProcess, path: str, **body: Any) -> httpx.Response:
    """Over a connection of its own."""
    return httpx.post(f"{server.url}{path}", json=body, timeout=60)


def complete(server: ServerProcess, tokens: int = 10, **fields: Any) -> httpx.Response:
    return post(server, "/v1/completions", prompt="Once upon a time", max_tokens=tokens, ignore_eos=True, **fields)


def get(server: ServerProcess, path: str) -> dict[str, Any]:
    data: dict[str, Any] = httpx.get(f"{server.url}{path}", timeout=10).json()
    return data


def samples(server: ServerProcess) -> dict[str, float]:
    """Sums of metrics over their labels."""
    text = httpx.get(f"{server.url}/metrics").text
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found[sample.name] = found.get(sample.name, 0) + sample.value
    return found


def until(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.02)


def connections(worker: psutil.Process) -> int:
    """Clients' connections to a worker."""
    return sum(each.status == psutil.CONN_ESTABLISHED for each in worker.net_connections("tcp"))


def test_counts_are_exact_and_both_work(server: ServerProcess) -> None:
    workers, _ = children(server)
    before, used = samples(server), [sum(each.cpu_times()[:2]) for each in workers]
    with ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(lambda _: complete(server), range(48)))
    assert {answer.status_code for answer in answers} == {200}
    for _ in range(6):  # whoever is asked
        after = samples(server)
        added = {name: after[name] - before[name] for name in after}
        assert added["toolkit:generation_tokens_total"] == 480
        assert added["toolkit:request_success_total"] == 48
        assert added["toolkit:time_to_first_token_seconds_count"] == 48
        assert added["toolkit:prefix_cache_queries_total"] == added["toolkit:prompt_tokens_total"]
        assert after["toolkit:num_requests_running"] == 0
    now = [sum(each.cpu_times()[:2]) for each in workers]
    assert all(b - a > 0.02 for a, b in zip(used, now, strict=True)), "one worker did nothing"


def test_requests_are_seen_and_aborted_through_any_worker(server: ServerProcess) -> None:
    names = [f"long-{index}" for index in range(6)]
    with ThreadPoolExecutor(6) as pool:
        answers = [pool.submit(complete, server, 900, request_id=name) for name in names]
        until(lambda: get(server, "/load")["server_load"] == 6)
        assert [get(server, "/load")["running"] for _ in range(4)] == [6] * 4
        assert post(server, "/abort_requests", request_ids=[f"cmpl-{names[0]}"]).json() == {"aborted": 1}
        until(answers[0].done)
        assert answers[0].result().json()["choices"][0]["finish_reason"] == "abort"
        assert get(server, "/load")["server_load"] == 5
        assert post(server, "/abort_requests").json() == {"aborted": 5}
        assert {each.result().json()["choices"][0]["finish_reason"] for each in answers} == {"abort"}
    until(lambda: samples(server).get("toolkit:num_requests_running") == 0)


def test_a_pause_holds_everywhere(server: ServerProcess) -> None:
    httpx.post(f"{server.url}/pause")
    assert [get(server, "/is_paused")["is_paused"] for _ in range(6)] == [True] * 6
    with ThreadPoolExecutor(6) as pool:
        waiting = [pool.submit(complete, server) for _ in range(6)]
        time.sleep(0.3)
        assert not any(each.done() for each in waiting)
        httpx.post(f"{server.url}/resume")
        assert {each.result().status_code for each in waiting} == {200}


def test_stored_responses_are_found_by_all(server: ServerProcess) -> None:
    first = post(server, "/v1/responses", input="My name is Ada.", max_output_tokens=8).json()
    for _ in range(6):
        assert get(server, f"/v1/responses/{first['id']}")["output"] == first["output"]
    streamed = ""
    body = {"input": "Hello", "max_output_tokens": 8, "stream": True, "previous_response_id": first["id"]}
    body |= {"ignore_eos": True}
    for _ in range(4):
        with httpx.stream("POST", f"{server.url}/v1/responses", json=body, timeout=60) as answer:
            streamed = "".join(answer.iter_text())
        assert "response.incomplete" in streamed, "it reached its limit"


def test_clients_that_leave_free_what_they_had(server: ServerProcess) -> None:
    body = {"prompt": "Once upon a time", "max_tokens": 900, "ignore_eos": True, "stream": True}
    for _ in range(4):
        with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=60) as answer:
            next(answer.iter_text())
    until(lambda: get(server, "/load")["server_load"] == 0, 2)
    until(lambda: samples(server).get("toolkit:kv_cache_usage_perc") == 0, 2)


def test_a_killed_worker_takes_only_its_own_requests(own_server: StartServer) -> None:
    server = own_server("--api-workers", "2")
    workers, engine = children(server)
    results: list[bool] = []

    def one() -> None:
        try:
            results.append(complete(server, 400).status_code == 200)
        except httpx.TransportError:
            results.append(False)

    threads = [threading.Thread(target=one) for _ in range(8)]
    for worker, other, share in ((*workers, threads[:4]), (*reversed(workers), threads[4:])):
        other.suspend()  # it takes no connection meanwhile
        for thread in share:
            thread.start()
        until(lambda worker=worker: connections(worker) == 4)  # type: ignore[misc]
        other.resume()
    until(lambda: get(server, "/load")["running"] == 8)
    workers[0].kill()
    for thread in threads:
        thread.join()
    assert sorted(results) == [False] * 4 + [True] * 4
    until(lambda: len(children(server)[0]) == 2)
    until(lambda: {complete(server).status_code for _ in range(4)} == {200})
    assert children(server)[1] == engine
    until(lambda: samples(server).get("toolkit:kv_cache_usage_perc") == 0)

    engine.kill()
    until(lambda: complete(server).status_code == 200)
    assert children(server)[1] != engine

    everyone = [*children(server)[0], children(server)[1]]
    os.kill(server.process.pid, signal.SIGKILL)
    server.wait()
    gone, alive = psutil.wait_procs(everyone, timeout=2)
    assert alive == []
    assert len(gone) == 3


def test_it_drains(own_server: StartServer) -> None:
    server = own_server("--api-workers", "2")
    with ThreadPoolExecutor(4) as pool:
        answers = [pool.submit(complete, server, 300) for _ in range(4)]
        until(lambda: get(server, "/load")["running"] == 4)
        assert server.stop() == 0
        assert {each.result().json()["usage"]["completion_tokens"] for each in answers} == {300}


_LATE = "import sys, time\nif 'toolkit.runtime.server.worker' in sys.orig_argv: time.sleep(2)\n"


def test_workers_that_come_after_the_engine_hear_that_it_is_ready(smollm2_plan: Path, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(_LATE)
    path = os.pathsep.join([str(tmp_path), *filter(None, sys.path)])
    server = start_server(smollm2_plan, "--api-workers", "2", PYTHONPATH=path)
    assert httpx.get(f"{server.url}/ready").status_code == 200
    assert server.stop() == 0
