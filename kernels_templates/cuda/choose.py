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
    tile_rows = next((size for size in (8, 16, 32, 64, 128, 256) if rows <= size), 256)
    tile_columns = 64 if tile_rows <= 64 else 128
    if tile_rows >= 128 and _tiles(rows, tile_rows) * _tiles(columns, tile_columns) < 100:
        tile_rows, tile_columns = 128, 64
    tiles = _tiles(rows, tile_rows) * _tiles(columns, tile_columns)
    split = next((split for split in (1, 2, 4) if tiles * split >= 120 or inner / split <= 512), 8)
    # Two blocks on a multiprocessor, or one that has all of its shared memory.
    shared = 220_000 if tile_rows == 256 or (tile_rows == 128 and tiles * split <= 200) else 110_000
    stages = min(12, shared // ((tile_rows + tile_columns) * 128))
    sizes = {"tile_rows": tile_rows, "tile_columns": tile_columns, "split": split, "stages": stages}
    return "linear_skinny" if tile_rows <= 32 else "linear_tiled", {"real": real, **sizes}


def _tiles(size: int, tile: int) -> int:
    return -(-size // tile)
