"""The device interface: all the engine knows of what executes a plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from ..errors import InternalError
from ..plan import Bucket, Plan
from ..step import StepBatch, StepResult


@dataclass(frozen=True)
class Ticket:
    """A submitted step. Tickets of a device are numbered in order of submission and retire in that order."""

    number: int


class Device(Protocol):
    """Executes steps of one plan. Calls marked *(state)* change caches or weights; the others only read.

    Steps and copies of pages take effect in the order of these calls.

    One thread at a time may call it.
    """

    plan: Plan
    isa: str
    """Instruction set of the kernels it runs, e.g. `x86-64-v4`."""
    pages: tuple[int, ...]
    """Pages of each cache group, the trash page (id 0) included."""
    queue_depth: int
    """Steps that may be submitted before the first must be polled: 1 on CPU, 2 on a GPU."""

    def submit(self, batch: StepBatch) -> Ticket:
        """Queue a step *(state)*. If the step before may still run, a negative token -1 - r is what that one draws for
        its row r. Raises InternalError if the batch exceeds every bucket or a page is out of range."""

    def poll(self, ticket: Ticket) -> StepResult | None:
        """The result, or None if the step is still running. Its arrays are valid until `queue_depth` more submits."""

    def wait(self, ticket: Ticket) -> StepResult:
        """Block until the step is done. Raises InternalError if it failed."""

    def copy_pages(self, group: int, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy pages (source, destination) over all layers of a group *(state)*."""

    def profile(self, batch: StepBatch) -> tuple[Ticket, npt.NDArray[np.float64]]:
        """Run a step *(state)*; its ticket, and seconds [launches, 1 + threads]: of the whole launch, then of each
        thread at work."""

    def memory(self) -> dict[str, int]:
        """Bytes held, by kind: weights, arena, kv, host, and on a CPU interpreter, what the process held before."""

    def sleep(self) -> None:
        """Give back the memory of weights, caches and activations; only `wake` and `close` may follow. No step may be
        in flight *(state)*."""

    def wake(self) -> None:
        """Take the memory again and load the weights; caches are empty *(state)*. Raises UserError if that fails."""

    def close(self) -> None:
        """Release everything; further calls are errors."""


def find_bucket(plan: Plan, batch: StepBatch) -> Bucket:
    """The first bucket that a batch fits. Raises InternalError if it exceeds all."""
    size = (len(batch.tokens), len(batch.context), len(batch.rows))
    for bucket in plan.buckets:
        if bucket.fits(*size):
            return bucket
    raise InternalError(f"no bucket fits a step of {size[0]} tokens, {size[1]} sequences and {size[2]} rows")
