"""Walk an exported program and turn each node into IR ops by a table of handlers.

The export has a batch dimension of 1, the IR has none: a translated tensor remembers which torch axis was the batch,
and that axis is left out of its IR value. What depends on constants alone is computed by torch; what depends on the
positions alone is computed for every position and becomes a table. A mask is computed for a short sequence, to see
what it does.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import torch
from torch import SymInt, Tensor, fx

from ..compiler.ir import Source, Value
from ..compiler.shapes import Dim, DType, Shape, Sym, TensorType
from .emitter import Emitter, LayersDiffer
from .problems import Problems, error_text
from .rope import RopeHooks

WRAPPER = "model"
"""Attribute of the exported module that holds the model: the first part of every path in the export."""
LARGEST_ROW = 1 << 16
"""Most numbers a position that are computed at compile time."""
MASK_TOKENS = 24
"""Tokens of the sequence for which masks are computed."""


class Untranslatable(Exception):
    """A node has no meaning in the IR; the text says why."""


class UnknownOp(Untranslatable):
    """An op is not in the table."""


@dataclass(frozen=True)
class Traced:
    """An IR value and the axis of the torch tensor that it lacks because it was the batch of 1."""

    value: Value
    batch: int | None = None

    @property
    def rank(self) -> int:
        """Number of torch axes."""
        return len(self.value.type.shape) + (self.batch is not None)

    def axis(self, dim: int) -> int:
        """The IR axis of a torch axis."""
        dim %= self.rank
        if dim == self.batch:
            raise Untranslatable("it works along the batch")
        return dim - (self.batch is not None and dim > self.batch)


@dataclass(frozen=True)
class Weight:
    """A parameter of the model, before it is known how an op reads it."""

    name: str
    shape: tuple[int, ...]
    """As the checkpoint has it."""
    transposed: bool = False


@dataclass(frozen=True, eq=False)
class Positional:
    """A tensor that depends on the positions alone, for the positions 0, 1 .. and, to see that each of its rows depends
    on its own position only, for the same ones backward. `axis` is the one of the tokens.
    """

    forward: Tensor
    backward: Tensor
    axis: int

    @staticmethod
    def table(rows: Tensor) -> Positional:
        """A table [1, positions, ..]."""
        return Positional(rows, rows.flip(1), 1)

    @property
    def is_positions(self) -> bool:
        """Whether it is the positions themselves."""
        return self.forward.ndim == 2 and self.offset == 0

    @property
    def offset(self) -> int:
        """The number that was added to the positions."""
        rows = self.rows
        if rows.is_floating_point() or rows.numel() != len(rows) or bool((rows.flatten().diff() != 1).any()):
            raise Untranslatable("it takes integers computed from the positions")
        return int(rows[0])

    @property
    def rows(self) -> Tensor:
        """The table [positions, W]."""
        if not torch.equal(self.forward.flip(self.axis), self.backward):
            raise Untranslatable("it takes something that depends on the positions of several tokens")
        return self.forward.movedim(self.axis, 0).flatten(1).contiguous()


@dataclass(frozen=True)
class Mask:
    """A tensor [.., T, T] that attention adds to its scores or hides them by: a node that depends on no activation."""

    node: fx.Node


@dataclass(frozen=True)
class Rotary:
    """What a rotary module whose frequencies depend on the length of the sequence returned."""

    table: int
    """Its number in `RopeHooks.tables`."""
    function: Literal["cos", "sin"]


@dataclass(frozen=True)
class Empty:
    """A tensor without elements."""


Operand = Traced | Weight | Positional | Mask | Rotary | Empty | Tensor
"""What a tensor of the export became. A real torch tensor is a constant."""
Handler = Callable[..., Any]
"""A function of the translator, the node and the op's arguments, which returns the operand or operands it became."""


class Translator:
    """Walks the nodes of an export.

    `handlers` is the table; `symbols` maps symbolic sizes of the export to ours, the tokens first; `positions` is the
    step input. `problems` gets everything that can't be translated, but for what is in a module of `unsupported`.
    Something of its shape takes its place, so that what reads it can be looked at too.
    """

    def __init__(
        self,
        emitter: Emitter,
        rope: RopeHooks,
        handlers: Mapping[str, Handler],
        symbols: Mapping[Any, Sym],
        positions: Value,
        *,
        problems: Problems,
        unsupported: Collection[str] = (),
    ) -> None:
        self.emitter, self.rope, self.positions, self.problems = emitter, rope, positions, problems
        self._unsupported = tuple(unsupported)
        self._handlers = {**handlers, "getitem": _item}
        self._symbols = symbols
        self._values: dict[fx.Node, Any] = {}
        self._assumed: set[fx.Node] = set()
        self._examples: dict[fx.Node, Any] = {}
        self._lengths: Value | None = None

    def run(self, graph: fx.Graph, operands: Mapping[str, Operand]) -> Value | None:
        """The graph's only output, or None if not even its shape is known. `operands` are the placeholders by name."""
        for node in graph.nodes:
            if node.op == "placeholder":
                self._values[node] = operands[node.name]
            elif node.op == "call_function":
                self._values[node] = self._translate(node)
            elif node.op == "output":
                (result,) = self._resolve(node.args[0])
                return None if result is None else self.traced(result).value
        return None

    def _translate(self, node: fx.Node) -> Any:
        """What a node becomes."""
        found = node.meta.get("val")
        if not isinstance(found, (Tensor, list, tuple)):
            return found  # a size, or a check that has no result
        if isinstance(found, Tensor) and 0 in found.shape:
            return Empty()
        self.emitter.source = _source(node)
        args, kwargs = self._resolve(node.args), self._resolve(node.kwargs)
        try:
            if any(self._values[given] is None for given in node.all_input_nodes):
                self._handler(node)  # so that all that are missing are named
                return self.assume(node)
            result = self._call(node, args, kwargs)
            self._check(node, result)
        except LayersDiffer:
            raise
        except Exception as error:
            self._report(node, error)
            return self.assume(node)
        return result

    def _report(self, node: fx.Node, error: Exception) -> None:
        """Add a problem, unless it may only be that of a node before it, or of a part that was reported as a whole."""
        source = self.emitter.source
        inside = any((source.module + ".").startswith(part + ".") for part in self._unsupported)
        follows = any(given in self._assumed for given in node.all_input_nodes) and not isinstance(error, UnknownOp)
        if not inside and not follows:
            line = f" ({source.line})" if source.line else ""
            name = op_name(node).removeprefix("toolkit.")
            reason = str(error) if isinstance(error, Untranslatable | ValueError) else error_text(error)
            self.problems.add(f"{name}{line} can't be translated: {reason}", source.module)

    def assume(self, node: fx.Node) -> Any:
        """Something in place of a node that has no translation; None if not even its shape has one."""
        self._assumed.add(node)
        operands = [self._values[given] for given in node.all_input_nodes]
        inputs = [operand.value for operand in operands if isinstance(operand, Traced)]
        try:
            made = [self._unknown(tensor, inputs) for tensor in _leaves(node.meta["val"])]
        except Untranslatable:
            return None
        return made[0] if isinstance(node.meta["val"], Tensor) else tuple(made)

    def _unknown(self, tensor: Tensor, inputs: Sequence[Value]) -> Traced:
        batch = 0 if tensor.ndim > 1 and isinstance(tensor.shape[0], int) and tensor.shape[0] == 1 else None
        dtype: DType = "float32" if tensor.is_floating_point() else "bool" if tensor.dtype == torch.bool else "int32"
        return Traced(self.emitter.unknown(inputs, TensorType(dtype, self.shape(tensor, batch))), batch)

    def _handler(self, node: fx.Node) -> Handler:
        name = op_name(node)
        if name not in self._handlers:
            raise UnknownOp("no IR op is known for it")
        return self._handlers[name]

    def _call(self, node: fx.Node, args: Any, kwargs: Any) -> Any:
        leaves = _leaves((args, kwargs))
        if op_name(node).startswith("aten.") and not any(isinstance(leaf, Traced | Weight | Rotary) for leaf in leaves):
            if any(isinstance(leaf, Mask) for leaf in leaves):
                return Mask(node)
            if any(isinstance(leaf, (Positional, SymInt)) for leaf in leaves):
                return self._tabulate(node, args, kwargs)
            return _compute(node, args, kwargs)
        handler = self._handler(node)
        try:
            _signature(handler).bind(self, node, *args, **kwargs)
        except TypeError:
            raise Untranslatable("it is called in a way that is not known") from None
        return handler(self, node, *args, **kwargs)

    def _tabulate(self, node: fx.Node, args: Any, kwargs: Any) -> Any:
        """Compute an op whose tensors depend on the positions alone, for every position."""
        tokens, symbol = next(iter(self._symbols.items()))
        count = self.rope.max_context

        def compute(direction: str) -> Any:
            def known(argument: Any) -> Any:
                if isinstance(argument, Positional):
                    return getattr(argument, direction)
                return int(argument.node.expr.subs(tokens, count)) if isinstance(argument, SymInt) else argument

            return _compute(node, *_mapped((args, kwargs), known))

        axes = [self._token_axis(tensor, symbol) for tensor in _leaves(node.meta["val"])]
        both = compute("forward"), compute("backward")
        made = [Positional(there, back, axis) for there, back, axis in zip(*map(_leaves, both), axes, strict=True)]
        return made[0] if isinstance(node.meta["val"], Tensor) else tuple(made)

    def _token_axis(self, tensor: Tensor, tokens: Sym) -> int:
        """The axis of the tokens in what depends on the positions alone."""
        shape = self.shape(tensor, None)
        axes = [axis for axis, dim in enumerate(shape) if dim == tokens]
        fixed = [dim for dim in shape if isinstance(dim, int)]
        if len(axes) != 1 or len(fixed) != len(shape) - 1 or torch.Size(fixed).numel() > LARGEST_ROW:
            raise Untranslatable(f"its shape {tuple(tensor.shape)} is no table over the positions")
        return axes[0]

    def _resolve(self, argument: Any) -> Any:
        """An argument with nodes replaced by what they became."""
        return fx.map_arg(argument, lambda node: self._values[node])

    def _check(self, node: fx.Node, result: Any) -> None:
        """The translation has the shape that torch says."""
        for made, tensor in zip(_leaves(result), _leaves(node.meta["val"]), strict=True):
            if isinstance(made, Traced) and (shape := self.shape(tensor, made.batch)) != made.value.type.shape:
                raise Untranslatable(f"it became {made.value.type}, expected shape {shape}")

    # what handlers use

    def shape(self, tensor: Tensor, batch: int | None) -> Shape:
        """A torch tensor's shape without the batch."""
        return tuple(self._dim(size) for axis, size in enumerate(tensor.shape) if axis != batch)

    def _dim(self, size: int | SymInt) -> Dim:
        if isinstance(size, int):
            return size
        for expression, symbol in self._symbols.items():
            factor = size.node.expr / expression
            if factor.is_Integer:
                return Sym(symbol.name, symbol.bound, int(factor))
        raise Untranslatable(f"it has a dimension {size}")

    def traced(self, operand: Operand) -> Traced:
        """The operand as an IR value."""
        if isinstance(operand, Traced):
            return operand
        if isinstance(operand, Weight):
            return Traced(self.matrix(operand, transpose=False))
        if isinstance(operand, Positional):
            return self._positional(operand)
        if isinstance(operand, Tensor):
            array = operand.float() if operand.is_floating_point() else operand
            return Traced(self.emitter.constant("constant", array.numpy()))
        if isinstance(operand, Mask):
            raise Untranslatable("it takes a mask")
        if isinstance(operand, Empty):
            raise Untranslatable("it takes a tensor without elements")
        if isinstance(operand, Rotary):
            raise Untranslatable("it changes rotary tables that depend on the length of the sequence")
        raise Untranslatable(f"it takes a {type(operand).__name__}")

    def matrix(self, weight: Weight, *, transpose: bool) -> Value:
        """A parameter as it is where the model reads it, or transposed."""
        return self.emitter.weight(weight.name, weight.shape, transpose=transpose != weight.transposed)

    def example(self, mask: Mask) -> Tensor:
        """A mask for the `MASK_TOKENS` tokens of one sequence."""
        tokens, count = next(iter(self._symbols)), MASK_TOKENS

        def known(argument: Any) -> Any:
            return int(argument.node.expr.subs(tokens, count)) if isinstance(argument, SymInt) else argument

        def value(node: fx.Node) -> Any:
            operand = self._values[node]
            if op_name(node) == "toolkit.causal_mask":
                return torch.ones(1, 1, count, count, dtype=torch.bool).tril()
            if isinstance(operand, Traced | Weight | Rotary | Empty) or operand is None:
                raise Untranslatable("its mask depends on more than the order of tokens")
            if isinstance(operand, Tensor | SymInt):
                return known(operand)
            if node.op == "placeholder":
                return operand.forward[:, :count]
            if node not in self._examples:
                args, kwargs = (fx.map_arg(given, value) for given in (node.args, node.kwargs))
                self._examples[node] = _compute(node, *_mapped((args, kwargs), known))
            return self._examples[node]

        found: Tensor = value(mask.node)
        return found

    def _positional(self, operand: Positional) -> Traced:
        """A table over the positions, read at the step's positions."""
        rows, shape = operand.rows, operand.forward.shape
        if not rows.is_floating_point():
            if operand.is_positions:
                return Traced(self.positions, 0)
            raise Untranslatable("it takes integers computed from the positions")
        tokens = next(iter(self._symbols.values()))
        value = self.gathered(self.emitter.constant("positional", rows.float().numpy()))
        batch = 0 if len(shape) > 1 and operand.axis > 0 and shape[0] == 1 else None
        axis = operand.axis - (batch is not None)
        rest = [size for number, size in enumerate(shape) if number not in (batch, operand.axis)]
        value = self.emitter.reshape(value, (tokens, *rest))
        order = [*range(1, axis + 1), 0, *range(axis + 1, len(rest) + 1)]
        return Traced(self.emitter.transpose(value, order), batch)

    @property
    def lengths(self) -> Value:
        """The step input `lengths`, which a graph has only if something needs it."""
        if self._lengths is None:
            self._lengths = self.emitter.input("lengths", "int32", self.positions.type.shape)
        return self._lengths

    def gathered(self, table: Value) -> Value:
        """The rows of a table at the step's positions."""
        return self.emitter.share("embedding", table, self.positions)


_signature = cache(inspect.signature)


def op_name(node: fx.Node) -> str:
    """`aten.add` or `toolkit.norm`."""
    if isinstance(node.target, torch._ops.OpOverload):
        return str(node.target).rpartition(".")[0]
    return getattr(node.target, "__name__", str(node.target))


def _item(translator: Translator, node: fx.Node, values: Sequence[Operand], index: int) -> Operand:
    return values[index]


def _source(node: fx.Node) -> Source:
    """Module path and line of the modeling code."""
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    module = stack[-1][0] if stack else ""
    frames = re.findall(r'File ".*?([^/\\]+)", line (\d+)', node.meta.get("stack_trace") or "")
    modeling = [frame for frame in frames if frame[0].startswith("modeling_")] or frames
    return Source(module.removeprefix(WRAPPER).removeprefix("."), ":".join(modeling[-1]) if modeling else "")


def _compute(node: fx.Node, args: Any, kwargs: Mapping[str, Any]) -> Any:
    """Run an op on real tensors."""
    assert isinstance(node.target, torch._ops.OpOverload)
    try:
        return node.target(*args, **{name: "cpu" if name == "device" else x for name, x in kwargs.items()})
    except (RuntimeError, TypeError, IndexError) as error:
        raise Untranslatable(str(error)) from error


def _mapped(argument: Any, function: Callable[[Any], Any]) -> Any:
    """An argument with a function applied to its leaves."""
    if isinstance(argument, (list, tuple)):
        return type(argument)(_mapped(item, function) for item in argument)
    if isinstance(argument, dict):
        return {name: _mapped(item, function) for name, item in argument.items()}
    return function(argument)


def _leaves(argument: Any) -> list[Any]:
    """What nested lists, tuples and dictionaries hold."""
    if isinstance(argument, (list, tuple)):
        return [leaf for item in argument for leaf in _leaves(item)]
    if isinstance(argument, dict):
        return [leaf for item in argument.values() for leaf in _leaves(item)]
    return [argument]
