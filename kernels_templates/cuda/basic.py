"""CUDA kernel families that work row by row or element by element.

They have the names, parameters and arguments of the CPU's families, but activations are in the type `real`, and float
weights lie in rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from ..catalog import ANY, BOOLS, POINTWISE_INPUTS, ArgSpec, Axis, Family, Grid, ParamValue, dim_arg, float_arg, int_arg
from ..packing import panel_encodings

REALS = ("float32", "float16", "bfloat16")
THREADS = 256


def real_arg(name: str, when: str = "") -> ArgSpec:
    """Activations that are read."""
    return ArgSpec(name, "const real *", "in", when)


def out_arg(name: str, when: str = "") -> ArgSpec:
    """Activations that are written."""
    return ArgSpec(name, "real *", "out", when)


def weight_arg(name: str, when: str = "") -> ArgSpec:
    """A vector or table of floats."""
    return ArgSpec(name, "const float *", "weight", when)


def blocks(*factors: str, divisor: int = 1) -> Callable[[Mapping[str, ParamValue]], Grid]:
    """`THREADS` threads in a block for every `divisor` of the product of some arguments."""
    grid = Grid(THREADS, Axis(factors, divisor))
    return lambda params: grid


NORM = Family(
    name="norm",
    template="cuda/norm.cu.j2",
    params={
        "real": REALS,
        "kind": ("rms", "layer", "l2"),
        "row_threads": (128, 256, 512),
        **dict.fromkeys(("has_weight", "has_bias", "has_residual"), BOOLS),
    },
    args=(
        *(real_arg("x"), real_arg("residual", "has_residual")),
        *(weight_arg("weight", "has_weight"), weight_arg("bias", "has_bias")),
        *(out_arg("sum_out", "has_residual"), out_arg("out")),
        *(dim_arg("rows"), int_arg("W"), int_arg("weight_rows"), float_arg("eps"), float_arg("offset")),
    ),
    ops=("norm", "add_norm"),
    doc="A block of `row_threads` makes a row of W: sum_out = x + residual, then norm(sum_out) * (weight + offset) "
    "+ bias. Row r takes row r % weight_rows of weight and bias [weight_rows, W].",
    grid=lambda params: Grid(int(params["row_threads"]), Axis(("rows",))),
)


def norm_threads(row_bytes: int) -> int:
    """Threads for a row of `norm`: each has two loads of 16 bytes, unless it takes more than a block may have."""
    return next((threads for threads in (128, 256) if row_bytes <= 32 * threads), 512)


EMBEDDING = Family(
    name="embedding",
    template="cuda/embedding.cu.j2",
    params={"real": REALS, "encoding": panel_encodings()},
    args=(
        *(ArgSpec("weight", "const uint8_t *", "weight"), ArgSpec("ids", "const int32_t *", "input"), out_arg("out")),
        *(dim_arg("T"), int_arg("V"), int_arg("W"), float_arg("scale")),
    ),
    ops=("embedding",),
    doc="out[T, W] = scale * weight[ids[T]]; an id outside [0, V) gives NaN. Floats lie in `rows`, affine "
    "weights in `operand16`.",
    layouts=("rows", "operand16"),
    grid=blocks("T"),
)

TAKE_ROWS = Family(
    name="take_rows",
    template="cuda/take_rows.cu.j2",
    params={"real": REALS},
    args=(real_arg("x"), ArgSpec("rows", "const toolkit_row *", "input"), out_arg("out"), dim_arg("R"), int_arg("W")),
    ops=("take_rows",),
    doc="out[r] = x[rows[r].token] for x[T, W].",
    grid=blocks("R"),
)

_FORMS = dict.fromkeys((f"in{i}" for i in range(POINTWISE_INPUTS)), ("", "t", "n", "1", "s"))
"""How each input of an expression spreads over the result."""

POINTWISE = Family(
    name="pointwise",
    template="cuda/pointwise.cu.j2",
    params={"real": REALS, "expr": ANY, **_FORMS},
    args=(
        *(real_arg(f"in{i}", f"in{i}") for i in range(POINTWISE_INPUTS)),
        out_arg("out"),
        dim_arg("rows"),
        int_arg("W"),
    ),
    ops=("pointwise",),
    doc="An expression over inputs [rows, W] (t), [W] (n), [rows, 1] (1) and single numbers (s).",
    grid=blocks("rows", "W", divisor=THREADS),
)

RANDOM_FILL = Family(
    name="random_fill",
    template="cuda/random_fill.cu.j2",
    params={},
    args=(
        *(ArgSpec("out", "uint8_t *", "out"), ArgSpec("keep", "const uint8_t *", "in")),
        ArgSpec("value", "const uint8_t *", "in"),
        *(ArgSpec(name, "int64_t", "const") for name in ("bytes", "first", "period")),
        *(ArgSpec(name, "uint64_t", "const") for name in ("key0", "key1")),
    ),
    ops=(),
    doc="Makes `bytes` bytes of a random weight from block `first` of 32 bytes on; see runtime/random_weights.py.",
    grid=blocks("bytes", divisor=32 * THREADS),
)

COPY = Family(
    name="copy",
    template="cuda/copy.cu.j2",
    params={"real": REALS},
    args=(
        *(real_arg("x"), out_arg("out"), dim_arg("rows"), int_arg("width")),
        *(int_arg("x_stride"), int_arg("x_offset"), int_arg("out_stride"), int_arg("out_offset")),
    ),
    ops=("slice", "concat"),
    doc="Copies `width` elements a row between rows of different strides: slices and concatenations of the last axis.",
    grid=blocks("rows", "width", divisor=THREADS),
)

REDUCE = Family(
    name="reduce",
    template="cuda/reduce.cu.j2",
    params={"real": REALS, "op": ("sum", "mean", "max")},
    args=(real_arg("x"), out_arg("out"), dim_arg("rows"), int_arg("W")),
    ops=("reduce",),
    doc="out[r] = sum, mean or maximum of x[r, :W].",
    grid=blocks("rows"),
)

SOFTMAX = Family(
    name="softmax",
    template="cuda/softmax.cu.j2",
    params={"real": REALS},
    args=(real_arg("x"), out_arg("out"), dim_arg("rows"), int_arg("W")),
    ops=("softmax",),
    doc="Softmax over rows of W.",
    grid=blocks("rows"),
)

REDUCTION = Family(
    name="reduction",
    template="cuda/reduction.cu.j2",
    params={"real": REALS, "exprs": ANY, **_FORMS, **dict.fromkeys(("column", "first_out"), BOOLS)},
    args=(
        *(real_arg(f"in{i}", f"in{i}") for i in range(POINTWISE_INPUTS)),
        *(out_arg("first", "first_out"), out_arg("out"), dim_arg("rows"), int_arg("W")),
    ),
    ops=("reduction",),
    doc="Expressions with reductions over rows of W, of inputs as a pointwise kernel has them: out[rows, W], or "
    "out[rows] if it is one `column`; with two expressions, also the first's numbers.",
    grid=blocks("rows"),
)

FAMILIES: tuple[Family, ...] = (NORM, EMBEDDING, TAKE_ROWS, POINTWISE, RANDOM_FILL, COPY, REDUCE, SOFTMAX, REDUCTION)
