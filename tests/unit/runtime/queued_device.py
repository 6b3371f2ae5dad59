"""A device that queues steps, around one that runs them at once: what a GPU does, as late as it may.

Nothing is run before it is waited for, so whatever the host changes meanwhile shows if a step depends on it.
"""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from toolkit.runtime.device.base import Device, Ticket
from toolkit.runtime.step import Int32, StepBatch, StepResult


class QueuedDevice:
    """See the module."""

    queue_depth = 2

    def __init__(self, inner: Device) -> None:
        self.inner = inner
        self.plan, self.isa, self.pages = inner.plan, inner.isa, inner.pages
        self.ahead = 0
        """Steps that were submitted while another was in flight."""
        self._queue: deque[tuple[int, Callable[[], None]]] = deque()
        self._submitted = self._retired = 0
        self._results: dict[int, StepResult] = {}
        self._last = np.zeros(0, np.int32)

    def submit(self, batch: StepBatch) -> Ticket:
        assert self._submitted - self._retired < self.queue_depth
        self.ahead += self._submitted > self._retired
        self._submitted += 1
        number, histories = self._submitted, [_history(row) for row in batch.rows]
        self._queue.append((number, lambda: self._run(number, batch, histories)))
        return Ticket(number)

    def _run(self, number: int, batch: StepBatch, histories: list[Int32]) -> None:
        tokens = batch.tokens.copy()
        unknown = tokens < 0
        tokens[unknown] = np.maximum(self._last[-1 - tokens[unknown]], 0)
        rows = batch.rows.copy()
        for row, history in zip(rows, histories, strict=True):
            if len(history):
                history[-1] = tokens[row["token"]]
                row["history"] = history.ctypes.data
        result = self.inner.wait(self.inner.submit(replace(batch, tokens=tokens, rows=rows)))
        self._last = result.rows["token"].copy()
        self._results[number] = StepResult(
            result.rows.copy(), result.top_tokens.copy(), result.top_logprobs.copy(), result.seconds
        )

    def wait(self, ticket: Ticket) -> StepResult:
        self._retired = max(self._retired, ticket.number)
        while self._queue and self._queue[0][0] <= ticket.number:
            self._queue.popleft()[1]()
        return self._results.pop(ticket.number)

    def poll(self, ticket: Ticket) -> StepResult | None:
        return self.wait(ticket)

    def copy_pages(self, group: int, pairs: Sequence[tuple[int, int]]) -> None:
        self._queue.append((self._submitted + 1, lambda: self.inner.copy_pages(group, pairs)))

    def profile(self, batch: StepBatch) -> tuple[Ticket, npt.NDArray[np.float64]]:
        return QueuedDevice.submit(self, batch), np.zeros((0, 2))

    def memory(self) -> dict[str, int]:
        return self.inner.memory()

    def sleep(self) -> None:
        assert not self._queue
        self.inner.sleep()

    def wake(self) -> None:
        self.inner.wake()

    def close(self) -> None:
        self.inner.close()


def _history(row: Any) -> Int32:
    """A copy of a sampling row's history; its last element may be anything."""
    if not row["sample"]:
        return np.zeros(0, np.int32)
    text = ctypes.string_at(int(row["history"]), 4 * int(row["history_length"]))
    return np.frombuffer(text, np.int32).copy()
