"""The pass runner: reports, dumps, verification, and the check that names the pass and the error."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

import pytest

from toolkit.compiler.ir import Graph, Op
from toolkit.compiler.ops import GraphBuilder
from toolkit.compiler.pass_ import Outcome, Pass, run_passes
from toolkit.compiler.shapes import Sym
from toolkit.compiler.text import parse_graph
from toolkit.runtime.errors import InternalError

T = Sym("T", 8)


def graph() -> Graph:
    build = GraphBuilder()
    tokens = build.input("tokens", "int32", (T,))
    build.input("positions", "int32", (T,))
    x = build.op("embedding", build.param("table", (9, 4)), tokens)
    return build.build(build.op("mul", build.op("add", x, scalar=1.0), scalar=3.0, name="out"))


@dataclass(frozen=True)
class Change(Pass):
    """Applies a function to every op."""

    change: Callable[[Op], Op]
    name: ClassVar[str] = "change"

    def run(self, graph: Graph) -> Outcome:
        return Outcome(replace(graph, ops=tuple(map(self.change, graph.ops))), 2, ("something is left",))


def same(op: Op) -> Op:
    return op


def scaled(op: Op) -> Op:
    return replace(op, attrs={**op.attrs, "scalar": 3.001}) if op.kind == "mul" else op


def misspelled(op: Op) -> Op:
    return replace(op, kind="mull") if op.kind == "mul" else op


def test_reports_and_progress() -> None:
    told: list[tuple[str, int, int]] = []
    result, (report,) = run_passes(graph(), [Change(same)], progress=lambda *state: told.append(state))
    assert result == graph()
    assert (report.name, report.matches, report.ops_before, report.ops_after) == ("change", 2, 3, 3)
    assert report.notes == ("something is left",)
    assert report.seconds > 0
    assert told == [("change", 0, 1)]


def test_dumps_are_numbered_and_parse_back(tmp_path: Path) -> None:
    run_passes(graph(), [Change(same), Change(scaled)], dump=tmp_path / "ir")
    names = sorted(path.name for path in (tmp_path / "ir").iterdir())
    assert names == ["00-captured.txt", "01-change.txt", "02-change.txt"]
    assert parse_graph((tmp_path / "ir" / "00-captured.txt").read_text()) == graph()
    assert "scalar = 3.001" in (tmp_path / "ir" / "02-change.txt").read_text()


def test_an_illegal_result_names_the_pass_and_those_before() -> None:
    with pytest.raises(InternalError, match=r"pass change \(after: change\): the graph is illegal:\n.*mull"):
        run_passes(graph(), [Change(same), Change(misspelled)])


def test_the_check_finds_changed_numbers_and_only_then() -> None:
    run_passes(graph(), [Change(scaled)])
    run_passes(graph(), [Change(same)], check=True)
    with pytest.raises(InternalError, match=r"pass change \(after: none\): mul %out: %out changed by up to \d"):
        run_passes(graph(), [Change(scaled)], check=True)
