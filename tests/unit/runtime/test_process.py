"""The engine behind a client: in a process of its own and in a thread."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager
from pathlib import Path

import pytest
from unit.runtime.engine_harness import alone, make_request
from unit.runtime.fake_child import CRASH_TOKEN, FAIL_TOKEN, LONG_STEP_SECONDS, LOST_TOKEN, SlowDevice
from unit.runtime.fake_device import fake_plan

from toolkit.runtime.client import AsyncEngine, EngineClient, Stream, ThreadEngine
from toolkit.runtime.engine import Engine
from toolkit.runtime.errors import InternalError, UserError
from toolkit.runtime.loop import IDLE_SECONDS
from toolkit.runtime.options import EngineOptions
from toolkit.runtime.process import RESTARTS, ProcessEngine
from toolkit.runtime.request import Add, Error, Event, Finished, Tokens

CHILD = "unit.runtime.fake_child"
KINDS = ("thread", "process")


def spawn(name: str = "plan") -> ProcessEngine:
    return ProcessEngine(Path(name), fake_plan(), EngineOptions(), child=CHILD)


@asynccontextmanager
async def opened(kind: str, name: str = "plan") -> AsyncIterator[EngineClient]:
    engine: EngineClient
    if kind == "process":
        engine = spawn(name)
    else:
        seconds = LONG_STEP_SECONDS if name == "slow" else 0.02
        engine = ThreadEngine(Engine(SlowDevice(seconds), EngineOptions()))
    try:
        yield engine
    finally:
        await engine.close()


async def collect(engine: AsyncEngine, request: Add) -> list[Event]:
    async with aclosing(engine.generate(request)) as events:
        return [event async for event in events]


def tokens_of(events: list[Event]) -> list[int]:
    return [token for event in events if isinstance(event, Tokens) for token in event.tokens]


async def until(condition: Callable[[], Awaitable[bool]], seconds: float = 10.0) -> None:
    async with asyncio.timeout(seconds):
        while not await condition():
            await asyncio.sleep(0.01)


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


# --- requests ---------------------------------------------------------------------------------------------------------


async def _generates(kind: str) -> None:
    requests = [
        make_request(str(index), range(5 + index, 20), max_tokens=6, logprobs=2, prompt_logprobs=-1)
        for index in range(5)
    ]
    async with opened(kind) as engine:
        outputs = await asyncio.gather(*(collect(engine, request) for request in requests))
        for request, events in zip(requests, outputs, strict=True):
            expected = alone(request)
            assert tokens_of(events) == expected.tokens
            logprobs = [entry for event in events if isinstance(event, Tokens) for entry in event.logprobs or ()]
            assert logprobs == expected.logprobs
            assert isinstance(events[0], Tokens)
            assert events[0].prompt_logprobs == expected.prompt_logprobs
            assert isinstance(events[-1], Finished)


@pytest.mark.parametrize("kind", KINDS)
def test_generates(kind: str) -> None:
    asyncio.run(_generates(kind))


@pytest.mark.parametrize("kind", KINDS)
def test_a_refusal_is_the_last_event(kind: str) -> None:
    async def body() -> None:
        async with opened(kind) as engine:
            (error,) = await collect(engine, make_request("x", []))
            assert isinstance(error, Error)
            assert error.user_fault

    asyncio.run(body())


@pytest.mark.parametrize("kind", KINDS)
def test_closing_the_stream_aborts(kind: str) -> None:
    async def body() -> None:
        async with opened(kind) as engine:
            async with aclosing(engine.generate(make_request("x", [5, 6], max_tokens=60, ignore_eos=True))) as events:
                await anext(events)
                assert (await engine.stats()).running == 1
            closed = time.monotonic()

            async def is_free() -> bool:
                stats = await engine.stats()
                return stats.running == 0 and stats.kv_usage == 0.0

            await until(is_free)
            assert time.monotonic() - closed < 1.0

            async def id_is_free() -> bool:
                try:
                    return bool(await collect(engine, make_request("x", [5], max_tokens=1)))
                except UserError:
                    return False

            await until(id_is_free)

    asyncio.run(body())


@pytest.mark.parametrize("kind", KINDS)
def test_an_id_can_be_used_once_at_a_time(kind: str) -> None:
    async def body() -> None:
        async with opened(kind) as engine, aclosing(engine.generate(make_request("x", [5], max_tokens=50))) as events:
            await anext(events)
            with pytest.raises(UserError, match="in use"):
                await collect(engine, make_request("x", [6]))

    asyncio.run(body())


def test_a_slow_reader_gets_merged_tokens() -> None:
    async def body() -> None:
        stream = Stream()
        for token in range(5):
            stream.push(Tokens("x", [token], [], None))
        stream.push(Finished("x", "length"))
        first, second = await stream.next(), await stream.next()
        assert isinstance(first, Tokens)
        assert first.tokens == [0, 1, 2, 3, 4]
        assert isinstance(second, Finished)

    asyncio.run(body())


@pytest.mark.parametrize("kind", KINDS)
def test_event_loops_may_follow_one_another(kind: str) -> None:
    request = make_request("x", [5, 6, 7])
    engine: EngineClient = spawn() if kind == "process" else ThreadEngine(Engine(SlowDevice(0.0), EngineOptions()))
    for _ in range(2):
        assert tokens_of(asyncio.run(collect(engine, request))) == alone(request).tokens
    asyncio.run(engine.close())


# --- state ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_stats_and_prefix_reset(kind: str) -> None:
    async def body() -> None:
        async with opened(kind) as engine:
            for hits in (0, 8, 8):
                await collect(engine, make_request("x", range(5, 15)))
                stats = await engine.stats()
                assert stats.prefix_hits == hits
                assert stats.last_step < 1.0
                if hits:
                    await engine.reset_prefix_cache()

    asyncio.run(body())


@pytest.mark.parametrize("kind", KINDS)
def test_an_idle_engine_turns_too(kind: str) -> None:
    async def body() -> None:
        async with opened(kind) as engine:
            await engine.ready()
            await asyncio.sleep(3 * IDLE_SECONDS)
            assert (await engine.stats()).last_step < 2 * IDLE_SECONDS

    asyncio.run(body())


@pytest.mark.parametrize("kind", KINDS)
def test_stats_answer_during_a_long_step(kind: str) -> None:
    async def body() -> None:
        async with opened(kind, "slow") as engine:
            await engine.ready()
            async with aclosing(engine.generate(make_request("x", [5], max_tokens=3, ignore_eos=True))) as events:
                task = asyncio.ensure_future(anext(events))
                await asyncio.sleep(0.1)
                asked = time.monotonic()
                stats = await engine.stats()
                assert time.monotonic() - asked < LONG_STEP_SECONDS - 0.3
                assert 0.1 < stats.last_step < 1.0
                await task

    asyncio.run(body())


# --- the end ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("drain", [False, True])
def test_close(kind: str, drain: bool) -> None:
    async def body() -> None:
        async with opened(kind) as engine:
            request = make_request("x", [5, 6], max_tokens=20, ignore_eos=True)
            task = asyncio.create_task(collect(engine, request))
            await engine.ready()
            await asyncio.sleep(0.1)
            await engine.close(drain=drain)
            events = await task
            last = events[-1]
            assert isinstance(last, Finished)
            assert last.reason == ("length" if drain else "abort")
            with pytest.raises(InternalError, match="closed"):
                await engine.stats()
            (after,) = await collect(engine, make_request("y", [5]))
            assert isinstance(after, Error)

    asyncio.run(body())


@pytest.mark.parametrize(
    ("name", "kind", "words"), [("refused", UserError, "memory"), ("broken", InternalError, "bug")]
)
def test_a_failed_start_says_why(name: str, kind: type[Exception], words: str) -> None:
    async def body() -> None:
        async with opened("process", name) as engine:
            with pytest.raises(kind, match=words):
                await engine.ready()
            (event,) = await collect(engine, make_request("x", [5]))
            assert isinstance(event, Error)
            assert not event.user_fault
            with pytest.raises(InternalError, match=words):
                await engine.stats()

    asyncio.run(body())


def test_closing_while_loading_does_not_wait() -> None:
    async def body() -> None:
        engine = spawn("loading")
        started = time.monotonic()
        await engine.close()
        assert time.monotonic() - started < 5.0

    asyncio.run(body())


def test_a_failed_step_ends_its_requests_and_serving_goes_on() -> None:
    async def body() -> None:
        async with opened("process") as engine:
            (error,) = await collect(engine, make_request("bad", [FAIL_TOKEN, 5]))
            assert isinstance(error, Error)
            assert "kernel exploded" in error.message
            good = make_request("good", [5, 6])
            assert tokens_of(await collect(engine, good)) == alone(good).tokens

    asyncio.run(body())


WORDS = {"killed": "SIGKILL", "exits": "code 7", "lost": "the context is corrupt"}


@pytest.mark.parametrize("how", list(WORDS))
def test_death_is_reported_to_every_open_request_and_the_engine_comes_back(
    how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    async def body() -> None:
        engine = spawn()
        requests = [make_request(str(index), [5, 6 + index], max_tokens=60, ignore_eos=True) for index in range(3)]
        tasks = [asyncio.create_task(collect(engine, request)) for request in requests]
        await engine.ready()
        await asyncio.sleep(0.1)
        if how == "killed":
            os.kill(engine.pid, signal.SIGKILL)
        else:
            token = CRASH_TOKEN if how == "exits" else LOST_TOKEN
            tasks.append(asyncio.create_task(collect(engine, make_request("crash", [token]))))
        dead = engine.pid
        async with asyncio.timeout(5.0):
            outputs = await asyncio.gather(*tasks)
        for events in outputs:
            last = events[-1]
            assert isinstance(last, Error)
            assert not last.user_fault
            assert WORDS[how] in last.message
        async with asyncio.timeout(5.0):
            await until_restarted(engine, dead)
            request = make_request("again", [5, 6], max_tokens=5)
            assert tokens_of(await collect(engine, request)) == alone(request).tokens
            assert (await engine.stats()).running == 0
        await engine.close()
        assert not is_running(engine.pid)
        assert not list(tmp_path.iterdir())

    asyncio.run(body())


def test_requests_wait_for_an_engine_that_comes_back() -> None:
    async def body() -> None:
        async with opened("process") as engine:
            assert isinstance(engine, ProcessEngine)
            await engine.ready()
            dead = engine.pid
            os.kill(dead, signal.SIGKILL)
            await until_restarted(engine, dead)
            assert engine.starting
            request = make_request("early", [5, 6], max_tokens=5)
            assert tokens_of(await collect(engine, request)) == alone(request).tokens

    asyncio.run(body())


def test_an_engine_that_keeps_dying_stays_dead() -> None:
    async def body() -> None:
        async with opened("process") as engine:
            for attempt in range(RESTARTS + 1):
                (error,) = await collect(engine, make_request(str(attempt), [CRASH_TOKEN]))
                assert isinstance(error, Error)
                assert "code 7" in error.message
            async with asyncio.timeout(5.0):
                assert f"{RESTARTS + 1} times within" in str(await engine.failed())
            with pytest.raises(InternalError, match="times within"):
                await engine.stats()
            assert not engine.starting

    asyncio.run(body())


async def until_restarted(engine: ProcessEngine, dead: int) -> None:
    async def restarted() -> bool:
        return engine.pid != dead

    await until(restarted)


def test_one_that_dies_while_it_loads_is_not_started_again() -> None:
    async def body() -> None:
        engine = spawn("loading")
        await asyncio.sleep(0.3)
        os.kill(engine.pid, signal.SIGKILL)
        with pytest.raises(InternalError, match="SIGKILL"):
            await engine.ready()
        await engine.close()

    asyncio.run(body())


@pytest.mark.parametrize("where", ["main thread", "thread that ended"])
def test_the_child_dies_with_its_parent_and_not_before(where: str) -> None:
    """Also when the thread that spawned it ends first."""
    script = textwrap.dedent(
        f"""
        import asyncio, sys, threading, time
        from unit.runtime.test_process import spawn
        engines = []
        if {where == "main thread"}:
            engines.append(spawn())
        else:
            thread = threading.Thread(target=lambda: engines.append(spawn()))
            thread.start()
            thread.join()
        asyncio.run(engines[0].ready())
        print(engines[0].pid, flush=True)
        time.sleep(60)
        """
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, env=environment, text=True)
    assert parent.stdout is not None
    with parent, parent.stdout:
        child = int(parent.stdout.readline())
        time.sleep(1.0)
        assert is_running(child)
        parent.kill()
        deadline = time.monotonic() + 2.0
        while is_running(child):
            assert time.monotonic() < deadline, "the child outlived its parent"
            time.sleep(0.02)


def test_signals_for_the_whole_group_are_left_to_the_parent() -> None:
    async def body() -> None:
        async with opened("process") as engine:
            await engine.ready()
            assert isinstance(engine, ProcessEngine)
            os.kill(engine.pid, signal.SIGINT)
            os.kill(engine.pid, signal.SIGTERM)
            assert isinstance((await collect(engine, make_request("x", [5])))[-1], Finished)

    asyncio.run(body())


def test_nothing_is_left_in_the_temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def body() -> None:
        async with opened("process") as engine:
            await engine.ready()
            assert list(tmp_path.iterdir()) == []

    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    asyncio.run(body())


def test_the_child_imports_little() -> None:
    code = "import sys, toolkit.runtime.child; print(*{name.partition('.')[0] for name in sys.modules})"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, env=environment, text=True)
    loaded = set(result.stdout.split())
    foreign = {name for name in loaded - sys.stdlib_module_names if not name.startswith(("_", "sitecustomize"))}
    # The last two come with msgspec.
    assert foreign <= {"toolkit", "numpy", "msgspec", "typing_extensions", "cython_runtime"}
    assert "asyncio" not in loaded
