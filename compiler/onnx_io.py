"""The captured graph as ONNX: the twin that opens in a viewer, and that another runtime can execute as an oracle.

Inputs are the step's `tokens positions rows` and, for each attention layer, `past_key.N` and `past_value.N` [P, heads,
dim]; outputs are the graph's and `present_key.N` and `present_value.N` [P + T, heads, dim]. The past belongs to the
first of the packed sequences and holds its positions 0 to P - 1; it may be empty.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from .. import __version__
from .ir import Attr, Graph, Op, Param, Value
from .op_spec import Array
from .ops import OPS
from .shapes import DType, Shape, TensorType

OPSET = 18
IR_VERSION = 10
OMITTED = "omitted"
"""Location of weights that are not written."""
SMALL = 1024
"""Constants of up to this many elements are always written."""
ELEMENT_TYPES: dict[DType, int] = {"int32": TensorProto.INT32, "int64": TensorProto.INT64, "bool": TensorProto.BOOL}


def write_onnx(graph: Graph, path: Path, weights: Callable[[Param], Array] | None = None) -> None:
    """Write a captured graph, without its weights unless `weights` gives them as float32.

    Raises ValueError for an op without an ONNX body: those that passes make have none.
    """
    onnx.save_model(to_onnx(graph, weights), path)


def to_onnx(graph: Graph, weights: Callable[[Param], Array] | None = None) -> onnx.ModelProto:
    """The ONNX model of a captured graph."""
    writer = _Writer(graph)
    for op in graph.ops:
        writer.op(op)
    writer.initializers += [_initializer(param, weights) for param in graph.params]
    made = helper.make_graph(
        writer.nodes,
        "step",
        [*map(_value_info, graph.inputs), *writer.past_inputs],
        [*map(_value_info, graph.outputs), *writer.present_outputs],
        writer.initializers,
        value_info=[_value_info(value) for op in graph.ops for value in op.outputs if value not in graph.outputs],
    )
    opsets = [helper.make_opsetid("", OPSET)]
    return helper.make_model(
        made, ir_version=IR_VERSION, opset_imports=opsets, producer_name="toolkit", producer_version=__version__
    )


def _initializer(param: Param, weights: Callable[[Param], Array] | None) -> TensorProto:
    constant = param.recipe.constant
    if constant is not None and (weights is not None or constant.array.size <= SMALL):
        return numpy_helper.from_array(np.ascontiguousarray(constant.array), param.value.name)
    if constant is None and weights is not None:
        return numpy_helper.from_array(np.ascontiguousarray(weights(param)), param.value.name)
    tensor = TensorProto(
        name=param.value.name,
        data_type=_element_type(param.value.type.dtype),
        dims=[dim for dim in param.value.type.shape if isinstance(dim, int)],
        data_location=TensorProto.EXTERNAL,
        doc_string=", ".join(piece.tensor for piece in param.recipe.pieces) or "computed at compile time",
    )
    tensor.external_data.add(key="location", value=OMITTED)
    return tensor


def _value_info(value: Value) -> onnx.ValueInfoProto:
    return _tensor_info(value.name, value.type.dtype, value.type.shape)


def _tensor_info(name: str, dtype: DType, shape: Sequence[object]) -> onnx.ValueInfoProto:
    dims = [dim if isinstance(dim, int) else str(dim) for dim in shape]
    return helper.make_tensor_value_info(name, _element_type(dtype), dims)


def _element_type(dtype: DType) -> int:
    return ELEMENT_TYPES.get(dtype, TensorProto.FLOAT)


class _Writer:
    """Collects nodes; what ops' ONNX bodies write to (`op_spec.OnnxEmitter`)."""

    def __init__(self, graph: Graph) -> None:
        self.nodes: list[onnx.NodeProto] = []
        self.initializers: list[TensorProto] = []
        self.past_inputs: list[onnx.ValueInfoProto] = []
        self.present_outputs: list[onnx.ValueInfoProto] = []
        self._taken = {value.name for value in graph.values()}
        self._constants: dict[tuple[str, tuple[int, ...], bytes], str] = {}
        self._masks: dict[tuple[bool, int], str] = {}
        self._positions: tuple[str, str, str, str] | None = None
        self._at = ""
        self._module = ""

    def op(self, op: Op) -> None:
        """Write one op."""
        self._at, self._module = op.outputs[0].name, op.source.module
        OPS[op.kind].onnx(self, op, [value.name for value in op.inputs])

    def node(self, op_type: str, *inputs: str, output: str = "", **attrs: Attr) -> str:
        name = output or self._fresh(f"{self._at}/{op_type}")
        node = helper.make_node(op_type, inputs, [name], name=name, doc_string=self._module)
        node.attribute.extend(helper.make_attribute(key, value) for key, value in attrs.items())
        self.nodes.append(node)
        return name

    def constant(self, array: Array | np.generic) -> str:
        array = np.asarray(array)
        key = (str(array.dtype), array.shape, array.tobytes())
        if key not in self._constants:
            self._constants[key] = self._fresh(f"constant.{len(self._constants)}")
            self.initializers.append(numpy_helper.from_array(array, self._constants[key]))
        return self._constants[key]

    def past(self, layer: int, key: TensorType, value: TensorType) -> tuple[str, str]:
        for name, type_ in (("key", key), ("value", value)):
            self.past_inputs.append(_tensor_info(f"past_{name}.{layer}", type_.dtype, _lengthened("P", type_.shape)))
            shape = _lengthened("P + T", type_.shape)
            self.present_outputs.append(_tensor_info(f"present_{name}.{layer}", type_.dtype, shape))
        return f"past_key.{layer}", f"past_value.{layer}"

    def present(self, layer: int, key: str, value: str) -> None:
        self.node("Identity", key, output=f"present_key.{layer}")
        self.node("Identity", value, output=f"present_value.{layer}")

    def distance(self) -> str:
        return self.node("Cast", self._distance(), to=TensorProto.FLOAT)

    def visible(self, causal: bool, window: int) -> str:
        if (causal, window) not in self._masks:
            self._masks[causal, window] = self._mask(causal, window)
        return self._masks[causal, window]

    def _mask(self, causal: bool, window: int) -> str:
        _, sequences, _, key_sequences = self._places()
        column, row = (self.constant(np.array([axis], np.int64)) for axis in (1, 0))
        distance = self._distance()
        mask = self.node("Equal", self.node("Unsqueeze", sequences, column), self.node("Unsqueeze", key_sequences, row))
        if causal:
            mask = self.node("And", mask, self.node("GreaterOrEqual", distance, self.constant(np.int64(0))))
        if window:
            near = self.node("Less", self.node("Abs", distance), self.constant(np.int64(window)))
            mask = self.node("And", mask, near)
        return mask

    def _distance(self) -> str:
        positions, _, key_positions, _ = self._places()
        column, row = (self.constant(np.array([axis], np.int64)) for axis in (1, 0))
        return self.node("Sub", self.node("Unsqueeze", positions, column), self.node("Unsqueeze", key_positions, row))

    def _places(self) -> tuple[str, str, str, str]:
        """Positions[T] and sequences[T] of the tokens, and the same of the keys [P + T], past ones first."""
        if self._positions is None:
            zero, one = (self.constant(np.array([number], np.int64)) for number in (0, 1))
            positions = self.node("Cast", "positions", to=TensorProto.INT64)
            end = self.constant(np.array([np.iinfo(np.int64).max]))
            last = self.constant(np.array([-1], np.int64))
            steps = self.node("Sub", self.node("Slice", positions, one, end), self.node("Slice", positions, zero, last))
            jumps = self.node("Cast", self.node("Not", self.node("Equal", steps, one)), to=TensorProto.INT64)
            sequences = self.node("CumSum", self.node("Concat", zero, jumps, axis=0), self.constant(np.int64(0)))
            length = self.node("Shape", self.past_inputs[0].name, start=0, end=1)
            count = self.node("Squeeze", length)
            earlier = self.node("Range", self.constant(np.int64(0)), count, self.constant(np.int64(1)))
            key_positions = self.node("Concat", earlier, positions, axis=0)
            key_sequences = self.node("Concat", self.node("Expand", zero, length), sequences, axis=0)
            self._positions = (positions, sequences, key_positions, key_sequences)
        return self._positions

    def _fresh(self, hint: str) -> str:
        name, number = hint, 0
        while name in self._taken:
            number += 1
            name = f"{hint}.{number}"
        self._taken.add(name)
        return name


def _lengthened(first: str, shape: Shape) -> tuple[object, ...]:
    return (first, *shape[1:])
