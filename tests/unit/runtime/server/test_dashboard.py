"""The Grafana dashboard: its expressions are PromQL, and ask for what `/metrics` has."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import promql_parser
import pytest
from prometheus_client.parser import text_string_to_metric_families
from unit.runtime.server.fakes import make_plan

from toolkit.runtime.request import Stats
from toolkit.runtime.server.metrics import Metrics

FILE = Path(__file__).parents[4] / "docs/grafana/toolkit.json"
DASHBOARD: dict[str, Any] = json.loads(FILE.read_text())
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
EXPRESSIONS = [target["expr"] for panel in PANELS for target in panel["targets"]]
SCRAPED = {"instance", "job"}
"""Labels that Prometheus adds."""


def exposed() -> dict[str, set[str]]:
    """The names of samples, each with its labels."""
    stats = Stats(0, 0, 0, 0.0, 0, 0, 0, 0, 0, 0, 0.0, spec_accepted_per_position=(0, 0))
    found: dict[str, set[str]] = defaultdict(set)
    for family in text_string_to_metric_families(Metrics(make_plan(), "m").text(stats)):
        for sample in family.samples:
            found[sample.name] |= sample.labels.keys()
    return found


EXPOSED = exposed()


def selectors(node: Any) -> Iterator[promql_parser.VectorSelector]:
    """All selectors below an expression."""
    if isinstance(node, promql_parser.VectorSelector):
        yield node
    elif isinstance(node, promql_parser.MatrixSelector):
        yield from selectors(node.vector_selector)
    elif isinstance(node, promql_parser.BinaryExpr):
        yield from selectors(node.lhs)
        yield from selectors(node.rhs)
    elif isinstance(node, promql_parser.Call):
        for each in node.args:
            yield from selectors(each)
    elif isinstance(node, promql_parser.AggregateExpr | promql_parser.ParenExpr):
        yield from selectors(node.expr)
    else:
        assert isinstance(node, promql_parser.NumberLiteral), type(node)


@pytest.mark.parametrize("expression", dict.fromkeys(EXPRESSIONS))
def test_what_a_panel_asks_for_is_there(expression: str) -> None:
    parsed = promql_parser.parse(expression.replace("$__rate_interval", "1m"))
    found = list(selectors(parsed))
    assert found
    for each in found:
        assert each.name in EXPOSED
        assert {matcher.name for matcher in each.matchers.matchers} <= EXPOSED[each.name] | SCRAPED
    for labels in re.findall(r"by \((\w+)\)", expression):
        assert labels in EXPOSED[str(found[0].name)]


def test_every_metric_is_on_it() -> None:
    """But for what tells nothing more."""
    asked = {re.sub(r"_(bucket|sum|count)$", "", name) for name in re.findall(r"toolkit:\w+", " ".join(EXPRESSIONS))}
    assert {re.sub(r"_(bucket|sum|count)$", "", name) for name in EXPOSED} == asked


def test_a_wrong_name_or_query_would_be_noticed() -> None:
    with pytest.raises(ValueError, match="unclosed"):
        promql_parser.parse("sum(rate(toolkit:x[1m])")
    assert "toolkit:num_requests_runing" not in EXPOSED


def test_its_frame() -> None:
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])
    places = [panel["gridPos"] for panel in DASHBOARD["panels"]]
    cells = [
        (x, y)
        for place in places
        for x in range(place["x"], place["x"] + place["w"])
        for y in range(place["y"], place["y"] + place["h"])
    ]
    assert len(cells) == len(set(cells)), "panels overlap"
    assert max(x for x, _ in cells) < 24
    variables = {each["name"]: each for each in DASHBOARD["templating"]["list"]}
    assert set(re.findall(r"\$\{?([a-z]\w*)", FILE.read_text())) == variables.keys()
    for name in ("model_name", "instance"):
        assert variables[name]["query"]["query"] == f"label_values(toolkit:num_requests_running, {name})"
    for panel in PANELS:
        assert panel["title"]
        assert all(target["datasource"]["uid"] == "${datasource}" for target in panel["targets"])
