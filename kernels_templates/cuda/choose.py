"""Which kernel makes a linear layer on a GPU, by its sizes: the cost model that lowering asks for each bucket."""

from __future__ import annotations

from ..catalog import ParamValue

_SAME = {"float16": "f16", "bfloat16": "bf16"}
"""The encoding that tensor cores multiply activations of a type with."""


def choose_linear(
    rows: int, *, columns: int, inner: int, real: str, encoding: str, gated: bool
) -> tuple[str, dict[str, ParamValue]]:
    """The family for up to `rows` rows of activations (of type `real`) and a weight [columns, inner] in `encoding`, and
    the parameters that its sizes decide, `real` included; the layer's own (bias, epilogue, extras, gated) are not.
    """
    if _SAME.get(real) != encoding or inner % 8:
        return "linear_exact", {"real": real, "encoding": encoding}
    if rows <= 32:
        return "linear_skinny", {"real": real, "tokens": next(size for size in (8, 16, 32) if rows <= size)}
    wide = rows > 64 and columns * -(-rows // 128) >= 128 * 128
    tile_rows, tile_columns = (128, 128) if wide else (64, 64)
    return "linear_tiled", {"real": real, "tile_rows": tile_rows, "tile_columns": tile_columns, "stages": 4}
