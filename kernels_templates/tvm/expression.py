"""Pointwise expressions as TIR: each operator as `cpu/simd.h.j2` computes it, with the same roundings."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from ..expression import Call, Expression, Input, Number, parse
from .script import Script

Operator = Callable[..., str]


def supported(text: str) -> bool:
    """Whether every operator of an expression text can be written."""
    return not text or _supported(parse(text))


def _supported(expression: Expression) -> bool:
    if not isinstance(expression, Call):
        return True
    return expression.operator in OPERATORS and all(map(_supported, expression.args))


def write(script: Script, text: str, inputs: Sequence[str]) -> str:
    """Write the lines of an expression over named vectors and return the name of its result."""
    return _write(script, parse(text), inputs)


def _write(s: Script, expression: Expression, inputs: Sequence[str]) -> str:
    if isinstance(expression, Input):
        return inputs[expression.index]
    if isinstance(expression, Number):
        return s.splat(expression.value)
    return OPERATORS[expression.operator](s, *(_write(s, arg, inputs) for arg in expression.args))


# --- operators --------------------------------------------------------------------------------------------------------


def _infix(operator: str) -> Operator:
    return lambda s, a, b: s.vector(f"{a} {operator} {b}")


def _compare(operator: str) -> Operator:
    return lambda s, a, b: _blend(s, f"{a} {operator} {b}", s.splat(1.0), s.splat(0.0))


def _blend(s: Script, condition: str, a: str, b: str) -> str:
    return s.vector(f"T.Select({condition}, {a}, {b})")


def _neg(s: Script, x: str) -> str:
    return s.vector(f"{x} * {s.splat(-1.0)}")


def _maximum(s: Script, a: str, b: str) -> str:
    return _blend(s, s.is_nan(a), a, s.maximum(a, b))


def _minimum(s: Script, a: str, b: str) -> str:
    return _blend(s, s.is_nan(a), a, s.minimum(a, b))


def _clamp(s: Script, x: str, low: str, high: str) -> str:
    return s.minimum(high, s.maximum(low, x))


def _where(s: Script, condition: str, a: str, b: str) -> str:
    return _blend(s, f"{condition} == {s.splat(0.0)}", b, a)


def _relu(s: Script, x: str) -> str:
    return s.maximum(s.splat(0.0), x)


def _relu2(s: Script, x: str) -> str:
    positive = _relu(s, x)
    return s.vector(f"{positive} * {positive}")


def _sqrt(s: Script, x: str) -> str:
    return s.vector(s.intrinsic(s.f, "llvm.sqrt", x))


def _rsqrt(s: Script, x: str) -> str:
    return s.vector(f"{s.splat(1.0)} / {_sqrt(s, x)}")


def _exp(s: Script, x: str) -> str:
    x = s.minimum(s.splat(89.0), s.maximum(s.splat(-104.0), x))
    n = s.round(s.vector(f"{x} * {s.splat(1.44269504)}"))
    r = s.fnma(n, s.splat(1.42860677e-6), s.fnma(n, s.splat(0.693145752), x))
    p = s.polynomial(r, (1.381457085e-3, 8.368730545e-3, 4.166838899e-2, 1.666652113e-1, 4.999999404e-1))
    return s.scale2(s.vector(f"{s.fma(p, f'{r} * {r}', r)} + {s.splat(1.0)}"), n)


def _tanh(s: Script, x: str) -> str:
    z = s.vector(f"{x} * {x}")
    p = s.polynomial(z, (-5.603913683e-3, 2.055171877e-2, -5.371410772e-2, 1.333115250e-1, -3.333327174e-1))
    small = s.fma(f"{x} * {z}", p, x)
    size = s.absolute(x)
    grown = s.vector(f"{_exp(s, s.vector(f'{size} + {size}'))} + {s.splat(1.0)}")
    large = s.vector(f"{s.splat(1.0)} - {s.splat(2.0)} / {grown}")
    return _blend(s, f"{size} < {s.splat(0.625)}", small, s.with_sign(large, x))


def _erf(s: Script, x: str) -> str:
    z = s.vector(f"{x} * {x}")
    near = (7.853860734e-5, -8.010193706e-4, 5.188327748e-3, -2.685381286e-2, 1.128358543e-1, -3.761262596e-1)
    small = s.fma(x, s.polynomial(z, (*near, 1.283791661e-1)), x)
    size = s.absolute(x)
    t = s.minimum(s.splat(4.0), size)
    far = (2.082853098e-5, -4.313926038e-4, 4.156250507e-3, -2.508060634e-2, 1.082203686e-1, 6.334008574e-1)
    g = s.polynomial(t, (*far, 1.129488349, -1.692039659e-4))
    large = s.vector(f"{s.splat(1.0)} - {_exp(s, _neg(s, g))}")
    return _blend(s, f"{size} < {s.splat(0.95)}", small, s.with_sign(large, x))


def _over_one_plus_exp(s: Script, top: str, x: str) -> str:
    return s.vector(f"{top} / {s.vector(f'{s.splat(1.0)} + {_exp(s, x)}')}")


def _sigmoid(s: Script, x: str) -> str:
    return _over_one_plus_exp(s, s.splat(1.0), _neg(s, x))


def _silu(s: Script, x: str) -> str:
    return _over_one_plus_exp(s, x, _neg(s, x))


def _quick_gelu(s: Script, x: str) -> str:
    return _over_one_plus_exp(s, x, s.vector(f"{x} * {s.splat(-1.702)}"))


def _gelu(s: Script, x: str) -> str:
    one_plus = s.vector(f"{s.splat(1.0)} + {_erf(s, s.vector(f'{x} * {s.splat(0.707106781)}'))}")
    return s.vector(f"{s.splat(0.5)} * {x} * {one_plus}")


def _gelu_tanh(s: Script, x: str) -> str:
    cube = s.vector(f"{x} * {x} * {x}")
    inner = s.vector(f"{s.splat(0.797884561)} * {s.fma(s.splat(0.044715), cube, x)}")
    one_plus = s.vector(f"{s.splat(1.0)} + {_tanh(s, inner)}")
    return s.vector(f"{s.splat(0.5)} * {x} * {one_plus}")


OPERATORS: Mapping[str, Operator] = {
    "add": _infix("+"),
    "sub": _infix("-"),
    "mul": _infix("*"),
    "div": _infix("/"),
    "lt": _compare("<"),
    "le": _compare("<="),
    "gt": _compare(">"),
    "ge": _compare(">="),
    "eq": _compare("=="),
    "ne": lambda s, a, b: _blend(s, f"{a} == {b}", s.splat(0.0), s.splat(1.0)),
    "neg": _neg,
    "abs": lambda s, x: s.absolute(x),
    "maximum": _maximum,
    "minimum": _minimum,
    "clamp": _clamp,
    "where": _where,
    "relu": _relu,
    "relu2": _relu2,
    "sqrt": _sqrt,
    "rsqrt": _rsqrt,
    "exp": _exp,
    "tanh": _tanh,
    "sigmoid": _sigmoid,
    "silu": _silu,
    "quick_gelu": _quick_gelu,
    "gelu": _gelu,
    "gelu_tanh": _gelu_tanh,
}
"""By name, as in `kernels_templates.expression`; `pow`, `log`, `softplus`, `sin` and `cos` have no TIR form."""
