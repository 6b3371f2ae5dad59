"""Passes and their runner: verify, report, dump and check after each."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from ..runtime.errors import InternalError
from ..runtime.plan import PassReport
from .check import Check, Progress
from .ir import Graph
from .text import print_graph
from .verify import verify


@dataclass(frozen=True)
class Outcome:
    """What a pass made of a graph."""

    graph: Graph
    matches: int
    """Places that it changed."""
    notes: tuple[str, ...] = ()
    """What it could not do, one sentence each."""


class Pass(ABC):
    """A function from graph to graph. Passes are frozen dataclasses whose fields are their options."""

    name: ClassVar[str]
    encodes: ClassVar[bool] = False
    """Whether the pass chooses how weights are stored, and so rounds them."""

    @abstractmethod
    def run(self, graph: Graph) -> Outcome:
        """Transform the graph. Running a pass on its own result changes nothing."""

    def __call__(self, graph: Graph) -> Graph:
        """The transformed graph."""
        return self.run(graph).graph


def run_passes(
    graph: Graph,
    passes: Sequence[Pass],
    *,
    check: bool = False,
    dump: Path | None = None,
    progress: Progress | None = None,
) -> tuple[Graph, tuple[PassReport, ...]]:
    """Run passes in order; the graph is verified before the first and after each.

    `check` interprets the graph before and after each pass on random inputs (`check.Check`). `dump` is a directory that
    gets the graph as text, `00-captured.txt` and then one file a pass. `progress` is told which pass runs, or which op
    is interpreted. Raises InternalError, naming the pass, those before it and the op, where a pass breaks the graph or
    changes what it computes.
    """
    verify(graph)
    checker = Check(graph, progress) if check else None
    reports: list[PassReport] = []
    _dump(graph, dump, 0, "captured")
    for number, each in enumerate(passes, 1):
        if progress is not None:
            progress(each.name, number - 1, len(passes))
        began = time.perf_counter()
        outcome = each.run(graph)
        seconds = time.perf_counter() - began
        _dump(outcome.graph, dump, number, each.name)
        try:
            verify(outcome.graph)
            if checker is not None and (difference := checker.follow(outcome.graph, encodings_change=each.encodes)):
                raise InternalError(difference)
        except InternalError as error:
            before = ", ".join(report.name for report in reports) or "none"
            raise InternalError(f"pass {each.name} (after: {before}): {error}") from error
        counts = {"ops_before": len(graph.ops), "ops_after": len(outcome.graph.ops)}
        reports.append(PassReport(each.name, outcome.matches, **counts, seconds=seconds, notes=outcome.notes))
        graph = outcome.graph
    return graph, tuple(reports)


def _dump(graph: Graph, directory: Path | None, number: int, name: str) -> None:
    if directory is not None:
        directory.mkdir(parents=True, exist_ok=True)
        (directory / f"{number:02}-{name}.txt").write_text(print_graph(graph))
