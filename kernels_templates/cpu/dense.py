"""CPU kernel families other than matrix products: norms, rotary embedding, attention, pointwise work and sampling.

Activations are float32 and row-major. Any number of threads may share a call; no result depends on how many.
"""

from __future__ import annotations

from typing import get_args

from ...runtime.plan import KvDType
from ..catalog import (
    ANY,
    BOOLS,
    CACHE_IN,
    CACHE_OUT,
    POINTWISE_INPUTS,
    ArgSpec,
    Family,
    dim_arg,
    float_arg,
    input_arg,
    int_arg,
)

KV_DTYPES = tuple(dtype for dtype in get_args(KvDType) if dtype != "fp8")


def _in(name: str, when: str = "") -> ArgSpec:
    return ArgSpec(name, "const float *", "in", when)


def _weight(name: str, when: str = "") -> ArgSpec:
    return ArgSpec(name, "const float *", "weight", when)


def _out(name: str, when: str = "") -> ArgSpec:
    return ArgSpec(name, "float *", "out", when)


def _q8(when: str) -> ArgSpec:
    return ArgSpec("q8", "uint8_t *", "out", when)


TAKE_ROWS = Family(
    name="take_rows",
    template="cpu/take_rows.cpp.j2",
    batch_invariant=True,
    params={},
    args=(_in("x"), input_arg("rows", "const toolkit_row *"), _out("out"), dim_arg("R"), int_arg("W")),
    ops=("take_rows",),
    doc="out[r] = x[rows[r].token] for x[T, W].",
)

COPY = Family(
    name="copy",
    template="cpu/copy.cpp.j2",
    batch_invariant=True,
    params={},
    args=(
        *(_in("x"), _out("out"), dim_arg("rows"), int_arg("width")),
        *(int_arg("x_stride"), int_arg("x_offset"), int_arg("out_stride"), int_arg("out_offset")),
    ),
    ops=("slice", "concat"),
    doc="Copies `width` floats a row between rows of different strides: slices and concatenations of the last axis.",
)

NORM = Family(
    name="norm",
    template="cpu/norm.cpp.j2",
    batch_invariant=True,
    params={
        "kind": ("rms", "layer", "l2"),
        **dict.fromkeys(("has_weight", "has_bias", "has_residual", "float_out", "q8_out"), BOOLS),
    },
    args=(
        *(_in("x"), _in("residual", "has_residual")),
        *(_weight("weight", "has_weight"), _weight("bias", "has_bias")),
        *(_out("sum_out", "has_residual"), _out("out", "float_out"), _q8("q8_out")),
        *(dim_arg("rows"), int_arg("W"), int_arg("weight_rows"), float_arg("eps"), float_arg("offset")),
    ),
    ops=("norm", "add_norm"),
    doc="Normalizes rows of W: sum_out = x + residual, then norm(sum_out) * (weight + offset) + bias, as floats, as q8 "
    "or both. Row r takes row r % weight_rows of weight and bias [weight_rows, W]. q8 needs W to be a multiple of 32.",
)

_FORMS = dict.fromkeys((f"in{i}" for i in range(POINTWISE_INPUTS)), ("", "t", "n", "1", "s"))
"""How each input of an expression spreads over the result."""

POINTWISE = Family(
    name="pointwise",
    template="cpu/pointwise.cpp.j2",
    batch_invariant=True,
    params={"expr": ANY, **_FORMS},
    args=(*(_in(f"in{i}", f"in{i}") for i in range(POINTWISE_INPUTS)), _out("out"), dim_arg("rows"), int_arg("W")),
    ops=("pointwise",),
    doc="An expression over inputs [rows, W] (t), [W] (n), [rows, 1] (1) and single numbers (s).",
)

ROPE_TABLE = Family(
    name="rope_table",
    template="cpu/rope_table.cpp.j2",
    batch_invariant=True,
    params={"function": ("cos", "sin")},
    args=(
        *(input_arg("positions"), input_arg("lengths"), _weight("frequencies"), _out("out")),
        *(dim_arg("T"), int_arg("W"), int_arg("first"), int_arg("last"), float_arg("scale")),
    ),
    ops=("rope_table",),
    doc="out[t] = scale * cos or sin of positions[t] * frequencies[r], where r is lengths[t] - first in 0 .. last.",
)

ROPE = Family(
    name="rope",
    template="cpu/rope.cpp.j2",
    batch_invariant=True,
    params={"head_dim": ANY, "rotary": ANY, "style": ("half", "pair")},
    args=(
        *(_in("x"), _in("cos"), _in("sin"), _out("out")),
        *(dim_arg("T"), int_arg("heads"), int_arg("x_stride")),
    ),
    ops=("rope",),
    doc="Rotates the first `rotary` columns of every head of x[T, heads, head_dim] by cos and sin [T, rotary / 2]. "
    "`x_stride` is the number of floats from one token of x to the next; out is contiguous.",
)

ROPE_KV_WRITE = Family(
    name="rope_kv_write",
    template="cpu/rope_kv_write.cpp.j2",
    batch_invariant=True,
    params={
        "head_dim": ANY,
        "rotary": ANY,
        "style": ("half", "pair"),
        "has_rope": BOOLS,
        "qk_norm": ("", "rms", "layer"),
        "dtype": KV_DTYPES,
    },
    args=(
        *(_in("qkv"), _in("cos", "has_rope"), _in("sin", "has_rope")),
        *(_weight("q_weight", "qk_norm"), _weight("k_weight", "qk_norm")),
        *(input_arg("slots"), CACHE_OUT, _out("out")),
        *(
            dim_arg("T"),
            int_arg("heads"),
            int_arg("kv_heads"),
            int_arg("page_tokens"),
            float_arg("eps"),
            float_arg("offset"),
        ),
        int_arg("weight_stride", "qk_norm"),
    ),
    ops=("rope_kv_write",),
    doc="Splits qkv[T, (heads + 2 kv_heads) * head_dim], normalizes and rotates queries and keys, writes keys and "
    "values to the cache at the step's slots, and queries to out[T, heads, head_dim]. `weight_stride` is the number of "
    "floats from one head's norm weights to the next's: 0 if all heads share them.",
)

KV_WRITE = Family(
    name="kv_write",
    template="cpu/kv_write.cpp.j2",
    batch_invariant=True,
    params={"key_dim": ANY, "value_dim": ANY, "dtype": KV_DTYPES},
    args=(
        *(_in("k"), _in("v"), input_arg("slots"), CACHE_OUT),
        *(dim_arg("T"), int_arg("kv_heads"), int_arg("page_tokens"), int_arg("k_stride"), int_arg("v_stride")),
    ),
    ops=("kv_write",),
    doc="Writes k[T, kv_heads, key_dim] and v[T, kv_heads, value_dim] to the cache at the step's slots; the strides "
    "are floats from one token to the next.",
)

ATTENTION = Family(
    name="attention",
    template="cpu/attention.cpp.j2",
    batch_invariant=True,
    params={
        "key_dim": ANY,
        "value_dim": ANY,
        "dtype": KV_DTYPES,
        **dict.fromkeys(("has_window", "has_softcap", "has_sinks", "has_slopes", "float_out", "q8_out"), BOOLS),
    },
    args=(
        *(_in("q"), CACHE_IN, input_arg("pages"), int_arg("page_stride")),
        *(input_arg("seq_start"), input_arg("context")),
        *(_weight("sinks", "has_sinks"), _weight("slopes", "has_slopes")),
        *(_out("out", "float_out"), _q8("q8_out")),
        *(dim_arg("S"), int_arg("heads"), int_arg("kv_heads"), int_arg("page_tokens"), float_arg("scale")),
        *(int_arg("window", "has_window"), float_arg("softcap", "has_softcap")),
    ),
    ops=("paged_attention",),
    doc="Causal attention of q[T, heads, key_dim] over the pages of each sequence, for decode and prefill alike, to "
    "out[T, heads, value_dim], as floats, as q8 rows of all heads or both; q8 needs value_dim to be a multiple of 32. "
    "A query's result is the same to the bit in any batch and any chunking of its prompt.",
)

REDUCTION = Family(
    name="reduction",
    template="cpu/reduction.cpp.j2",
    batch_invariant=True,
    params={
        "exprs": ANY,
        **_FORMS,
        **dict.fromkeys(("column", "first_out", "float_out", "q8_out"), BOOLS),
    },
    args=(
        *(_in(f"in{i}", f"in{i}") for i in range(POINTWISE_INPUTS)),
        *(_out("first", "first_out"), _out("out", "float_out"), _q8("q8_out"), dim_arg("rows"), int_arg("W")),
    ),
    ops=("reduction",),
    doc="Expressions with reductions over rows of W, of inputs as a pointwise kernel has them: out[rows, W], or "
    "out[rows] if it is one `column`, as floats, q8 or both; with two expressions, also the first's floats. q8 needs "
    "W to be a multiple of 32.",
)

REDUCE = Family(
    name="reduce",
    template="cpu/reduce.cpp.j2",
    batch_invariant=True,
    params={"op": ("sum", "mean", "max")},
    args=(_in("x"), _out("out"), dim_arg("rows"), int_arg("W")),
    ops=("reduce",),
    doc="out[r] = sum, mean or maximum of x[r, :W].",
)

SOFTMAX = Family(
    name="softmax",
    template="cpu/softmax.cpp.j2",
    batch_invariant=True,
    params={},
    args=(_in("x"), _out("out"), dim_arg("rows"), int_arg("W")),
    ops=("softmax",),
    doc="Softmax over rows of W.",
)

SAMPLE = Family(
    name="sample",
    template="cpu/sample.cpp.j2",
    batch_invariant=True,
    params={},
    args=(
        *(_in("logits"), input_arg("rows", "const toolkit_row *")),
        ArgSpec("results", "toolkit_result *", "input"),
        ArgSpec("top_tokens", "int32_t *", "input"),
        ArgSpec("top_logprobs", "float *", "input"),
        ArgSpec("scratch", "float *", "scratch"),
        *(dim_arg("R"), int_arg("V")),
    ),
    ops=(),
    doc="Draws a token from each row of logits[R, V], and reports log-probabilities; see ROW in runtime/step.py.",
)

FAMILIES: tuple[Family, ...] = (
    *(TAKE_ROWS, COPY, NORM, POINTWISE, ROPE_TABLE, ROPE, ROPE_KV_WRITE, KV_WRITE),
    *(ATTENTION, REDUCTION, REDUCE, SOFTMAX, SAMPLE),
)
"""CPU kernel families of this module."""
