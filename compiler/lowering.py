"""The state of lowering: where each value lives, and the kernel calls so far. The rules in `lower.py` work on it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from ..kernels_templates.catalog import ArgSpec, KernelSpec, ParamValue
from ..kernels_templates.packing import layout_bytes, q8_row_bytes
from ..kernels_templates.reference import page_bytes
from ..kernels_templates.registry import families
from ..kernels_templates.render import arguments
from ..kernels_templates.triton.choose import triton_kernels
from ..runtime.encodings import FLOAT32, Encoding
from ..runtime.errors import InternalError
from ..runtime.plan import CacheArg, CacheResource, ConstArg, DimArg, InputArg, KvDType, WeightArg
from .ir import Graph, Op, Param, Value
from .lowered import Argument, Call, View, VirtualBuffer, Weight
from .op_spec import divide
from .shapes import Dim, Sym, product
from .targets import BucketLimits, FloatDType, Target

GpuGenerator = Literal["cuda", "triton", "race"]
"""Whose GPU kernels: CUDA C++, Triton where it has a template, or CUDA C++ with Triton's as alternatives."""
_BYTES: Mapping[FloatDType, int] = {"float32": 4, "float16": 2, "bfloat16": 2}


class Unsupported(Exception):
    """An op has a form that no kernel of the target takes; `lower` reports all of them together."""


@dataclass(frozen=True)
class Rows:
    """Where a value lies in its buffer: `rows` rows of `width` floats, `stride` floats apart, `offset` floats in."""

    buffer: str
    rows: Dim
    width: int
    stride: int
    offset: int = 0

    @property
    def contiguous(self) -> bool:
        return self.stride == self.width or self.rows == 1


Place = Rows | InputArg | WeightArg | CacheArg


class Lowering:
    """Lowers one graph for the steps of one bucket: rules ask it where inputs are, and tell it which kernels to call.

    What differs between kinds of targets is here: `real`, the numbers of activations, which every CUDA kernel has as a
    parameter; the kernel families; and 8-bit activations, which CPU kernels alone can write.
    """

    def __init__(
        self,
        graph: Graph,
        target: Target,
        limits: BucketLimits,
        kv_dtype: KvDType,
        *,
        real: FloatDType,
        deterministic: bool = False,
        alternatives: int = 0,
        generator: GpuGenerator = "cuda",
    ) -> None:
        self.target = target
        self.limits = limits
        self.real = real
        self.real_bytes = _BYTES[real]
        self.families = families(target.kind)
        self.deterministic = deterministic
        self.alternatives = alternatives
        self.generator = generator
        self.kv_dtype = kv_dtype
        self.calls: list[Call] = []
        self.buffers: dict[str, VirtualBuffer] = {}
        self.weights = choose_layouts(graph, target)
        self.caches = group_caches(graph, target, kv_dtype)
        self.uses = graph.uses()
        self.delayed: dict[str, tuple[dict[str, ParamValue], dict[str, Argument]]] = {}
        """Parameters and arguments of ops that the kernel of the op behind them computes too, by result."""
        self.unscaled: dict[str, tuple[View, float]] = {}
        """Buffers of rows that readers scale themselves, as an RMS norm would: the sums of squares of parts of each row
        (`linear_skinny`), and what the norm adds to their mean."""
        self._outputs = {value.name for value in graph.outputs}
        self._quantized: dict[tuple[Rows, int], View] = {}
        self._float8: dict[Rows, tuple[View, View]] = {}
        self._copies: dict[Rows, Rows] = {}
        self._roles: dict[str, str] = {}
        self._places: dict[str, Place] = {value.name: InputArg(value.name) for value in graph.inputs}
        self._places |= {name: WeightArg(name) for name in self.weights}
        slots = {
            layer: (group, slot) for group, cache in enumerate(self.caches) for slot, layer in enumerate(cache.layers)
        }
        self._places |= {cache.value.name: CacheArg(*slots[cache.layer]) for cache in graph.caches}

    # --- where values are ---------------------------------------------------------------------------------------------

    def place(self, value: Value) -> Place:
        return self._places[value.name]

    def is_placed(self, value: Value) -> bool:
        """Whether it has been computed, or is an input."""
        return value.name in self._places

    def put(self, value: Value, place: Place) -> None:
        """Say where a value is: a view of another's bytes, or the next version of a cache."""
        self._places[value.name] = place

    def rows(self, value: Value) -> Rows:
        """The place of an activation. Raises Unsupported for a step input or a weight."""
        place = self.place(value)
        if not isinstance(place, Rows):
            raise Unsupported(f"{value} is not an activation")
        return place

    def pointer(self, value: Value) -> Argument:
        """A pointer to the value's elements in row-major order; a strided view is copied first."""
        place = self.place(value)
        return self.view(self._dense(place)) if isinstance(place, Rows) else place

    def view(self, place: Rows) -> View:
        """A pointer to the first element of rows."""
        return View(place.buffer, place.offset * self.real_bytes)

    def as_rows(self, value: Value, rows: Dim) -> Rows:
        """The value as `rows` equal rows, strided where it lies so."""
        place = self.rows(value)
        if place.rows == rows:
            return place
        width = count(product(value.type.shape)) // count(rows)
        dense = self._dense(place)
        return Rows(dense.buffer, rows, width, width, dense.offset)

    def _dense(self, place: Rows) -> Rows:
        if place.contiguous:
            return place
        if place not in self._copies:
            name = f"{place.buffer}:{place.offset}+{place.width}"
            self._copies[place] = self.new_rows(name, place.rows, place.width)
            self.copy(place, self._copies[place], "copy")
        return self._copies[place]

    def copy(self, source: Rows, target: Rows, label: str) -> None:
        """Copy rows of floats."""
        self.call(
            "copy",
            {},
            {
                "x": View(source.buffer),
                "out": View(target.buffer),
                "rows": dim(source.rows),
                "width": ConstArg(source.width),
                "x_stride": ConstArg(source.stride),
                "x_offset": ConstArg(source.offset),
                "out_stride": ConstArg(target.stride),
                "out_offset": ConstArg(target.offset),
            },
            label,
        )

    # --- new buffers --------------------------------------------------------------------------------------------------

    def new_buffer(self, name: str, rows: Dim, row_bytes: int) -> View:
        """A new buffer of `rows` rows."""
        if name in self.buffers:
            raise InternalError(f"buffer {name} exists already")
        self.buffers[name] = VirtualBuffer(self.limits.bounds.largest(rows) * row_bytes, count(rows) * row_bytes)
        return View(name)

    def new_rows(self, name: str, rows: Dim, width: int) -> Rows:
        """A new buffer of contiguous rows of floats."""
        self.new_buffer(name, rows, width * self.real_bytes)
        return Rows(name, rows, width, width)

    def output(self, value: Value) -> View:
        """A new buffer for a result, as rows of its last axis."""
        self.put(value, self.new_rows(value.name, *rows_and_width(value)))
        return View(value.name)

    def is_output(self, value: Value) -> bool:
        """Whether the graph's caller reads it."""
        return value.name in self._outputs

    # --- quantized activations ----------------------------------------------------------------------------------------

    def encoding(self, weight: Value) -> Encoding:
        """The encoding of a parameter. Raises Unsupported if the value is computed."""
        if weight.name not in self.weights:
            raise Unsupported(f"{weight} is computed, but a weight must be a parameter")
        encoding = self.weights[weight.name].param.recipe.encoding
        if encoding is None:
            raise InternalError(f"the encoding of {weight.name} was not resolved before lowering")
        return encoding

    def wanted(self, value: Value, width: int) -> tuple[bool, bool]:
        """Whether users read a value as floats, and whether affine linear layers read its rows of `width` quantized."""
        floats, quantized = value.name in self._outputs, False
        for user in self.uses.get(value.name, []):
            if user.kind == "reshape":
                more = self.wanted(user.output, width)
                floats, quantized = floats or more[0], quantized or more[1]
            elif user.kind == "linear" and value not in user.inputs[1:] and self._is_affine(user.inputs[1]):
                same = value.type.shape[-1] == width
                floats, quantized = floats or not same, quantized or same
            else:
                floats = True
        return floats, quantized

    def _is_affine(self, weight: Value) -> bool:
        return weight.name in self.weights and self.encoding(weight).kind == "affine"

    def output_as_wanted(
        self, value: Value, columns: int | None = None
    ) -> tuple[dict[str, ParamValue], dict[str, Argument]]:
        """Parameters and arguments of a kernel that can write a value as floats, quantized, or both.

        Buffers are made for what users of the value read. A quantized row has `columns`, the last axis if left out.
        """
        if self.target.kind == "cuda":
            return {}, {"out": self.output(value)}
        rows, width = rows_and_width(value)
        columns = width if columns is None else columns
        floats, quantized = self.wanted(value, columns)
        quantized = quantized and columns % 32 == 0
        floats = floats or not quantized
        place = Rows(value.name, rows, width, width)
        self.put(value, place)
        args: dict[str, Argument] = {}
        if floats:
            args["out"] = self.new_buffer(value.name, rows, width * self.real_bytes)
        if quantized:
            q8_rows = divide(product(value.type.shape), columns)
            args["q8"] = self.new_buffer(f"{value.name}:q8", q8_rows, q8_row_bytes(columns))
            self._quantized[place, columns] = View(f"{value.name}:q8")
        return {"float_out": floats, "q8_out": quantized}, args

    def quantized(self, value: Value) -> View:
        """The value as 8-bit codes by rows of its last axis, quantized at most once."""
        rows, width = rows_and_width(value)
        place = self.rows(value)
        if (place, width) not in self._quantized:
            if width % 32:
                raise Unsupported(f"{value} has {width} columns, but quantized weights need a multiple of 32")
            q8 = self.new_buffer(f"{value.name}:q8", rows, q8_row_bytes(width))
            args = {"x": self.pointer(value), "q8": q8, "rows": dim(rows), "K": ConstArg(width)}
            self.call("quantize", {}, args, f"quantize:{value.name}", flops=4 * count(rows) * width)
            self._quantized[place, width] = q8
        return self._quantized[place, width]

    def float8(self, value: Value) -> tuple[View, View]:
        """The value as 8-bit floats by rows of its last axis, and the rows' scales, made at most once. CUDA only."""
        rows, width = rows_and_width(value)
        place = self.rows(value)
        if place not in self._float8:
            x8 = self.new_buffer(f"{value.name}:float8", rows, width)
            scale = self.new_buffer(f"{value.name}:scale", rows, 4)
            args = {"x": self.pointer(value), "x8": x8, "x_scale": scale, "rows": dim(rows), "K": ConstArg(width)}
            self.call("quantize_float8", {}, args, f"quantize:{value.name}", flops=4 * count(rows) * width)
            self._float8[place] = x8, scale
        return self._float8[place]

    # --- calls --------------------------------------------------------------------------------------------------------

    def call(
        self,
        family: str,
        params: Mapping[str, ParamValue],
        args: Mapping[str, Argument],
        op: Op | str,
        *,
        flops: int = 0,
        others: Sequence[tuple[str, Mapping[str, ParamValue]]] = (),
    ) -> None:
        """Append a kernel call with its arguments by name; `others` are families and parameters that take the same.

        Raises Unsupported for a parameter value that the family lacks, and for a family that is not batch-invariant
        where only such are allowed; InternalError for wrong names.
        """
        kernel = self._kernel(family, params)
        if self.deterministic and not self.families[family].batch_invariant:
            raise Unsupported(f"kernel {family} is not batch-invariant, as a deterministic plan needs")
        specs = arguments(self.families[family], kernel)
        if {spec.name for spec in specs} != args.keys():
            raise InternalError(
                f"kernel {kernel.symbol} takes {[spec.name for spec in specs]}, lowering gave {list(args)}"
            )
        bound = tuple((spec, args[spec.name]) for spec in specs)
        for spec, arg in bound:
            if isinstance(arg, WeightArg):
                self._read_weight(arg.name, spec)
        written = self._written(kernel, tuple(self._kernel(*other) for other in others), bound)
        state_changes = isinstance(op, Op) and any(value.type.dtype == "cache" for value in op.outputs)
        self.calls.append(
            Call(
                written[0],
                tuple(arg for _, arg in bound),
                reads=_touched(bound, writing=False, caches=not state_changes),
                writes=_touched(bound, writing=True, caches=state_changes),
                op=op if isinstance(op, str) else label(op),
                bytes=sum(self._least_bytes(spec, arg, op) for spec, arg in bound),
                flops=flops,
                others=written[1:],
            )
        )

    def _written(
        self, kernel: KernelSpec, others: tuple[KernelSpec, ...], bound: Sequence[tuple[ArgSpec, Argument]]
    ) -> tuple[KernelSpec, ...]:
        """A kernel and those that can stand in for it, by whoever is to write them."""
        aligned = all(arg.offset % 16 == 0 for _, arg in bound if isinstance(arg, View))
        if self.generator == "cuda" or not aligned:
            return kernel, *others
        sizes = {spec.name: self._largest(arg) for spec, arg in bound if isinstance(arg, DimArg | ConstArg)}
        found = triton_kernels(kernel, sizes)
        if self.generator == "race":
            return kernel, *others, *found[: max(1, self.alternatives)]
        return tuple(found[: 1 + self.alternatives]) or (kernel, *others)

    def _largest(self, arg: DimArg | ConstArg) -> int:
        """The largest value of a number in steps of this bucket."""
        if isinstance(arg, ConstArg):
            return int(arg.value)
        bounds = self.limits.bounds
        return arg.factor * {"T": bounds.max_tokens, "S": bounds.max_sequences, "R": bounds.max_rows}[arg.name]

    def _read_weight(self, name: str, spec: ArgSpec) -> None:
        """Store a weight that kernels read as an activation as `real` numbers.

        Raises Unsupported if others read it as a weight, in its own encoding.
        """
        if self._roles.setdefault(name, spec.role) != spec.role and self.real != "float32":
            raise Unsupported(f"{name} is read both as a weight and as {self.real} activations")
        if spec.role == "in":
            param = self.weights[name].param
            stored = replace(param, recipe=replace(param.recipe, encoding=Encoding(self.real)))
            self.weights[name] = replace(self.weights[name], param=stored)

    def _kernel(self, family: str, params: Mapping[str, ParamValue]) -> KernelSpec:
        """The kernel of a family with these parameters, which must be exactly its own and legal."""
        if family not in self.families:
            raise Unsupported(f"there is no kernel {family}")
        legal = self.families[family].params
        if "real" in legal:
            params = {**params, "real": self.real}
        if legal.keys() != params.keys():
            raise InternalError(f"kernel family {family} has parameters {list(legal)}, lowering gave {list(params)}")
        for name, values in legal.items():
            if values and params[name] not in values:
                raise Unsupported(f"kernel {family} takes {name} {', '.join(map(str, values))}, not {params[name]!r}")
        return KernelSpec(family, params)

    def _least_bytes(self, spec: ArgSpec, arg: Argument, op: Op | str) -> int:
        """Bytes that a call reads through an argument when T = S = R = 1."""
        if isinstance(arg, View) and spec.role == "in":
            return self.buffers[arg.buffer].least
        if isinstance(arg, WeightArg):
            weight = self.weights[arg.name]
            size = weight_bytes(weight)
            gathered = isinstance(op, Op) and op.kind == "embedding"
            return size // count(weight.param.value.type.shape[0]) if gathered else size
        return 0


def _touched(bound: Sequence[tuple[ArgSpec, Argument]], *, writing: bool, caches: bool) -> frozenset[str]:
    names = set()
    for spec, arg in bound:
        if isinstance(arg, View) and (spec.role in ("out", "scratch")) == writing:
            names.add(arg.buffer)
        elif isinstance(arg, CacheArg) and caches:
            names.add(f"cache {arg.group} {arg.slot}")
    return frozenset(names)


# --- shapes -----------------------------------------------------------------------------------------------------------


def dim(size: Dim) -> DimArg | ConstArg:
    """A dimension as a kernel argument."""
    return DimArg(size.name, size.factor) if isinstance(size, Sym) else ConstArg(size)


def count(size: Dim) -> int:
    """A dimension at T = S = R = 1."""
    return size.factor if isinstance(size, Sym) else size


def static(size: Dim) -> int:
    """A dimension that must be known. Raises Unsupported for a symbol."""
    if isinstance(size, Sym):
        raise Unsupported(f"dimension {size} must be known at compile time")
    return size


def rows_and_width(value: Value) -> tuple[Dim, int]:
    """The value as rows of its last axis; one axis is a row, unless it is symbolic."""
    shape = value.type.shape
    if not shape or isinstance(shape[-1], Sym):
        return product(shape), 1
    return product(shape[:-1]), shape[-1]


def label(op: Op) -> str:
    """What a call is for, e.g. `linear:model.layers.3.mlp.down_proj`."""
    return f"{op.kind}:{op.source.module}" if op.source.module else op.kind


# --- weights and caches -----------------------------------------------------------------------------------------------


def choose_layouts(graph: Graph, target: Target) -> dict[str, Weight]:
    """Every parameter with the layout that its kernels read: matrices of linear layers and embeddings in the target's,
    all else (vectors, tables of constants) as float32 rows.
    """
    matrices = set()
    for op in graph.ops:
        if op.kind == "linear":
            matrices.add(op.inputs[1].name)
        elif op.kind == "embedding":
            matrices.add(op.inputs[0].name)
    weights = {}
    for param in graph.params:
        if param.value.name in matrices and param.recipe.constant is None:
            weights[param.value.name] = Weight(param, target.matrix_layout(param.recipe.encoding))
        else:
            plain = Param(param.value, replace(param.recipe, encoding=FLOAT32))
            weights[param.value.name] = Weight(plain, "rows")
    return weights


def weight_shape(weight: Weight) -> tuple[int, ...]:
    """The shape of a weight, all known."""
    return tuple(static(size) for size in weight.param.value.type.shape)


def weight_bytes(weight: Weight) -> int:
    """Bytes of a weight as packed."""
    encoding = weight.param.recipe.encoding
    if encoding is None:
        raise InternalError(f"the encoding of {weight.param.value.name} was not resolved")
    return layout_bytes(weight.layout, encoding, weight_shape(weight))


def group_caches(graph: Graph, target: Target, dtype: KvDType) -> tuple[CacheResource, ...]:
    """Cache groups: layers of the same shape and window share one."""
    layers: dict[tuple[int, int, int, int], list[int]] = {}
    for cache in sorted(graph.caches, key=lambda cache: cache.layer):
        layers.setdefault((cache.heads, cache.key_dim, cache.value_dim, cache.window), []).append(cache.layer)
    return tuple(
        CacheResource(
            kind="kv",
            layers=tuple(members),
            page_tokens=target.page_tokens,
            page_bytes=page_bytes(heads, key_dim, value_dim, target.page_tokens, dtype),
            heads=heads,
            key_dim=key_dim,
            value_dim=value_dim,
            dtype=dtype,
            layout=target.kv_layout,
            window=window,
        )
        for (heads, key_dim, value_dim, window), members in layers.items()
    )
