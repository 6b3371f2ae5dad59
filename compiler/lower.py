"""Lowering: each fused op becomes calls of generated kernels over virtual buffers.

`RULES` is the one table from op kinds to kernels; a kind without a row that has a pointwise expression becomes a
`pointwise` kernel. A linear layer over affine weights reads 8-bit activations: they are quantized once for all the
linear layers of a value, by the norm or activation that makes it where possible.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod

from ..kernels_templates import expression as ex
from ..kernels_templates.catalog import POINTWISE_INPUTS, ParamValue
from ..kernels_templates.cuda.attention import BLOCKS, can_decode_and_write, decode_scratch
from ..kernels_templates.cuda.basic import norm_threads
from ..kernels_templates.cuda.choose import choose_linear, other_linear
from ..kernels_templates.cuda.linear import gives_norms
from ..kernels_templates.cuda.sample import sample_parts, sample_scratch
from ..kernels_templates.packing import PANEL
from ..runtime.errors import InternalError, UserError
from ..runtime.plan import CacheArg, ConstArg, DimArg, InputArg, KvDType
from .ir import Graph, Op, Value
from .lowered import Argument, Lowered, View, place_barriers
from .lowering import GpuGenerator, Lowering, Place, Rows, Unsupported, count, dim, label, rows_and_width, static
from .op_spec import bool_attr, broadcast, float_attr, int_attr, str_attr
from .ops import OPS
from .ops_fused import shape_of
from .shapes import Bounds, Dim, Shape, Sym, product
from .targets import FloatDType, Target

Rule = Callable[[Lowering, Op], None]

MAX_EXTRAS = 4
"""Extra inputs of a linear layer's epilogue."""
MAX_POINTWISE = POINTWISE_INPUTS
"""Inputs of a pointwise kernel."""


class NoKernelError(UserError):
    """A target lacks kernels: `blockers` are the ops, with their modules, and why."""

    def __init__(self, target: str, blockers: tuple[str, ...]) -> None:
        self.blockers = blockers
        super().__init__(f"target {target} can't run this model: it has no kernel for {'; '.join(blockers)}")


def lower(
    graph: Graph,
    target: Target,
    bounds: Bounds,
    kv_dtype: KvDType,
    *,
    dtype: FloatDType = "float32",
    deterministic: bool = False,
    alternatives: int = 0,
    generator: GpuGenerator = "cuda",
) -> tuple[Lowered, ...]:
    """The kernel calls of a fused graph whose weight encodings are resolved, for each bucket of the target.

    `kv_dtype` is that of the caches, `dtype` the model's, and `deterministic` allows batch-invariant kernels alone. On
    GPUs linear layers name up to so many `alternatives` to their kernels, for `toolkit tune`, and kernels are those of
    `generator`.
    Raises NoKernelError naming every op that the target has no kernel for.
    """
    blockers: dict[str, None] = {}
    buckets = []
    for limits in target.buckets(bounds):
        low = Lowering(
            *(graph, target, limits, kv_dtype),
            real=target.real(dtype),
            deterministic=deterministic,
            alternatives=alternatives,
            generator=generator,
        )
        buckets.append(_lower(low, graph, blockers))
    if blockers:
        raise NoKernelError(target.name, tuple(blockers))
    first = buckets[0]
    if any((each.weights, each.caches) != (first.weights, first.caches) for each in buckets):
        raise InternalError(f"buckets of {target.name} disagree on how weights or caches are stored")
    return tuple(buckets)


def _lower(low: Lowering, graph: Graph, blockers: dict[str, None]) -> Lowered:
    """The calls of one bucket; what has no kernel goes to `blockers`."""
    for op in graph.ops:
        try:
            _rule(op)(low, op)
        except Unsupported as problem:
            blockers[f"{label(op)}: {problem}"] = None
            for value in op.outputs:
                low.put(value, _assumed(low, op, value))
    forward = len(low.calls)
    try:
        _sample(low, graph.outputs[0])
    except Unsupported as problem:
        blockers[f"sample: {problem}"] = None
    calls = place_barriers(low.calls) if low.target.kind == "cpu" else tuple(low.calls)  # launches of a GPU are ordered
    return Lowered(low.limits, calls[:forward], calls[forward:], low.buffers, low.weights, low.caches)


def _rule(op: Op) -> Rule:
    if op.kind in RULES:
        return RULES[op.kind]
    if OPS[op.kind].expression(op.attrs, len(op.inputs)) is not None:
        return _pointwise
    return _no_kernel


def _no_kernel(low: Lowering, op: Op) -> None:
    raise Unsupported(f"({', '.join(str(value.type) for value in op.inputs)})")


def _assumed(low: Lowering, op: Op, value: Value) -> Place:
    """A place for the result of an op that has no kernel, so that the ops behind it can be checked too."""
    if value.type.dtype == "cache":
        return next(low.place(source) for source in op.inputs if source.type.dtype == "cache")
    rows, width = rows_and_width(value)
    return low.rows(value) if value.name in low.buffers else low.new_rows(value.name, rows, width)


# --- weights and activations ------------------------------------------------------------------------------------------


def _embedding(low: Lowering, op: Op) -> None:
    table, ids = op.inputs
    if low.encoding(table).levels == "e4m3" and low.target.kind == "cpu":
        raise Unsupported("weights in 8-bit floats, which CPUs have no kernel for: --quant int8 has")
    rows, width = (static(size) for size in table.type.shape)
    if not isinstance(low.place(ids), InputArg):
        raise Unsupported(f"{ids} is computed, but ids must be a step input")
    args: dict[str, Argument] = {
        "weight": low.pointer(table),
        "ids": low.pointer(ids),
        "out": low.output(op.output),
        "T": dim(product(ids.type.shape)),
        "V": ConstArg(rows),
        "W": ConstArg(width),
        "scale": ConstArg(float_attr(op.attrs, "scale")),
    }
    params: dict[str, ParamValue] = {"encoding": low.encoding(table).name}
    if low.target.kind == "cpu":
        params["layout"] = low.weights[table.name].layout
    low.call("embedding", params, args, op, flops=width)


def _take_rows(low: Lowering, op: Op) -> None:
    x, rows = op.inputs
    if low.place(rows) != InputArg("rows"):
        raise Unsupported(f"{rows} is not the step input `rows`")
    if low.limits.decode:  # every token is sampled
        low.put(op.output, low.place(x))
        return
    args: dict[str, Argument] = {
        "x": low.pointer(x),
        "rows": InputArg("rows"),
        "out": low.output(op.output),
        "R": dim(rows.type.shape[0]),
        "W": ConstArg(static(x.type.shape[1])),
    }
    low.call("take_rows", {}, args, op)


def _linear(low: Lowering, op: Op) -> None:
    x, weight = op.inputs[:2]
    columns, inner = (static(size) for size in weight.type.shape)
    rows = product(x.type.shape[:-1])
    encoding = low.encoding(weight)
    has_bias = bool_attr(op.attrs, "has_bias")
    extras = op.inputs[2 + has_bias :]
    gated = bool_attr(op.attrs, "gated")
    if encoding.levels == "e4m3" and low.target.kind == "cpu":
        raise Unsupported("weights in 8-bit floats, which CPUs have no kernel for: --quant int8 has")
    if len(extras) > MAX_EXTRAS:
        raise Unsupported(f"an epilogue with {len(extras)} extra inputs, more than {MAX_EXTRAS}")
    if gated and encoding.kind == "affine" and low.target.kind == "cuda" and columns % (2 * PANEL):
        raise Unsupported(f"halves of {columns} columns, which are no multiple of {2 * PANEL}")
    args: dict[str, Argument] = {
        "weight": low.pointer(weight),
        "rows": dim(rows),
        "N": ConstArg(columns),
        "K": ConstArg(inner),
    }
    if has_bias:
        args["bias"] = low.pointer(op.inputs[2])
    (family, own), *others = _linear_kernels(low, rows, columns, inner, encoding.name, gated=gated)
    if family == "linear_float8":
        args["x"], args["x_scale"] = low.float8(x)
    else:
        args["x"] = low.quantized(x) if encoding.kind == "affine" and low.target.kind == "cpu" else low.pointer(x)
    params: dict[str, ParamValue] = {
        "has_bias": has_bias,
        "epilogue": str_attr(op.attrs, "epilogue"),
        "gated": gated,
    }
    for index in range(MAX_EXTRAS):
        name = f"extra{index + 1}"
        params[name] = ""
        if index < len(extras):
            params[name] = "t" if extras[index].type.shape == op.output.type.shape else "n"
            args[name] = low.pointer(extras[index])
    if family == "linear_skinny":
        norm = _norm_behind(low, op, own)
        params |= {"norm_in": False, "norm_out": norm is not None}
        if isinstance(place := low.place(x), Rows) and place.buffer in low.unscaled:
            params["norm_in"] = True
            args["squares"], args["eps"] = low.unscaled[place.buffer][0], ConstArg(low.unscaled[place.buffer][1])
        if norm is not None:
            args |= _norm_args(low, op, norm)
            others = [each for each in others if gives_norms(columns, low.real, each[1])]
    if "out" not in args:
        wanted, outputs = low.output_as_wanted(op.output)
        params |= wanted
        args |= outputs
    low.call(
        family,
        own | params,
        args,
        op,
        flops=2 * count(rows) * columns * inner,
        others=[(other, its_own | params) for other, its_own in others],
    )


def _norm_behind(low: Lowering, op: Op, params: Mapping[str, ParamValue]) -> Op | None:
    """The add_norm that a `linear_skinny` of these sizes computes too, if all who read the norm scale it."""
    users = low.uses.get(op.output.name, [])
    if len(users) != 1 or users[0].kind != "add_norm" or bool_attr(op.attrs, "gated") or low.is_output(op.output):
        return None
    norm = users[0]
    weight, residual = norm.inputs[2:3], [value for value in norm.inputs[:2] if value != op.output]
    if (
        str_attr(norm.attrs, "kind") == "rms"
        and bool_attr(norm.attrs, "has_weight")
        and not bool_attr(norm.attrs, "has_bias")
        and len(weight[0].type.shape) == 1
        and len(residual) == 1
        and low.is_placed(residual[0])
        and op.output.type.shape == norm.outputs[1].type.shape
        and gives_norms(static(op.output.type.shape[-1]), low.real, params)
        and _all_scale(low, norm.outputs[1])
    ):
        return norm
    return None


def _all_scale(low: Lowering, value: Value) -> bool:
    """Whether all who read a norm are linear layers that can scale it."""
    if low.is_output(value):
        return False
    for user in low.uses.get(value.name, []):
        if user.kind == "take_rows" and low.limits.decode:
            if not _all_scale(low, user.output):
                return False
        elif user.kind == "linear" and value not in user.inputs[1:]:
            columns, inner = (static(size) for size in user.inputs[1].type.shape)
            encoding, gated = low.encoding(user.inputs[1]).name, bool_attr(user.attrs, "gated")
            rows = product(value.type.shape[:-1])
            if _linear_kernels(low, rows, columns, inner, encoding, gated=gated)[0][0] != "linear_skinny":
                return False
        else:
            return False
    return True


def _norm_args(low: Lowering, op: Op, norm: Op) -> dict[str, Argument]:
    """Arguments of a linear layer that also computes the norm behind it, whose results are placed."""
    residual = next(value for value in norm.inputs[:2] if value != op.output)
    rows, width = rows_and_width(norm.outputs[1])
    args: dict[str, Argument] = {
        "residual": low.pointer(residual),
        "norm_weight": low.pointer(norm.inputs[2]),
        "sum_out": low.output(norm.outputs[0]),
        "out": low.output(norm.outputs[1]),
        "squares_out": low.new_buffer(f"{norm.outputs[1].name}:squares", rows, width // 16 * 4),
        "offset": ConstArg(float_attr(norm.attrs, "offset")),
    }
    squares = args["squares_out"]
    assert isinstance(squares, View)
    low.unscaled[norm.outputs[1].name] = squares, float_attr(norm.attrs, "eps")
    return args


def _linear_kernels(
    low: Lowering, rows: Dim, columns: int, inner: int, encoding: str, *, gated: bool
) -> list[tuple[str, dict[str, ParamValue]]]:
    """The family of a linear layer and the parameters that not all such families have, and then the alternatives."""
    if low.target.kind == "cpu":
        return [("linear", {"encoding": encoding})]
    most = low.limits.bounds.largest(rows)
    narrow = low.target.archs == ("sm90",)
    chosen = choose_linear(
        most, columns=columns, inner=inner, real=low.real, encoding=encoding, gated=gated, narrow=narrow
    )
    if not low.alternatives:
        return [chosen]
    others = other_linear(most, *chosen, columns=columns, inner=inner, gated=gated)
    return [chosen, *others[: low.alternatives]]


# --- norms and activations --------------------------------------------------------------------------------------------


def _norm(low: Lowering, op: Op) -> None:
    _emit_norm(low, op, op.inputs[0], None, op.inputs[1:])


def _add_norm(low: Lowering, op: Op) -> None:
    if op.outputs[1].name in low.unscaled:  # the linear layer before it has computed it
        return
    _emit_norm(low, op, op.inputs[0], op.inputs[1], op.inputs[2:])


def _emit_norm(low: Lowering, op: Op, x: Value, residual: Value | None, weights: Sequence[Value]) -> None:
    result = op.outputs[-1]
    rows, width = rows_and_width(result)
    shapes = {weight.type.shape for weight in weights}
    if len(shapes) > 1:
        raise Unsupported(f"a norm whose weight and bias differ in shape: {', '.join(str(w.type) for w in weights)}")
    args: dict[str, Argument] = {
        "x": low.pointer(x),
        "rows": dim(rows),
        "W": ConstArg(width),
        "weight_rows": ConstArg(prod(static(size) for shape in shapes for size in shape[:-1])),
        "eps": ConstArg(float_attr(op.attrs, "eps")),
        "offset": ConstArg(float_attr(op.attrs, "offset")),
    }
    flags = [name for name in ("weight", "bias") if bool_attr(op.attrs, f"has_{name}")]
    args |= {name: low.pointer(weight) for name, weight in zip(flags, weights, strict=True)}
    if residual is not None:
        args["residual"] = low.pointer(residual)
        args["sum_out"] = low.output(op.outputs[0])
    wanted, outputs = low.output_as_wanted(result)
    params: dict[str, ParamValue] = {
        "kind": str_attr(op.attrs, "kind"),
        "has_weight": "weight" in flags,
        "has_bias": "bias" in flags,
        "has_residual": residual is not None,
        **({"row_threads": norm_threads(width * low.real_bytes)} if low.target.kind == "cuda" else {}),
        **wanted,
    }
    low.call("norm", params, args | outputs, op, flops=6 * count(rows) * width)


def _pointwise(low: Lowering, op: Op) -> None:
    if len(op.inputs) > MAX_POINTWISE:
        raise Unsupported(f"a pointwise expression of {len(op.inputs)} inputs, more than {MAX_POINTWISE}")
    axis, forms = broadcast_forms(op.output.type.shape, [value.type.shape for value in op.inputs])
    expression = str(OPS[op.kind].expression(op.attrs, len(op.inputs)))
    shape = op.output.type.shape
    width = prod(static(size) for size in shape[axis:])
    params: dict[str, ParamValue] = {"expr": expression, **{f"in{index}": "" for index in range(MAX_POINTWISE)}}
    args: dict[str, Argument] = {"rows": dim(product(shape[:axis])), "W": ConstArg(width)}
    for index, (value, form) in enumerate(zip(op.inputs, forms, strict=True)):
        if isinstance(low.place(value), InputArg):
            raise Unsupported(f"{value} is a step input of integers")
        params[f"in{index}"] = form
        args[f"in{index}"] = low.pointer(value)
    args["out"] = low.output(op.output)
    low.call("pointwise", params, args, op, flops=expression.count("(") * count(product(shape)))


def broadcast_forms(out: Shape, inputs: Sequence[Shape]) -> tuple[int, list[str]]:
    """Where to split the result's axes into rows and columns so that every input broadcasts over one side only.

    Returns the first column axis, and for each input "t" (every element), "n" (one row), "1" (one column) or "s" (a
    single number). Raises Unsupported if there is no such axis.
    """
    last = len(out) + (not out or isinstance(out[-1], Sym))
    for axis in (*range(1, last), 0):
        if any(isinstance(size, Sym) for size in out[axis:]):
            continue
        forms = [_form(out, shape, axis) for shape in inputs]
        if all(forms):
            return axis, forms
    shapes = ", ".join(str(list(map(str, shape))) for shape in inputs)
    raise Unsupported(f"broadcasting {shapes} along rows and columns at once")


def _form(out: Shape, shape: Shape, axis: int) -> str:
    full = (1,) * (len(out) - len(shape)) + shape
    if full == out:
        return "t"
    if all(size == 1 for size in full):
        return "s"
    if full[axis:] == out[axis:] and all(size == 1 for size in full[:axis]):
        return "n"
    if full[:axis] == out[:axis] and all(size == 1 for size in full[axis:]):
        return "1"
    return ""


def _softmax(low: Lowering, op: Op) -> None:
    _last_axis(op)
    rows, width = rows_and_width(op.inputs[0])
    args = {"x": low.pointer(op.inputs[0]), "out": low.output(op.output), "rows": dim(rows), "W": ConstArg(width)}
    low.call("softmax", {}, args, op, flops=8 * count(rows) * width)


def _reduce(low: Lowering, op: Op) -> None:
    _last_axis(op)
    rows, width = rows_and_width(op.inputs[0])
    args = {"x": low.pointer(op.inputs[0]), "out": low.output(op.output), "rows": dim(rows), "W": ConstArg(width)}
    low.call("reduce", {"op": str_attr(op.attrs, "op")}, args, op, flops=count(rows) * width)


def _last_axis(op: Op) -> None:
    axis, rank = int_attr(op.attrs, "axis"), len(op.inputs[0].type.shape)
    if axis != rank - 1:
        raise Unsupported(f"axis {axis} of {op.inputs[0].type}, only the last one can be reduced")


def _reduction(low: Lowering, op: Op) -> None:
    bodies = ex.parse_all(str_attr(op.attrs, "exprs"))
    rows, width, forms = row_forms(bodies, [value.type.shape for value in op.inputs])
    column = op.outputs[-1].type.shape[-1] != width
    params: dict[str, ParamValue] = {
        "exprs": str_attr(op.attrs, "exprs"),
        **{f"in{index}": "" for index in range(MAX_POINTWISE)},
        "column": column,
        "first_out": len(bodies) == 2,
    }
    args: dict[str, Argument] = {"rows": dim(rows), "W": ConstArg(width)}
    for index, (value, form) in enumerate(zip(op.inputs, forms, strict=True)):
        if isinstance(low.place(value), InputArg):
            raise Unsupported(f"{value} is a step input of integers")
        params[f"in{index}"] = form
        args[f"in{index}"] = low.pointer(value)
    if len(bodies) == 2:
        args["first"] = low.output(op.outputs[0])
    wanted, outputs = low.output_as_wanted(op.outputs[-1])
    operators = str_attr(op.attrs, "exprs").count("(")
    low.call("reduction", params | wanted, args | outputs, op, flops=operators * count(rows) * width)


def row_forms(bodies: Sequence[ex.Expression], inputs: Sequence[Shape]) -> tuple[Dim, int, list[str]]:
    """The rows, the columns and how each input spreads over them, for expressions with reductions over the columns.

    Raises Unsupported if a kernel can't have them.
    """
    whole = broadcast(inputs)
    width = whole[-1] if whole else 1
    if len(inputs) > MAX_POINTWISE or len(bodies) > 2:
        raise Unsupported(f"{len(bodies)} expressions of {len(inputs)} inputs, more than 2 of {MAX_POINTWISE}")
    if isinstance(width, Sym) or width == 1:
        raise Unsupported(f"a reduction over {width} columns")
    for reduction in ex.reductions(*bodies):
        if shape_of(reduction.args[0], inputs)[-1:] != (width,):
            raise Unsupported(f"a reduction of some other number of columns than {width}")
    if len(bodies) == 2 and any(shape_of(body, inputs) != whole for body in bodies):
        raise Unsupported("two results of different shapes")
    forms = [_form(whole, shape, len(whole) - 1) for shape in inputs]
    if not all(forms):
        raise Unsupported(f"broadcasting {', '.join(str(list(map(str, shape))) for shape in inputs)} within rows")
    return product(whole[:-1]), width, forms


# --- attention --------------------------------------------------------------------------------------------------------


def _rope(low: Lowering, op: Op) -> None:
    x, cos, sin = op.inputs
    tokens, heads, width = x.type.shape
    place = low.as_rows(x, tokens)
    args: dict[str, Argument] = {
        "x": low.view(place),
        "cos": low.pointer(cos),
        "sin": low.pointer(sin),
        "out": low.output(op.output),
        "T": dim(tokens),
        "heads": dim(heads),
        "x_stride": ConstArg(place.stride),
    }
    params: dict[str, ParamValue] = {
        "head_dim": static(width),
        "rotary": 2 * static(cos.type.shape[1]),
        "style": str_attr(op.attrs, "style"),
    }
    low.call("rope", params, args, op, flops=6 * static(heads) * static(width))


def _rope_table(low: Lowering, op: Op) -> None:
    positions, lengths, frequencies = op.inputs
    rows, width = (static(size) for size in frequencies.type.shape)
    args: dict[str, Argument] = {
        "positions": low.pointer(positions),
        "lengths": low.pointer(lengths),
        "frequencies": low.pointer(frequencies),
        "out": low.output(op.output),
        "T": dim(positions.type.shape[0]),
        "W": ConstArg(width),
        "first": ConstArg(int_attr(op.attrs, "first")),
        "last": ConstArg(rows - 1),
        "scale": ConstArg(float_attr(op.attrs, "scale")),
    }
    low.call("rope_table", {"function": str_attr(op.attrs, "function")}, args, op, flops=20 * width)


def _rope_kv_write(low: Lowering, op: Op) -> None:
    qkv, *rest, cache = op.inputs
    heads, kv_heads = int_attr(op.attrs, "heads"), int_attr(op.attrs, "kv_heads")
    storage = _cache(low, cache)
    has_rope, has_norm = bool_attr(op.attrs, "has_rope"), bool_attr(op.attrs, "has_qk_norm")
    names = (("cos", "sin") if has_rope else ()) + (("q_weight", "k_weight") if has_norm else ())
    args: dict[str, Argument] = {name: low.pointer(value) for name, value in zip(names, rest, strict=True)}
    args |= {
        "qkv": low.pointer(qkv),
        "slots": InputArg("slots", storage.group),
        "cache": storage,
        "eps": ConstArg(float_attr(op.attrs, "eps")),
        "offset": ConstArg(float_attr(op.attrs, "offset")),
    }
    width = int_attr(op.attrs, "head_dim")
    if has_norm:
        args["weight_stride"] = ConstArg(width if len(rest[-1].type.shape) > 1 else 0)
    params: dict[str, ParamValue] = {
        "head_dim": width,
        "rotary": 2 * static(rest[0].type.shape[1]) if has_rope else 0,
        "style": str_attr(op.attrs, "style"),
        "has_rope": has_rope,
        "qk_norm": str_attr(op.attrs, "kind") if has_norm else "",
        "dtype": low.kv_dtype,
    }
    low.put(op.outputs[1], storage)
    style, rotary = str(params["style"]), int(params["rotary"])
    if low.limits.decode and can_decode_and_write(width, rotary, style, low.real, low.kv_dtype):
        low.delayed[op.outputs[0].name] = params, args
        return
    args |= {
        "out": low.output(op.outputs[0]),
        "T": dim(qkv.type.shape[0]),
        "heads": ConstArg(heads),
        "kv_heads": ConstArg(kv_heads),
        "page_tokens": ConstArg(low.target.page_tokens),
    }
    low.call("rope_kv_write", params, args, op, flops=8 * (heads + kv_heads) * width)


def _kv_write(low: Lowering, op: Op) -> None:
    k, v, cache = op.inputs
    storage = _cache(low, cache)
    tokens, kv_heads, key_dim = k.type.shape
    keys, values = low.as_rows(k, tokens), low.as_rows(v, tokens)
    args: dict[str, Argument] = {
        "k": low.view(keys),
        "v": low.view(values),
        "slots": InputArg("slots", storage.group),
        "cache": storage,
        "T": dim(tokens),
        "kv_heads": dim(kv_heads),
        "page_tokens": ConstArg(low.target.page_tokens),
        "k_stride": ConstArg(keys.stride),
        "v_stride": ConstArg(values.stride),
    }
    params: dict[str, ParamValue] = {
        "key_dim": static(key_dim),
        "value_dim": static(v.type.shape[2]),
        "dtype": low.kv_dtype,
    }
    low.call("kv_write", params, args, op)
    low.put(op.output, storage)


def _paged_attention(low: Lowering, op: Op) -> None:
    q, cache = op.inputs[:2]
    storage = _cache(low, cache)
    window, softcap = int_attr(op.attrs, "window"), float_attr(op.attrs, "softcap")
    if not bool_attr(op.attrs, "causal"):
        raise Unsupported("attention that is not causal")
    _, heads, key_dim = q.type.shape
    value_dim = int_attr(op.attrs, "value_dim")
    delayed = low.delayed.get(q.name)
    args: dict[str, Argument] = {
        "q": delayed[1].pop("qkv") if delayed else low.pointer(q),
        "cache": storage,
        "pages": InputArg("pages", storage.group),
        "page_stride": InputArg("page_stride", storage.group),
        "seq_start": InputArg("seq_start"),
        "context": InputArg("context"),
        "S": DimArg("S"),
        "heads": dim(heads),
        "kv_heads": ConstArg(int_attr(op.attrs, "kv_heads")),
        "page_tokens": ConstArg(low.target.page_tokens),
        "scale": ConstArg(float_attr(op.attrs, "scale")),
    }
    flags = [name for name in ("sinks", "slopes") if bool_attr(op.attrs, f"has_{name}")]
    args |= {name: low.pointer(value) for name, value in zip(flags, op.inputs[2:], strict=True)}
    if window:
        args["window"] = ConstArg(window)
    if softcap:
        args["softcap"] = ConstArg(softcap)
    params: dict[str, ParamValue] = {
        "key_dim": static(key_dim),
        "value_dim": value_dim,
        "dtype": low.kv_dtype,
        "has_window": window > 0,
        "has_softcap": softcap > 0,
        "has_sinks": "sinks" in flags,
        "has_slopes": "slopes" in flags,
    }
    wanted, outputs = low.output_as_wanted(op.output, static(heads) * value_dim if value_dim % 32 == 0 else None)
    family = "attention"
    if low.target.kind == "cuda":
        family = "attention_decode" if low.limits.decode else "attention_prefill"
        args["blocks"] = ConstArg(BLOCKS)
        if low.limits.decode:
            scratch = decode_scratch(value_dim)
            args["scratch"] = low.new_buffer(f"{op.output.name}:scratch", 1, scratch)
    if delayed:
        family = "attention_decode_write"
        params |= {name: delayed[0][name] for name in ("rotary", "style", "has_rope", "qk_norm")}
        args |= delayed[1]
    low.call(family, params | wanted, args | outputs, op)


def _cache(low: Lowering, value: Value) -> CacheArg:
    place = low.place(value)
    if not isinstance(place, CacheArg):
        raise InternalError(f"{value} is not the state of a cache")
    return place


# --- shapes -----------------------------------------------------------------------------------------------------------


def _alias(low: Lowering, op: Op) -> None:
    low.put(op.output, low.place(op.inputs[0]))


def _cast(low: Lowering, op: Op) -> None:
    source, target = op.inputs[0].type.dtype, op.output.type.dtype
    if isinstance(low.place(op.inputs[0]), InputArg) or target in ("int32", "int64", "bool"):
        raise Unsupported(f"{source} to {target}")
    _alias(low, op)  # all floats are of one type, and a bool is 0.0 or 1.0


def _transpose(low: Lowering, op: Op) -> None:
    shape, perm = op.inputs[0].type.shape, op.attrs["perm"]
    assert isinstance(perm, tuple)
    moved = [int(axis) for axis in perm if shape[int(axis)] != 1]
    if moved != sorted(moved):
        raise Unsupported(f"{op.inputs[0].type} by {perm}")
    _alias(low, op)


def _slice(low: Lowering, op: Op) -> None:
    x = op.inputs[0]
    axis, start, stop = (int_attr(op.attrs, name) for name in ("axis", "start", "stop"))
    inner = prod(static(size) for size in x.type.shape[axis + 1 :])
    place = low.as_rows(x, product(x.type.shape[:axis]))
    view = Rows(place.buffer, place.rows, (stop - start) * inner, place.stride, place.offset + start * inner)
    low.put(op.output, view)


def _concat(low: Lowering, op: Op) -> None:
    axis = int_attr(op.attrs, "axis")
    shape = op.output.type.shape
    rows = product(shape[:axis])
    width = prod(static(size) for size in shape[axis:])
    target = low.new_rows(op.output.name, rows, width)
    low.put(op.output, target)
    offset = 0
    for value in op.inputs:
        part = low.as_rows(value, rows)
        low.copy(part, Rows(target.buffer, rows, part.width, width, offset), label(op))
        offset += part.width


# --- the sampler ------------------------------------------------------------------------------------------------------


def _sample(low: Lowering, logits: Value) -> None:
    rows, width = rows_and_width(logits)
    args: dict[str, Argument] = {
        "logits": low.pointer(logits),
        "rows": InputArg("rows"),
        "results": InputArg("results"),
        "top_tokens": InputArg("top_tokens"),
        "top_logprobs": InputArg("top_logprobs"),
        "R": dim(rows),
        "V": ConstArg(width),
    }
    scratch = 4 * width
    if low.target.kind == "cuda":
        scratch = sample_scratch(width)
        args["tokens"] = InputArg("tokens")
        args["parts"] = low.new_buffer("sample:parts", rows, sample_parts(width))
        measured = {name: args[name] for name in ("logits", "parts", "R", "V")}
        low.call("sample_measure", {}, measured, "sample", flops=4 * count(rows) * width)
    args["scratch"] = low.new_buffer("sample:scratch", rows, scratch)
    low.call("sample", {}, args, "sample", flops=8 * count(rows) * width)


RULES: Mapping[str, Rule] = {
    "embedding": _embedding,
    "take_rows": _take_rows,
    "linear": _linear,
    "norm": _norm,
    "add_norm": _add_norm,
    "reduce": _reduce,
    "softmax": _softmax,
    "reduction": _reduction,
    "rope_table": _rope_table,
    "rope": _rope,
    "rope_kv_write": _rope_kv_write,
    "kv_write": _kv_write,
    "paged_attention": _paged_attention,
    "reshape": _alias,
    "cast": _cast,
    "transpose": _transpose,
    "slice": _slice,
    "concat": _concat,
}
