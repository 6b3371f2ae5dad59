"""Pointwise work behind a linear layer becomes the layer's epilogue."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ..compiler.ir import Graph, Op, Value
from ..compiler.lower import MAX_EXTRAS
from ..compiler.op_spec import Attrs, bool_attr, int_attr, str_attr
from ..compiler.ops import make_op
from ..compiler.pass_ import Outcome, Pass
from ..compiler.rewrite import ANY, Replacement, Workspace, rewrite
from ..kernels_templates import expression as ex
from ..kernels_templates.packing import PANEL
from .expressions import Body, body_of


@dataclass(frozen=True)
class FuseLinearEpilogue(Pass):
    """Expects: pointwise ops fused, gate and up merged, and additions that belong to a norm taken. Guarantees: a
    pointwise op that alone reads a linear layer's result, or the two halves of its columns, is its epilogue, if the
    other inputs (at most `max_extras`) span all or the columns.
    """

    name: ClassVar[str] = "linear_epilogue"
    max_extras: int = MAX_EXTRAS

    def run(self, graph: Graph) -> Outcome:
        return rewrite(graph, {ANY: self._fuse})

    def _fuse(self, op: Op, work: Workspace) -> Replacement | None:
        body = body_of(op)
        for value in body.inputs if body is not None else ():
            assert body is not None
            linear = work.producer(value, "linear")
            if linear is not None and work.only_user(value) is op:
                replacement = self._absorbed(op, body, linear)
            else:
                replacement = self._gated(op, body, value, work)
            if replacement is not None:
                return replacement
        return None

    def _absorbed(self, op: Op, body: Body, linear: Op) -> Replacement | None:
        """The op in the epilogue of the linear layer whose result it reads."""
        before = _epilogue(linear)
        if before.expression != ex.Input(0) and body.uses(linear.output) > 1:
            return None
        return self._with_epilogue(op, linear, body.inline(linear.output, before))

    def _gated(self, op: Op, body: Body, first: Value, work: Workspace) -> Replacement | None:
        """The op in the epilogue of the linear layer whose halves it reads, `first` and another input."""
        cut = work.producer(first, "slice")
        linear = work.producer(cut.inputs[0], "linear") if cut is not None else None
        if cut is None or linear is None or linear.attrs["epilogue"]:
            return None
        halves = [cut, *(other for other in work.users(linear.output) if other != cut)]
        if not _are_halves(halves, linear.output) or any(work.only_user(half.output) is not op for half in halves):
            return None
        width = linear.output.type.shape[-1]
        if isinstance(width, int) and width % (2 * PANEL):
            name = linear.source.module or linear.output.name
            work.note(f"{name}: its activation stays on its own, as {width} columns are no multiple of {2 * PANEL}")
            return None
        linear = make_op("linear", linear.inputs, [op.output.name], {**linear.attrs, **_GATED}, linear.source)
        for half, product in zip(halves, _products(linear), strict=True):
            body = body.inline(half.output, Body(ex.Input(0), (product,)))
        return self._with_epilogue(op, linear, body)

    def _with_epilogue(self, op: Op, linear: Op, body: Body) -> Replacement | None:
        """The linear layer with an expression over its products and other inputs as its epilogue."""
        products = _products(linear)
        ordered = body.ordered(*products)
        extras = ordered.inputs[len(products) :]
        shape = linear.output.type.shape
        if op.output.type != linear.output.type or len(extras) > self.max_extras:
            return None
        if any(extra.type.shape not in (shape, shape[-1:]) for extra in extras):
            return None
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
