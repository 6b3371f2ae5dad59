"""A profile of the engine while it serves: phases of steps and their launches, as a trace for Chrome or Perfetto.

https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU describes the format.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec

from .device.base import Ticket, find_bucket
from .step import StepBatch

if TYPE_CHECKING:
    from .engine import Engine

MAX_EVENTS = 300_000
"""Where a trace ends, whatever was asked for: some 40 MB."""
ENGINE, LAUNCHES, THREADS = 1, 2, 10
"""Tracks: what the host does, the launches of a step, and from here on each kernel thread."""


class Profiler:
    """Wraps what a turn of the engine calls, for so many steps. While it does, each launch of a step is timed on its
    own (`Device.profile`), which makes steps slower; afterwards the engine is as it was."""

    def __init__(self, engine: Engine, steps: int) -> None:
        self._engine = engine
        self._left = steps
        self._began = time.perf_counter()
        self._wrapped: list[tuple[object, str]] = []
        self._threads = 0
        self._events: list[dict[str, Any]] = []
        self._wrap(engine, "step", "step")
        self._wrap(engine, "_schedule", "schedule")
        self._wrap(engine._batches, "build", "build")
        self._wrap(engine.device, "submit", "submit", self._submit)
        self._wrap(engine.device, "wait", "wait")
        self._wrap(engine, "_update", "update")

    def stop(self) -> bytes:
        """End the recording, if it has not ended by itself; the trace as JSON."""
        self._unwrap()
        names = {ENGINE: "engine", LAUNCHES: "launches"}
        names |= {THREADS + thread: f"thread {thread}" for thread in range(self._threads)}
        tracks = [
            {"name": "thread_name", "ph": "M", "pid": 1, "tid": track, "args": {"name": name}}
            for track, name in names.items()
        ]
        plan, device = self._engine.plan, self._engine.device
        about = {"model": plan.model.name, "plan": plan.content_digest, "target": plan.target, "isa": device.isa}
        return msgspec.json.encode({"traceEvents": tracks + self._events, "displayTimeUnit": "ms", "otherData": about})

    # --- recording ----------------------------------------------------------------------------------------------------

    def _wrap(self, owner: object, name: str, phase: str, function: Callable[..., Any] | None = None) -> None:
        call = function or getattr(owner, name)

        def timed(*args: Any, **named: Any) -> Any:
            began = time.perf_counter()
            try:
                return call(*args, **named)
            finally:
                self._add(phase, ENGINE, began, time.perf_counter() - began)

        setattr(owner, name, timed)
        self._wrapped.append((owner, name))

    def _unwrap(self) -> None:
        for owner, name in self._wrapped:
            delattr(owner, name)
        self._wrapped.clear()

    def _add(self, name: str, track: int, began: float, seconds: float, **args: object) -> None:
        event = {
            "name": name,
            "ph": "X",
            "pid": 1,
            "tid": track,
            "ts": (began - self._began) * 1e6,
            "dur": seconds * 1e6,
        }
        self._events.append({**event, "args": args} if args else event)

    def _submit(self, batch: StepBatch) -> Ticket:
        """Run a step with its launches timed; they are shown one after the other from its begin on."""
        began = moment = time.perf_counter()
        ticket, times = self._engine.device.profile(batch)
        for launch, (seconds, *busy) in zip(
            find_bucket(self._engine.plan, batch).launches, times.tolist(), strict=False
        ):
            self._add(launch.op, LAUNCHES, moment, seconds, kernel=launch.kernel)
            for thread, each in enumerate(busy):
                self._add(launch.op, THREADS + thread, moment, each)
            self._threads = max(self._threads, len(busy))
            moment += seconds
        size = {"tokens": len(batch.tokens), "sequences": len(batch.context), "rows": len(batch.rows)}
        self._add("run", ENGINE, began, time.perf_counter() - began, **size)
        self._left -= 1
        if not self._left or len(self._events) > MAX_EVENTS:
            self._unwrap()
        return ticket
