"""What `TOOLKIT_DEBUG` says of an engine's steps: a line a second at level 1, each step at level 2."""

from __future__ import annotations

from collections.abc import Callable

from .debug import debug, debug_level
from .step import StepBatch, StepResult

SECONDS = 1.0
"""How often level 1 speaks."""


class StepLog:
    """Collects steps and tells of them."""

    def __init__(self, clock: Callable[[], float], state: Callable[[], str]) -> None:
        """`state` describes the engine in a few words."""
        self._enabled = debug_level() >= 1
        self._clock, self._state = clock, state
        self._number = 0
        self._forget()

    def _forget(self) -> None:
        self._first, self._began = self._number + 1, self._clock()
        self._tokens, self._kernels = 0, 0.0

    def add(self, batch: StepBatch, result: StepResult) -> None:
        """A step was run."""
        if not self._enabled:
            return
        if self._first > self._number:
            self._began = self._clock() - result.seconds
        self._number += 1
        self._tokens += len(batch.tokens)
        self._kernels += result.seconds
        size = f"{len(batch.tokens)} tokens, {len(batch.context)} sequences, {len(batch.rows)} rows"
        debug(2, f"step {self._number}: {size}, {result.seconds * 1e3:.2f} ms")
        if self._clock() - self._began >= SECONDS:
            self.flush()

    def flush(self) -> None:
        """Tell of the steps since the last line: to be called when no request is left."""
        if self._first <= self._number:
            seconds = self._clock() - self._began
            debug(
                1,
                f"steps {self._first} to {self._number}: {self._tokens} tokens in {seconds:.2f} s, "
                f"{self._kernels:.2f} s of it in kernels; {self._state()}",
            )
        self._forget()
