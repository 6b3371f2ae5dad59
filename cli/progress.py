"""Progress of a compilation: phases with their times, and how far the long ones are."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn

from ..runtime.debug import debug


class Phases:
    """Times phases and tells `TOOLKIT_DEBUG=1` about them; subclasses show them."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        """Duration of each phase that has ended, in order."""
        self.notes: list[str] = []
        """What was measured on the way, a sentence each: no part of the plan, which has the same bytes each time."""

    def __enter__(self) -> Phases:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop showing."""

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """A phase of the work, e.g. "Capture"."""
        began = time.perf_counter()
        self.begin(name)
        yield
        self.seconds[name] = time.perf_counter() - began
        self.end(name)
        debug(1, f"{name}: {self.seconds[name]:.2f} s")

    def begin(self, name: str) -> None:
        """A phase starts."""

    def advance(self, what: str, done: int, total: int) -> None:
        """The running phase has done so much, and is at `what`."""

    def end(self, name: str) -> None:
        """A phase is done."""


class TerminalPhases(Phases):
    """Shows a line a phase on a terminal: a spinner or bar while it runs, then its time."""

    def __init__(self, console: Console) -> None:
        super().__init__()
        self._progress = Progress(
            SpinnerColumn(finished_text="[green]✓"),
            TextColumn("{task.description:<8}"),
            BarColumn(bar_width=24),
            TimeElapsedColumn(),
            TextColumn("[dim]{task.fields[what]}"),
            console=console,
        )
        self._task: TaskID | None = None

    def __enter__(self) -> Phases:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def begin(self, name: str) -> None:
        self._task = self._progress.add_task(name, total=None, what="")

    def advance(self, what: str, done: int, total: int) -> None:
        if self._task is not None:
            self._progress.update(self._task, completed=done, total=total, what=what[:48])

    def end(self, name: str) -> None:
        if self._task is not None:
            self._progress.update(self._task, completed=1, total=1, what="")
