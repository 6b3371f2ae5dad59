"""An engine that sleeps holds no memory, ends what ran, and lets wait what comes."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from unit.runtime.engine_harness import Output, alone, depth, device_of, make_engine, make_request, run
from unit.runtime.fake_device import fake_plan

from toolkit.runtime.options import EngineOptions
from toolkit.runtime.process import ProcessEngine
from toolkit.runtime.request import Finished, Stats, Tokens

__all__ = ["depth"]
REQUEST = make_request("x", range(10, 40), max_tokens=12, ignore_eos=True)


@pytest.mark.usefixtures("depth")
def test_outputs_after_sleep_are_those_before() -> None:
    engine = make_engine()
    expected = alone(REQUEST).result
    assert run(engine, [REQUEST])["x"].result == expected
    engine.sleep()
    assert device_of(engine).asleep
    assert engine.stats().asleep == ("weights", "kv_cache")
    engine.wake_up()
    hits = engine.stats().prefix_hits
    assert run(engine, [REQUEST])["x"].result == expected
    assert engine.stats().prefix_hits == hits, "what was cached is gone"


@pytest.mark.usefixtures("depth")
def test_sleep_ends_what_runs_and_later_requests_wait() -> None:
    engine = make_engine()
    outputs = {"x": Output(), "y": Output()}
    engine.add(REQUEST)
    for _ in range(4):
        for event in engine.step():
            assert not isinstance(event, Stats)
            outputs["x"].take(event)
    engine.sleep()
    engine.sleep()
    for event in engine.step():
        assert not isinstance(event, Stats)
        outputs["x"].take(event)
    assert outputs["x"].finished is not None
    assert outputs["x"].finished.reason == "abort"
    assert engine.audit() == []
    later = make_request("y", range(10, 40), max_tokens=12, ignore_eos=True)
    engine.add(later)
    assert not engine.has_work
    assert engine.step() == []
    engine.wake_up(["weights"])
    assert device_of(engine).asleep
    assert not engine.has_work
    engine.wake_up(["kv_cache"])
    assert not device_of(engine).asleep
    while engine.has_work:
        for event in engine.step():
            assert not isinstance(event, Stats)
            outputs["y"].take(event)
    assert outputs["y"].result == alone(later).result


def test_an_engine_process_sleeps_and_wakes() -> None:
    async def body() -> None:
        engine = ProcessEngine(Path("quick"), fake_plan(), EngineOptions(), child="unit.runtime.fake_child")
        await engine.sleep()
        assert (await engine.stats()).asleep == ("weights", "kv_cache")
        events = []

        async def read() -> None:
            events.extend([event async for event in engine.generate(REQUEST)])

        reader = asyncio.create_task(read())
        await asyncio.sleep(0.05)
        assert not events
        await engine.wake_up(["kv_cache"])
        assert (await engine.stats()).asleep == ("weights",)
        await engine.wake_up()
        await reader
        tokens = [token for event in events if isinstance(event, Tokens) for token in event.tokens]
        assert tokens == alone(REQUEST).tokens
        assert isinstance(events[-1], Finished)
        await engine.close()

    asyncio.run(body())
