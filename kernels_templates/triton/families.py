"""Triton kernel families, each with the arguments of the CUDA C++ family that it can stand in for.

A kernel's code is made for the constants that it is called with (`KernelSpec.shape`). Its grid has 32 threads for each
of its warps; how much shared memory it takes is the compiler's choice.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from ..catalog import BOOLS, CACHE_IN, Axis, Family, Grid, ParamValue, Tiles, Variant
from ..cuda import attention, basic
from ..cuda.basic import REALS
from ..cuda.linear import TILED

MOST_COLUMNS = 16384
"""Of a row that stays in registers."""
MOST_TILE = 128
"""Columns of a linear layer's tile where it is not read by tensor maps."""
_SIZES = tuple(1 << power for power in range(15))
_WARPS = (1, 2, 4, 8, 16)


def _rows(params: Mapping[str, ParamValue]) -> Grid:
    return Grid(32 * int(params["warps"]), Axis(("rows",)))


def _elements(params: Mapping[str, ParamValue]) -> Grid:
    rows, columns = (int(params[name]) for name in ("tile_rows", "tile_columns"))
    return Grid(32 * int(params["warps"]), Axis(("rows",), rows), Axis(("W",), columns))


NORM = replace(
    basic.NORM,
    name="norm_triton",
    template="triton/norm.py.j2",
    params={
        **{name: values for name, values in basic.NORM.params.items() if name != "row_threads"},
        **{"block": _SIZES, "warps": _WARPS},
    },
    doc="As `norm`, in Triton: a program makes a row, whose `block` numbers stay in registers.",
    grid=_rows,
    triton=True,
)

POINTWISE = replace(
    basic.POINTWISE,
    name="pointwise_triton",
    template="triton/pointwise.py.j2",
    params={**basic.POINTWISE.params, "tile_rows": _SIZES, "tile_columns": _SIZES, "warps": _WARPS},
    doc="As `pointwise`, in Triton: a program makes `tile_rows` rows by `tile_columns` columns.",
    grid=_elements,
    triton=True,
)

REDUCTION = replace(
    basic.REDUCTION,
    name="reduction_triton",
    template="triton/reduction.py.j2",
    params={**basic.REDUCTION.params, "block": _SIZES, "warps": _WARPS},
    doc="As `reduction`, in Triton: a program makes a row, whose `block` numbers stay in registers.",
    grid=_rows,
    triton=True,
)


def _linear(params: Mapping[str, ParamValue]) -> Grid:
    rows, columns = int(params["tile_rows"]), min(int(params["tile_columns"]), MOST_TILE)
    return Grid(32 * int(params["warps"]), Axis(("N",), columns), Axis(("rows",), rows))


def _persistent(params: Mapping[str, ParamValue]) -> Grid:
    if params["real"] == "float32":
        return _linear(params)
    columns = int(params["tile_columns"])  # more programs than tiles if the last rows are few: they have nothing to do
    return Grid(32 * int(params["warps"]), Axis(("N", "rows"), columns * 16, persistent=True))


def _maps(params: Mapping[str, ParamValue]) -> Mapping[str, Tiles]:
    if params["real"] == "float32":
        return {}
    columns = int(params["tile_columns"]) // (2 if params["gated"] else 1)
    return {"x": Tiles("rows", "K", int(params["tile_rows"])), "weight": Tiles("N", "K", columns)}


LINEAR = Family(
    name="linear_triton",
    template="triton/linear.py.j2",
    params={
        **{"real": REALS, "tile_rows": (16, 32, 64, 128, 256), "tile_columns": (16, 32, 64, 128, 256)},
        **{"band": _SIZES[:6], "flatten": BOOLS, "stages": tuple(range(1, 13)), "warps": _WARPS},
        **{name: values for name, values in TILED.params.items() if name in ("has_bias", "epilogue", "gated")},
        **{name: values for name, values in TILED.params.items() if name.startswith("extra")},
    },
    args=tuple(replace(arg, ctype="const real *") if arg.name == "weight" else arg for arg in TILED.args),
    ops=("linear",),
    doc=TILED.doc + " In Triton: `stages` parts of 64 columns are on their way.",
    layouts=("rows",),
    grid=_linear,
    hopper=Variant("triton/linear.py.j2", _persistent, _maps),
    triton=True,
)

ATTENTION = replace(
    attention.ATTENTION_PREFILL,
    name="attention_prefill_triton",
    template="triton/attention_prefill.py.j2",
    params={
        **attention.ATTENTION_PREFILL.params,
        **{"tile_rows": (16, 32, 64, 128), "tile_keys": (16, 32, 64), "key_block": _SIZES, "value_block": _SIZES},
        **{"sequences": _SIZES, "stages": tuple(range(1, 9)), "warps": _WARPS},
    },
    args=tuple(
        replace(arg, ctype="const real *") if arg is CACHE_IN else arg for arg in attention.ATTENTION_PREFILL.args
    ),
    doc=attention.ATTENTION_PREFILL.doc
    + " In Triton: for a cache of the type `real`, and up to `sequences` sequences.",
    grid=lambda params: Grid(32 * int(params["warps"]), Axis(("blocks",), persistent=True)),
    hopper=None,
    triton=True,
)

FAMILIES: tuple[Family, ...] = (NORM, POINTWISE, REDUCTION, LINEAR, ATTENTION)
