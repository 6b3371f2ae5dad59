"""The engine's own loop: commands from a port, events back, until it is told to shut down."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Protocol

from .errors import InternalError
from .request import Abort, Add, Command, Error, Event, Ping, Profile, ResetPrefixCache, Shutdown, Sleep, WakeUp

if TYPE_CHECKING:
    from .engine import Engine

IDLE_SECONDS = 0.5
"""Longest wait for a command, so that the loop turns, and says so, when there is nothing to do."""
REPORT_SECONDS = 0.2
"""The state is sent this often unasked: who waits for an answer during a long step then still knows a recent one."""


class Port(Protocol):
    """The engine's end of a connection to its front end."""

    def receive(self, timeout: float) -> list[Command]:
        """Commands in order; waits up to `timeout` seconds for the first."""

    def send(self, events: list[Event]) -> None:
        """Pass events on, in order. Never blocks."""


def run_loop(engine: Engine, port: Port) -> None:
    """Serve until Shutdown. Raises DeviceLost once the device can run nothing more."""
    closing = False
    reported = time.monotonic()
    while not closing or engine.has_work:
        commands = port.receive(0.0 if engine.has_work else IDLE_SECONDS)
        engine.turn()
        events: list[Event] = []
        for command in commands:
            closing = closing or isinstance(command, Shutdown)
            _apply(engine, command, closing, events)
        if engine.has_work:
            events += engine.step()
        elif not commands:
            events += engine.audit()
        now = time.monotonic()
        if now - reported >= REPORT_SECONDS:
            reported = now
            events.append(engine.stats())
        if events:
            port.send(events)
        if engine.lost is not None:
            raise engine.lost


def _apply(engine: Engine, command: Command, closing: bool, events: list[Event]) -> None:
    match command:
        case Add() if closing:
            events.append(Error(command.request, "the engine is shutting down", user_fault=False))
        case Add():
            try:
                engine.add(command)
            except InternalError as error:
                events.append(Error("", str(error), user_fault=False))
        case Abort():
            engine.abort(command.request)
        case Ping():
            events.append(engine.stats(command.number))
        case Profile():
            events.append(engine.profile(command))
        case ResetPrefixCache():
            engine.reset_prefix_cache()
        case Sleep():
            engine.sleep()
        case WakeUp():
            engine.wake_up(command.tags)
        case Shutdown(drain=False):
            engine.abort_all()
