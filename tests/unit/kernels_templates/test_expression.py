"""The expression language: parsing, printing, meaning and C++ text."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from toolkit.kernels_templates.expression import (
    OPERATORS,
    Call,
    Expression,
    Input,
    Number,
    evaluate,
    inputs,
    parse,
    substitute,
    to_cpp,
)

INPUTS = 3
ATOMS = st.builds(Input, st.integers(0, INPUTS - 1)) | st.builds(Number, st.floats(allow_nan=False, width=32))


def _calls(children: st.SearchStrategy[Expression]) -> st.SearchStrategy[Expression]:
    return st.sampled_from(sorted(OPERATORS)).flatmap(
        lambda name: st.builds(Call, st.just(name), st.tuples(*[children] * OPERATORS[name]))
    )


EXPRESSIONS: st.SearchStrategy[Expression] = st.recursive(ATOMS, _calls, max_leaves=8)


@given(EXPRESSIONS)
def test_parse_inverts_printing(expression: Expression) -> None:
    assert parse(str(expression)) == expression


@given(EXPRESSIONS, st.lists(ATOMS, min_size=INPUTS, max_size=INPUTS))
def test_substitution_puts_values_where_inputs_were(expression: Expression, values: list[Expression]) -> None:
    assert substitute(expression, [Input(i) for i in range(INPUTS)]) == expression
    replaced = substitute(expression, values)
    assert inputs(replaced) == set().union(*(inputs(values[i]) for i in inputs(expression)))


@given(EXPRESSIONS)
def test_cpp_calls_each_operator_by_name(expression: Expression) -> None:
    names = [f"x{i}" for i in range(INPUTS)]
    cpp = to_cpp(str(expression), names)
    assert cpp.count("(") == cpp.count(")")
    assert all(name in cpp for name in (names[i] for i in inputs(expression)))
    for operator in OPERATORS:
        assert cpp.count(f"v_{operator}(") == str(expression).count(f"({operator} ")


@pytest.mark.parametrize(
    ("text", "cpp"),
    [
        ("in1", "b"),
        ("(mul (silu in0) in1)", "v_mul(v_silu(a), b)"),
        ("(add in0 1e-05)", "v_add(a, vset(1e-05f))"),
        ("(maximum in0 -inf)", "v_maximum(a, vset(-INFINITY))"),
        ("(where (lt in0 2) inf nan)", "v_where(v_lt(a, vset(2.0f)), vset(INFINITY), vset(NAN))"),
    ],
)
def test_cpp_text(text: str, cpp: str) -> None:
    assert to_cpp(text, ["a", "b"]) == cpp


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "ends too early"),
        ("(add in0", "takes 2"),
        ("(add in0 in1", "takes 2"),
        ("(add in0 in1 in2)", "found 3"),
        ("(frobnicate in0)", "expected an operator"),
        ("in0 in1", "unexpected 'in1'"),
        ("x", "expected inN"),
        (")", "expected inN"),
    ],
)
def test_malformed_text_is_refused(text: str, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        parse(text)


def test_meaning() -> None:
    x, y = np.array([-1.0, 0.5, 3.0], np.float32), np.array([2.0, 2.0, -2.0], np.float32)
    np.testing.assert_array_equal(evaluate(parse("(sub (mul in0 in1) 1)"), [x, y]), x * y - 1)
    np.testing.assert_array_equal(evaluate(parse("(where (ge in0 in1) in0 (neg in1))"), [x, y]), [-2, -2, 3])
    np.testing.assert_array_equal(evaluate(parse("(clamp in0 0 1)"), [x]), [0, 0.5, 1])
    np.testing.assert_allclose(evaluate(parse("(silu in0)"), [x]), x / (1 + np.exp(-x)), rtol=1e-6)
