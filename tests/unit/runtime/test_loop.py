"""The engine's loop, driven by hand."""

from __future__ import annotations

from dataclasses import dataclass, field

from unit.runtime.engine_harness import PLENTY
from unit.runtime.fake_device import FakeDevice, fake_plan

from toolkit.runtime.engine import Engine
from toolkit.runtime.loop import run_loop
from toolkit.runtime.options import EngineOptions
from toolkit.runtime.request import Command, Event, Ping, Shutdown, Stats


@dataclass
class QuietPort:
    """A minute passes before each batch of commands."""

    commands: list[list[Command]]
    now: float = 100.0
    events: list[Event] = field(default_factory=list)

    def receive(self, timeout: float) -> list[Command]:
        self.now += 60.0
        return self.commands.pop(0)

    def send(self, events: list[Event]) -> None:
        self.events += events


def test_an_idle_engine_is_alive() -> None:
    port = QuietPort([[], [Ping(1)], [], [Ping(2)], [Shutdown()]])
    run_loop(Engine(FakeDevice(fake_plan(), PLENTY), EngineOptions(), clock=lambda: port.now), port)
    answers = [event for event in port.events if isinstance(event, Stats) and event.number]
    assert [(stats.number, stats.last_step) for stats in answers] == [(1, 0.0), (2, 0.0)]
