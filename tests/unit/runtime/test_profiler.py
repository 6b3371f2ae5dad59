"""Profiling an engine: it serves as before, and afterwards nothing of it is left."""

from __future__ import annotations

import json
from typing import Any

import pytest
from unit.runtime.engine_harness import depth, make_engine, make_requests, run, shared_prompts  # noqa: F401

from toolkit.runtime import profiler
from toolkit.runtime.engine import Engine
from toolkit.runtime.request import Profile

PROMPTS = shared_prompts(6, vocabulary=64, trunk=30, begin=(0, 30), end=(1, 15))


def stop(engine: Engine) -> list[dict[str, Any]]:
    """What was recorded."""
    trace = json.loads(engine.profile(Profile(2, 0)).trace)
    assert trace["otherData"]["target"] == engine.plan.target
    return [each for each in trace["traceEvents"] if each["ph"] == "X"]


def wrapped(engine: Engine) -> list[str]:
    owners = (engine, engine.device, engine._batches)
    return [name for owner in owners for name in vars(owner) if getattr(vars(owner)[name], "__name__", "") == "timed"]


@pytest.mark.usefixtures("depth")
@pytest.mark.parametrize("steps", [1, 5, 1000])
def test_outputs_are_the_same_and_the_engine_is_as_before(steps: int) -> None:
    requests = make_requests(PROMPTS)
    expected = {name: output.result for name, output in run(make_engine(), requests).items()}
    assert all(tokens for tokens, *_ in expected.values())
    engine = make_engine()
    assert not engine.profile(Profile(1, steps)).error
    assert wrapped(engine)
    found = {name: output.result for name, output in run(engine, requests).items()}
    assert found == expected
    assert bool(wrapped(engine)) == (steps == 1000)
    runs = [each for each in stop(engine) if each["name"] == "run"]
    assert len(runs) == min(steps, engine.stats().steps)
    assert not wrapped(engine)


def test_it_is_refused_twice_and_without_a_start() -> None:
    engine = make_engine()
    assert "no profile" in engine.profile(Profile(1, 0)).error
    assert not engine.profile(Profile(2, 5)).error
    assert "already" in engine.profile(Profile(3, 5)).error
    assert stop(engine) == []
    assert not engine.profile(Profile(4, 5)).error


def test_it_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profiler, "MAX_EVENTS", 20)
    engine = make_engine()
    engine.profile(Profile(1, 1000))
    run(engine, make_requests(PROMPTS))
    assert 20 < len(stop(engine)) < 40
