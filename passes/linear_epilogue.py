"""Pointwise work behind a linear layer becomes the layer's epilogue."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ..compiler.ir import Op, Value
from ..compiler.lower import MAX_EXTRAS
from ..compiler.op_spec import Attrs, bool_attr, int_attr, str_attr
from ..compiler.ops import make_op
from ..compiler.rewrite import Match, Mismatch, Replacement, Rewriting, Rule
from ..kernels_templates import expression as ex
from ..kernels_templates.packing import PANEL
from .expressions import Body, body_of


@dataclass(frozen=True)
class FuseLinearEpilogue(Rewriting):
    """Expects: pointwise ops fused, gate and up merged, and additions that belong to a norm taken. Guarantees: a
    pointwise op that alone reads a linear layer's result, or the two halves of its columns, is its epilogue, if the
    other inputs (at most `max_extras`) span all or the columns.
    """

    name: ClassVar[str] = "linear_epilogue"
    max_extras: int = MAX_EXTRAS

    def rules(self) -> tuple[Rule, ...]:
        return (
            Rule(
                "expr(.., product:linear!(*_), ..)",
                "linear(*_) with the expression as its epilogue",
                self._absorbed,
                "it is no epilogue of the linear layer before it",
            ),
            Rule(
                "expr(.., cut:slice!(product:linear(*_)), ..)",
                "linear(*_) with the expression of its halves as its epilogue",
                self._gated,
                "it is no epilogue of the linear layer before it",
            ),
        )

    def _absorbed(self, match: Match) -> Replacement | None:
        """The op in the epilogue of the linear layer whose result it reads."""
        body, linear = body_of(match.op), match.labeled("product")
        if body is None:
            return None
        before = _epilogue(linear)
        if before.expression != ex.Input(0) and body.uses(linear.output) > 1:
            raise Mismatch("it reads the result twice, and that has an epilogue already")
        return self._with_epilogue(match.op, linear, body.inline(linear.output, before))

    def _gated(self, match: Match) -> Replacement | None:
        """The op in the epilogue of the linear layer both halves of whose columns it reads."""
        body, linear, work = body_of(match.op), match.labeled("product"), match.work
        if body is None or linear.attrs["epilogue"]:
            return None
        halves = work.users(linear.output)
        if not _are_halves(halves, linear.output) or any(work.only_user(h.output) != match.op for h in halves):
            return None
        width = linear.output.type.shape[-1]
        if isinstance(width, int) and width % (2 * PANEL):
            raise Mismatch(f"{width} columns are no multiple of {2 * PANEL}")
        linear = make_op("linear", linear.inputs, [match.op.output.name], {**linear.attrs, **_GATED}, linear.source)
        for half, product in zip(halves, _products(linear), strict=True):
            body = body.inline(half.output, Body(ex.Input(0), (product,)))
        return self._with_epilogue(match.op, linear, body)

    def _with_epilogue(self, op: Op, linear: Op, body: Body) -> Replacement:
        """The linear layer with an expression over its products and other inputs as its epilogue."""
        products = _products(linear)
        ordered = body.ordered(*products)
        extras = ordered.inputs[len(products) :]
        shape = linear.output.type.shape
        if op.output.type != linear.output.type:
            raise Mismatch(f"it makes {op.output.type} of {linear.output.type}")
        if len(extras) > self.max_extras:
            raise Mismatch(f"it has {len(extras)} other inputs, more than {self.max_extras}")
        if any(extra.type.shape not in (shape, shape[-1:]) for extra in extras):
            raise Mismatch(f"it reads {', '.join(str(extra.type) for extra in extras)} beside {linear.output.type}")
        plain = linear.inputs[: 2 + bool_attr(linear.attrs, "has_bias")]
        attrs = {**linear.attrs, "epilogue": str(ordered.expression)}
        return Replacement((make_op("linear", (*plain, *extras), [op.output.name], attrs, linear.source),))


_GATED: Attrs = {"gated": True, "epilogue": "(mul in0 in1)"}
"""Attributes of a linear layer over halves, until its own epilogue is known."""


def _are_halves(cuts: list[Op], value: Value) -> bool:
    """Whether two slices are the first and the second half of a value's last axis; they are put in that order."""
    width, axis = value.type.shape[-1], len(value.type.shape) - 1
    if len(cuts) != 2 or any(cut.kind != "slice" or cut.attrs["axis"] != axis for cut in cuts):
        return False
    cuts.sort(key=lambda cut: int_attr(cut.attrs, "start"))
    assert isinstance(width, int)
    return [(cut.attrs["start"], cut.attrs["stop"]) for cut in cuts] == [(0, width // 2), (width // 2, width)]


def _products(linear: Op) -> tuple[Value, ...]:
    """Stand-ins for what the epilogue calls in0, and in1 of a gated layer."""
    count = 1 + bool_attr(linear.attrs, "gated")
    return tuple(Value(f"{linear.output.name}:{index}", linear.output.type) for index in range(count))


def _epilogue(linear: Op) -> Body:
    """A linear layer's epilogue over its products and extra inputs."""
    extras = linear.inputs[2 + bool_attr(linear.attrs, "has_bias") :]
    text = str_attr(linear.attrs, "epilogue")
    return Body(ex.parse(text) if text else ex.Input(0), (*_products(linear), *extras))
