"""CUDA kernel families of linear layers: for few rows and for many, each with float and with quantized weights, and one
for every number type and size."""

from __future__ import annotations

from collections.abc import Mapping

from ..catalog import BOOLS, ArgSpec, Axis, Family, Grid, ParamValue, Tiles, Variant, float_arg
from ..packing import PANEL, block_columns, block_offsets, panel_encoding, panel_encodings
from .basic import REALS, out_arg, weight_arg

_EXTRA = ("", "t", "n")
_TENSOR: Mapping[str, tuple[ParamValue, ...]] = {
    "real": ("float16", "bfloat16"),
    "tile_columns": tuple(range(16, 257, 16)),
    "split": (1, 2, 4, 8),
}
_COMMON: Mapping[str, tuple[ParamValue, ...]] = {
    "has_bias": BOOLS,
    "epilogue": (),
    **dict.fromkeys(("extra1", "extra2", "extra3", "extra4"), _EXTRA),
    "gated": BOOLS,
}
_ARGS = (
    ArgSpec("x", "const real *", "in"),
    ArgSpec("weight", "const uint8_t *", "weight"),
    ArgSpec("bias", "const float *", "weight", when="has_bias"),
    *(ArgSpec(f"extra{index}", "const real *", "in", when=f"extra{index}") for index in range(1, 5)),
    ArgSpec("out", "real *", "out"),
    ArgSpec("rows", "int32_t", "dim"),
    ArgSpec("N", "int32_t", "const"),
    ArgSpec("K", "int32_t", "const"),
)
_DOC = """out[rows, N] = epilogue(x @ weight.T + bias, extras), with weight [N, K] row by row.

In the epilogue, in0 is the product with its bias and in1.. are the extras: "t" is as large as the result, "n" is a row;
an extra may be `out` itself. If `gated`, in0 is the first and in1 the second half of the product's columns, in2.. are
the extras, and the result is [rows, N / 2]."""


def _skinny(params: Mapping[str, ParamValue]) -> Grid:
    return Grid(256, Axis(("N",), 32 if params["gated"] else 16))


def _tiled(params: Mapping[str, ParamValue]) -> Grid:
    rows, columns = (64 if int(params[name]) <= 64 else 128 for name in ("tile_rows", "tile_columns"))
    return Grid(256, Axis(("N",), columns), Axis(("rows",), rows), shared=4 * (rows + columns) * 32 * 2)


def _exact(params: Mapping[str, ParamValue]) -> Grid:
    return Grid(256, Axis(("rows", "N"), 16 if params["gated"] else 8))


def _wgmma(params: Mapping[str, ParamValue]) -> Grid:
    rows, columns, stages, split = (int(params[name]) for name in ("tile_rows", "tile_columns", "stages", "split"))
    stage = (rows + columns) * int(params["depth"]) * 2 + 16
    few, groups = rows < 64, 1 if rows == 64 else 2
    spare = 1024 + (-columns % 64 * 128 if few else 0)  # for alignment, and products read the weight in 64 rows
    if not few and split == 1:  # more blocks than tiles if the last rows are few: they have nothing to do
        return Grid(
            128 * groups + 32, Axis(("N", "rows"), columns * 16, persistent=True), shared=stages * stage + spare
        )
    sums = (groups if few else 1) * rows * (columns + 8) * 4
    return Grid(
        threads=128 * groups + 32,
        x=Axis(("N",), columns),
        y=Axis(("rows",), rows),
        z=Axis(times=split),
        shared=max(stages * stage, sums) + spare,
        cluster=split,
    )


def _wgmma_tiles(params: Mapping[str, ParamValue]) -> Mapping[str, Tiles]:
    columns = int(params["tile_columns"]) // (2 if params["gated"] else 1)
    return {"x": Tiles("rows", "K", int(params["tile_rows"])), "weight": Tiles("N", "K", columns)}


_NORM_ARGS = (
    *(ArgSpec("squares", "const float *", "in", when="norm_in"), float_arg("eps", "norm_in")),
    *(ArgSpec("residual", "const real *", "in", when="norm_out"), weight_arg("norm_weight", "norm_out")),
    *(out_arg("sum_out", "norm_out"), ArgSpec("squares_out", "float *", "out", when="norm_out")),
    float_arg("offset", "norm_out"),
)
_NORM_DOC = """

With `norm_out`, it also computes most of the `add_norm` behind it: sum_out = result + residual, out = sum_out *
(norm_weight + offset), and squares_out[rows, N / 16], the sums of squares of 16 columns of sum_out each; with
`norm_in`, x and squares come from such a layer, and products are scaled by row as that norm would have scaled x.
`norm_out` needs a multiple of 16 columns, in all, in a tile, and in a block's part of one."""


def gives_norms(columns: int, real: str, params: Mapping[str, ParamValue]) -> bool:
    """Whether a `linear_skinny` of so many columns and this tile takes `norm_out`. Sums times weights may be too large
    for float16."""
    part = int(params["tile_columns"]) // int(params["split"])
    return real == "bfloat16" and columns % 16 == 0 and part % 16 == 0


_WGMMA = Variant("cuda/linear_wgmma.cu.j2", _wgmma, _wgmma_tiles)

SKINNY = Family(
    name="linear_skinny",
    template="cuda/linear_skinny.cu.j2",
    params={
        **{"tile_rows": (8, 16, 32), "stages": tuple(range(4, 33, 2)), "depth": (64, 128, 256)},
        **{"norm_in": BOOLS, "norm_out": BOOLS, **_TENSOR, **_COMMON},
    },
    args=(*_ARGS, *_NORM_ARGS),
    ops=("linear", "add_norm"),
    doc=_DOC + " At most `tile_rows` rows; K is a multiple of 8; the weight has the type `real`." + _NORM_DOC,
    layouts=("rows",),
    grid=_skinny,
    hopper=_WGMMA,
)

TILED = Family(
    name="linear_tiled",
    template="cuda/linear_tiled.cu.j2",
    params={"tile_rows": (64, 128, 256), "stages": tuple(range(3, 13)), "depth": (64,), **_TENSOR, **_COMMON},
    args=_ARGS,
    ops=("linear",),
    doc=_DOC + " K is a multiple of 8; the weight has the type `real`.",
    layouts=("rows",),
    grid=_tiled,
    hopper=_WGMMA,
)

EXACT = Family(
    name="linear_exact",
    template="cuda/linear_exact.cu.j2",
    params={"real": REALS, "encoding": panel_encodings(), **_COMMON},
    args=_ARGS,
    ops=("linear",),
    doc=_DOC + " Affine weights are in the layout `operand16`.",
    layouts=("rows", "operand16"),
    grid=_exact,
)

_QUANTIZED: Mapping[str, tuple[ParamValue, ...]] = {
    "real": ("float16", "bfloat16"),
    "encoding": tuple(name for name in panel_encodings() if panel_encoding(name).kind == "affine"),
    "width": tuple(range(16, 257, 16)),
    "cluster": (1, 2, 4, 8),
    "warpgroups": (1, 2, 3, 4),
    "depth": (128, 256, 512),
    "stages": tuple(range(1, 33)),
}
"""What `width` and the others after it say is for sm90: see its template."""
_QUANTIZED_DOC = (
    _DOC.replace("row by row", "affine, in the layout `operand16`") + " Halves have whole panels of columns."
)


def _skinny_quantized(params: Mapping[str, ParamValue]) -> Grid:
    return Grid(256, Axis(("N",), PANEL * max(int(params["panels"]), 2 if params["gated"] else 1)))


def _tiled_quantized(params: Mapping[str, ParamValue]) -> Grid:
    rows, columns, split = (int(params[name]) for name in ("tile_rows", "tile_columns", "split"))
    stages = 4 if rows * split <= 256 else 2
    shared = max(stages * split * rows * 80, (split - 1) * rows * columns * 4)
    return Grid(columns * split, Axis(("N",), columns), Axis(("rows",), rows), shared=shared)


def quantized_stage(params: Mapping[str, ParamValue]) -> int:
    """Bytes of a stage of sm90's kernel: x, and the panels' blocks, by halves."""
    encoding, depth, halves = panel_encoding(str(params["encoding"])), int(params["depth"]), 1 + bool(params["gated"])
    run = depth // block_columns(encoding) * block_offsets(encoding)["bytes"]
    half = -(-int(params["width"]) // PANEL // halves * run // 128) * 128
    return int(params["tile_rows"]) * (1 if "narrow" in params else 2) * depth + halves * half


def quantized_turns(width: int, groups: int) -> int:
    """In how many parts of K warpgroups of sm90's kernel take turns; they share the columns otherwise."""
    if width > 64 * (groups - 1):
        return 1
    return 2 if groups == 4 and width > 64 else groups


def _wgmma_quantized(params: Mapping[str, ParamValue]) -> Grid:
    rows, width, groups, split = (int(params[name]) for name in ("tile_rows", "width", "warpgroups", "cluster"))
    stages = int(params["stages"]) * (quantized_stage(params) + 16)
    sums = quantized_turns(width, groups) * rows * (width + 4) * 4
    return Grid(
        threads=128 * groups + 32,
        x=Axis(("N",), width),
        y=Axis(("rows",), rows),
        z=Axis(times=split),
        shared=max(stages, sums) + 1024,
        cluster=split,
    )


def _quantized_tiles(params: Mapping[str, ParamValue]) -> Mapping[str, Tiles]:
    encoding, depth, halves = panel_encoding(str(params["encoding"])), int(params["depth"]), 1 + bool(params["gated"])
    columns, at = block_columns(encoding), block_offsets(encoding)
    narrow = "narrow" in params
    block = PANEL, columns, at["bytes"] // at["part"], at["part"]
    return {
        "x": Tiles("rows", "K", int(params["tile_rows"]), depth // (128 if narrow else 64), bytes=1 if narrow else 2),
        "weight": Tiles("N", "K", int(params["width"]) // PANEL // halves, depth // columns, block),
    }


_WGMMA_QUANTIZED = Variant("cuda/linear_wgmma_quantized.cu.j2", _wgmma_quantized, _quantized_tiles)


SKINNY_QUANTIZED = Family(
    name="linear_skinny_quantized",
    template="cuda/linear_skinny_quantized.cu.j2",
    params={"tile_rows": (8, 16, 32), "panels": (1, 2), **_QUANTIZED, **_COMMON},
    args=_ARGS,
    ops=("linear",),
    doc=_QUANTIZED_DOC + " At most `tile_rows` rows; a warp has `panels` panels.",
    layouts=("operand16",),
    grid=_skinny_quantized,
    hopper=_WGMMA_QUANTIZED,
)

TILED_QUANTIZED = Family(
    name="linear_tiled_quantized",
    template="cuda/linear_tiled_quantized.cu.j2",
    params={
        "tile_rows": (32, 64, 128),
        "tile_columns": (64, 128, 256),
        "split": (1, 2, 4),
        **_QUANTIZED,
        **_COMMON,
    },
    args=_ARGS,
    ops=("linear",),
    doc=_QUANTIZED_DOC + " `split` warps share K.",
    layouts=("operand16",),
    grid=_tiled_quantized,
    hopper=_WGMMA_QUANTIZED,
)

FLOAT8 = Family(
    name="linear_float8",
    template="cuda/linear_exact.cu.j2",
    params={
        **_QUANTIZED,
        "tile_rows": (64, 128),
        "depth": (256, 512),
        "encoding": tuple(name for name in panel_encodings() if panel_encoding(name).levels == "e4m3"),
        "narrow": (True,),
        **_COMMON,
    },
    args=(
        ArgSpec("x", "const uint8_t *", "in"),
        ArgSpec("x_scale", "const float *", "in"),
        *_ARGS[1:],
    ),
    ops=("linear",),
    doc=_QUANTIZED_DOC + " x is what `quantize_float8` makes.",
    layouts=("operand16",),
    grid=_exact,
    hopper=_WGMMA_QUANTIZED,
)

QUANTIZE = Family(
    name="quantize_float8",
    template="cuda/quantize_float8.cu.j2",
    params={"real": REALS},
    args=(
        ArgSpec("x", "const real *", "in"),
        *(ArgSpec("x8", "uint8_t *", "out"), ArgSpec("x_scale", "float *", "out")),
        *(ArgSpec("rows", "int32_t", "dim"), ArgSpec("K", "int32_t", "const")),
    ),
    ops=(),
    doc="8-bit floats (E4M3) for rows of x [rows, K] with a scale each, max|x| / 448; every 16 columns in the order of "
    "`operand16`. K is a multiple of 16.",
    grid=lambda params: Grid(512, Axis(("rows",))),
)

FAMILIES: tuple[Family, ...] = (SKINNY, TILED, SKINNY_QUANTIZED, TILED_QUANTIZED, FLOAT8, QUANTIZE, EXACT)
