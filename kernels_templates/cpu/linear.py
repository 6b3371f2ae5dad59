"""CPU kernel families that read packed weights: linear layers, embeddings and activation quantization."""

from __future__ import annotations

from ..catalog import ArgSpec, Family
from ..packing import panel_encodings

_EXTRA = ("", "t", "n")

EMBEDDING = Family(
    name="embedding",
    template="cpu/embedding.cpp.j2",
    batch_invariant=True,
    params={"encoding": panel_encodings(), "layout": ("rows", "panel16")},
    args=(
        ArgSpec("weight", "const uint8_t *", "weight"),
        ArgSpec("ids", "const int32_t *", "input"),
        ArgSpec("out", "float *", "out"),
        ArgSpec("T", "int32_t", "dim"),
        ArgSpec("V", "int32_t", "const"),
        ArgSpec("W", "int32_t", "const"),
        ArgSpec("scale", "float", "const"),
    ),
    ops=("embedding",),
    doc="out[T, W] = scale * weight[ids[T]]; an id outside [0, V) gives NaN. Layout `rows` holds floats alone.",
    layouts=("rows", "panel16"),
)

QUANTIZE = Family(
    name="quantize",
    template="cpu/quantize.cpp.j2",
    batch_invariant=True,
    params={},
    args=(
        ArgSpec("x", "const float *", "in"),
        ArgSpec("q8", "uint8_t *", "out"),
        ArgSpec("rows", "int32_t", "dim"),
        ArgSpec("K", "int32_t", "const"),
    ),
    ops=(),
    doc="q8[rows] = the q8 form of x[rows, K] (see packing.py); K is a multiple of 32.",
)

LINEAR = Family(
    name="linear",
    template="cpu/linear.cpp.j2",
    batch_invariant=True,
    params={
        "encoding": panel_encodings(),
        "has_bias": (False, True),
        "epilogue": (),
        "extra1": _EXTRA,
        "extra2": _EXTRA,
        "extra3": _EXTRA,
        "extra4": _EXTRA,
        **dict.fromkeys(("gated", "float_out", "q8_out"), (False, True)),
    },
    args=(
        ArgSpec("x", "const void *", "in"),
        ArgSpec("weight", "const uint8_t *", "weight"),
        ArgSpec("bias", "const float *", "weight", when="has_bias"),
        ArgSpec("extra1", "const float *", "in", when="extra1"),
        ArgSpec("extra2", "const float *", "in", when="extra2"),
        ArgSpec("extra3", "const float *", "in", when="extra3"),
        ArgSpec("extra4", "const float *", "in", when="extra4"),
        ArgSpec("out", "float *", "out", when="float_out"),
        ArgSpec("q8", "uint8_t *", "out", when="q8_out"),
        ArgSpec("rows", "int32_t", "dim"),
        ArgSpec("N", "int32_t", "const"),
        ArgSpec("K", "int32_t", "const"),
    ),
    ops=("linear",),
    doc="""out[rows, N] = epilogue(x @ weight.T + bias, extras), as floats, as q8 rows or both.

x is float32 [rows, K] for float encodings, q8 rows for affine ones (K a multiple of 32). In the epilogue, in0 is the
product with its bias and in1.. are the extras: "t" is as large as the result, "n" is a row; an extra may be `out`
itself. If `gated`, in0 is the first and in1 the second half of the product's columns, in2.. are the extras, and the
result is [rows, N / 2]; N is a multiple of 32 then. q8 needs the result's columns to be a multiple of 32.
Every output is summed over K in one order, whatever the number of rows and threads.""",
    layouts=("panel16",),
)

FAMILIES: tuple[Family, ...] = (EMBEDDING, QUANTIZE, LINEAR)
