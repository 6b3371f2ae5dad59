"""The engine process over the fake device. The plan folder's name says how it behaves."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from unit.runtime.fake_device import FakeDevice, fake_plan

from toolkit.runtime.child import main
from toolkit.runtime.device.base import Ticket
from toolkit.runtime.engine import Engine
from toolkit.runtime.errors import DeviceLost, UserError
from toolkit.runtime.options import EngineOptions
from toolkit.runtime.step import StepBatch

STEP_SECONDS = 0.02
LONG_STEP_SECONDS = 1.5
CRASH_TOKEN = 60
"""A prompt that starts with this token kills the process in its first step."""
FAIL_TOKEN = 61
"""A prompt that starts with this token makes its step fail."""
LOST_TOKEN = 62
"""A prompt that starts with this token takes the device with it."""


class SlowDevice(FakeDevice):
    """A fake device whose steps take time."""

    def __init__(self, seconds: float) -> None:
        super().__init__(fake_plan(), pages=100)
        self._seconds = seconds

    def submit(self, batch: StepBatch) -> Ticket:
        first = batch.tokens[batch.positions == 0]
        if CRASH_TOKEN in first:
            os._exit(7)
        if FAIL_TOKEN in first:
            raise RuntimeError("kernel exploded")
        if LOST_TOKEN in first:
            raise DeviceLost("the context is corrupt")
        time.sleep(self._seconds)
        return super().submit(batch)


def open_fake(directory: Path, options: EngineOptions) -> Engine:
    """An engine as the folder's name wants it."""
    name = directory.name
    if name == "refused":
        raise UserError("the plan needs more memory")
    if name == "broken":
        raise RuntimeError("a bug")
    if name == "loading":
        time.sleep(30)
    seconds = {"slow": LONG_STEP_SECONDS, "quick": 0.0}.get(name, STEP_SECONDS)
    return Engine(SlowDevice(seconds), options)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], open_fake))
