"""Rewriting: replacement in place, forwarding, names of outputs, dead ops, order, and rules that do not end."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from toolkit.compiler.interpret import interpret
from toolkit.compiler.ir import Graph, Value
from toolkit.compiler.op_spec import Packing
from toolkit.compiler.ops import GraphBuilder, make_op
from toolkit.compiler.rewrite import Match, Mismatch, Replacement, Rule, rewrite
from toolkit.compiler.shapes import Sym
from toolkit.compiler.verify import verify
from toolkit.runtime.errors import InternalError

T = Sym("T", 8)


def chain(*kinds: str) -> Graph:
    """Activations in a row."""
    build = GraphBuilder()
    x = build.input("x", "float32", (T, 4))
    for kind in kinds:
        x = build.op("activation", x, kind=kind, name=kind)
    return build.build(x)


def double_negation(match: Match) -> Replacement | None:
    if match.op.attrs["kind"] != "neg" or match.labeled("inner").attrs["kind"] != "neg":
        return None
    return Replacement(forward={match.op.output.name: match["x"]})


NEGATIONS = (Rule("activation(inner:activation(x))", "x", double_negation),)


def test_forwarding_removes_both_ops_and_keeps_the_outputs_name() -> None:
    graph = chain("relu", "neg", "neg")
    outcome = rewrite(graph, NEGATIONS)
    (op,) = outcome.graph.ops
    assert (op.attrs["kind"], op.output.name, outcome.matches) == ("relu", graph.outputs[0].name, 1)
    verify(outcome.graph)


def test_forwarding_to_an_input_changes_the_output() -> None:
    outcome = rewrite(chain("neg", "neg"), NEGATIONS)
    assert outcome.graph.ops == ()
    assert outcome.graph.outputs == outcome.graph.inputs


def test_rules_meet_their_own_results() -> None:
    outcome = rewrite(chain(*["neg"] * 7), NEGATIONS)
    assert len(outcome.graph.ops) == 1
    assert outcome.matches == 3


def test_a_new_op_takes_the_name_and_the_place() -> None:
    def clamp(match: Match) -> Replacement | None:
        if match.op.attrs["kind"] != "relu":
            return None
        return Replacement((make_op("clamp", [match["x"]], [match.op.output.name], {"low": 0.0}),))

    outcome = rewrite(chain("exp", "relu", "neg"), [Rule("activation(x)", "clamp(x)", clamp)])
    assert [op.kind for op in outcome.graph.ops] == ["activation", "clamp", "activation"]
    assert [op.output.name for op in outcome.graph.ops] == ["exp", "relu", "neg"]


def test_removing_what_is_read_is_an_error() -> None:
    build = GraphBuilder()
    x = build.input("x", "float32", (T, 4))
    total, normed = build.ops("add_norm", x, x, eps=1.0, has_weight=False, names=("total", "normed"))
    graph = build.build(total, normed)

    def careless(match: Match) -> Replacement | None:
        attrs = {"eps": 1.0, "has_weight": False}
        return Replacement((make_op("norm", [match["x"]], [match.op.outputs[1].name], attrs),))

    with pytest.raises(InternalError, match="a rule removed add_norm %total, which is still read"):
        rewrite(graph, [Rule("add_norm(x, _)", "norm(x)", careless)])


def test_an_endless_rule_is_an_error() -> None:
    def again(match: Match) -> Replacement | None:
        op = match.op
        return Replacement((make_op(op.kind, op.inputs, [op.output.name], op.attrs),))

    with pytest.raises(InternalError, match="rewriting does not end: a rule for activation keeps matching"):
        rewrite(chain("neg"), [Rule("any(*_)", "the same", again)])


def test_the_first_rule_that_applies_is_taken() -> None:
    def becomes(kind: str) -> Rule:
        def build(match: Match) -> Replacement | None:
            if match.op.attrs["kind"] != "neg":
                return None
            return Replacement((make_op("activation", [match["x"]], [match.op.output.name], {"kind": kind}),))

        return Rule("activation(x)", kind, build)

    outcome = rewrite(chain("neg", "exp"), [becomes("tanh"), becomes("relu")])
    assert [op.attrs["kind"] for op in outcome.graph.ops] == ["tanh", "exp"]


def test_only_mismatches_that_are_left_in_the_end_are_reported() -> None:
    def unread(match: Match) -> Replacement | None:
        if match.op.attrs["kind"] != "relu":
            return None
        if readers := match.work.users(match.op.output):
            raise Mismatch(f"{readers[0].output.name} reads it")
        return Replacement((make_op("clamp", [match["x"]], [match.op.output.name], {"low": 0.0}),))

    rules = (*NEGATIONS, Rule("activation(x)", "clamp(x)", unread, "it is not clamped"))
    assert rewrite(chain("relu", "neg", "neg"), rules).notes == ()
    assert rewrite(chain("relu", "neg"), rules).notes == ("relu: it is not clamped: neg reads it",)
    assert rewrite(chain("relu", "neg"), [Rule("activation(x)", "clamp(x)", unread)]).notes == ()


def test_dead_ops_and_params_vanish() -> None:
    build = GraphBuilder()
    x = build.input("x", "float32", (T, 4))
    build.op("mul", x, build.param("unused", (4,)))
    graph = build.build(build.op("activation", x, kind="exp"), build.op("activation", x, kind="relu"))
    outcome = rewrite(graph, ())
    assert [op.kind for op in outcome.graph.ops] == ["activation", "activation"]
    assert outcome.graph.params == ()


@st.composite
def graphs(draw: st.DrawFn) -> Graph:
    """Random graphs of negations, sums and exps with shared values and several outputs."""
    build = GraphBuilder()
    values: list[Value] = [build.input("x", "float32", (T, 4))]
    for _ in range(draw(st.integers(1, 12))):
        a, b = draw(st.sampled_from(values)), draw(st.sampled_from(values))
        kind = draw(st.sampled_from(["neg", "neg", "tanh", "add"]))
        values.append(build.op("add", a, b) if kind == "add" else build.op("activation", a, kind=kind))
    return build.build(*draw(st.lists(st.sampled_from(values), min_size=1, max_size=4, unique=True)))


@settings(max_examples=150, deadline=None)
@given(graphs())
def test_rewriting_keeps_random_graphs_legal_and_equal(graph: Graph) -> None:
    inputs = {"x": np.random.default_rng(1).standard_normal((3, 4)).astype(np.float32)}
    packing = Packing((0, 3), (3,), (0,))
    outcome = rewrite(graph, NEGATIONS)
    verify(outcome.graph)
    expected = interpret(graph, inputs, {}, packing=packing)
    found = interpret(outcome.graph, inputs, {}, packing=packing)
    for old, new in zip(graph.outputs, outcome.graph.outputs, strict=True):
        np.testing.assert_array_equal(found[new.name], expected[old.name])
    assert rewrite(outcome.graph, NEGATIONS).graph == outcome.graph
