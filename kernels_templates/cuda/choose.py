"""Which kernel makes a linear layer on a GPU, by its sizes: the cost model that lowering asks for each bucket."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import product

from ..catalog import ParamValue
from ..packing import block_columns, panel_encoding
from .linear import quantized_stage, quantized_turns

_SAME = {"float16": "f16", "bfloat16": "bf16"}
"""The encoding that tensor cores multiply activations of a type with."""


_MULTIPROCESSORS = 132
_SPLIT = 0.05
"""Share of its time that adding up costs a tile, for each doubling of the blocks that share K."""

_Tile = tuple[int, int, int, int]
"""Columns, blocks that share K, depth of a part, and bytes of shared memory that parts pass through."""


def choose_linear(
    rows: int, *, columns: int, inner: int, real: str, encoding: str, gated: bool, narrow: bool = False
) -> tuple[str, dict[str, ParamValue]]:
    """The family for up to `rows` rows of activations (of type `real`) and a weight [columns, inner] in `encoding`, and
    the parameters that its sizes decide, `real` included; the layer's own (bias, epilogue, extras, gated) are not.

    `narrow` says that tensor cores can multiply 8-bit floats, so that activations may be rounded to them.
    """
    if real in _SAME and panel_encoding(encoding).kind == "affine":
        return quantized_kernel(rows, columns, inner, real, encoding, gated=gated, narrow=narrow)
    if _SAME.get(real) != encoding or inner % 8:
        return "linear_exact", {"real": real, "encoding": encoding}
    tile_rows = _tile_rows(rows)
    if rows <= 32:
        return "linear_skinny", {"real": real, **_ring(rows, inner, _few(columns, inner, tile_rows))}
    size, split = _many(rows, columns, inner)
    if 64 < rows <= 128 and 4 * split * _up(columns, size) < 3 * _MULTIPROCESSORS:  # tiles of 64 rows may be more even
        half = 32 * _up(2 * columns, 32 * _MULTIPROCESSORS)
        if 64 <= half <= 128:
            return "linear_tiled", {"real": real, **_ring(64, inner, (half, 1, 64, 220_000))}
    return "linear_tiled", {"real": real, **_ring(rows, inner, (size, split, 64, 220_000))}


def other_linear(
    rows: int, family: str, params: Mapping[str, ParamValue], *, columns: int, inner: int, gated: bool
) -> list[tuple[str, dict[str, ParamValue]]]:
    """Choices besides what `choose_linear` chose, the most promising first: what `toolkit tune` measures.

    Only layers that tensor cores multiply have any.
    """
    tiles: list[dict[str, ParamValue]] = []
    if family == "linear_skinny":
        tiles = [_ring(rows, inner, tile) for tile in _few_tiles(columns, inner)]
    elif family == "linear_tiled":
        tiles = [_ring(rows, inner, tile) for tile in _many_tiles(rows, columns, inner)]
    elif family != "linear_exact":
        tiles = list(_quantized_tiles(columns, inner, {**params, "gated": gated}))
    found = [(family, {**params, **tile}) for tile in tiles]
    return [each for index, each in enumerate(found) if each[1] != params and each not in found[:index]]


def _ring(rows: int, inner: int, tile: _Tile) -> dict[str, ParamValue]:
    """The parameters that make a tile."""
    tile_columns, split, depth, shared = tile
    tile_rows, most = _tile_rows(rows), 32 if rows <= 32 else 12
    stages = min(most, shared // ((tile_rows + tile_columns) * depth * 2), _up(inner, depth * split))
    stages = max(4, stages - stages % 2 if rows <= 32 else stages)
    return {"tile_rows": tile_rows, "tile_columns": tile_columns, "split": split, "stages": stages, "depth": depth}


def _tile_rows(rows: int) -> int:
    return next((size for size in (8, 16, 32, 64) if rows <= size), 128)


def quantized_kernel(
    rows: int, columns: int, inner: int, real: str, encoding: str, *, gated: bool, narrow: bool = False
) -> tuple[str, dict[str, ParamValue]]:
    """For affine weights. Warps with two panels read activations half as often, where one is no longer little;
    tiles read them once for many panels, but need enough columns to keep every multiprocessor busy."""
    tile_rows = _tile_rows(rows)
    own: dict[str, ParamValue] = {"real": real, "encoding": encoding, "tile_rows": tile_rows}
    if narrow and rows > 32 and panel_encoding(encoding).levels == "e4m3":
        own["narrow"] = True
        return "linear_float8", own | _quantized_hopper(rows, columns, inner, own, gated=gated)
    own |= _quantized_hopper(rows, columns, inner, own, gated=gated)
    enough = [size for size in (256, 128) if 5 * _up(rows, 128) * _up(columns, size) >= 4 * _MULTIPROCESSORS]
    if rows <= 16 or (rows <= 32 and 256 not in enough):
        return "linear_skinny_quantized", {**own, "panels": 2 if rows > 8 else 1}
    tile_columns = enough[0] if enough else 64
    return "linear_tiled_quantized", {**own, "tile_columns": tile_columns, "split": 256 // tile_columns}


def _quantized_hopper(
    rows: int, columns: int, inner: int, own: Mapping[str, ParamValue], *, gated: bool
) -> dict[str, ParamValue]:
    """The tile of sm90: every multiprocessor reads as much of the weight, in whole products of 64 columns."""
    unit, tile_rows, depth = 32 if gated else 16, int(own["tile_rows"]), 256
    if tile_rows > 32:
        many = _up(rows, tile_rows) * _up(columns, 128) >= 96
        width, cluster, shared = 128 if many else 64, 1 if many or inner < 2048 else 2, 220_000
        if tile_rows == 128 and not many and "narrow" not in own:
            depth = max(128, block_columns(panel_encoding(str(own["encoding"]))))
    else:
        shares = {c: _up(columns * c, unit * _MULTIPROCESSORS) * unit for c in (1, 2)}  # in one round
        cluster = 1 if shares[1] >= 48 or inner < 2048 else 2
        width, shared = shares[cluster], 108_000
        if width > (256 if tile_rows == 8 else 64 * cluster):
            width = 128 if tile_rows > 8 else 64
    sizes: dict[str, ParamValue] = {"width": width, "cluster": cluster, "warpgroups": 2, "depth": depth}
    return {**sizes, "stages": _quantized_stages({**own, **sizes, "gated": gated}, inner, shared)}


def _quantized_tiles(columns: int, inner: int, own: Mapping[str, ParamValue]) -> Iterator[dict[str, ParamValue]]:
    """Tiles of sm90 besides the chosen one that give each multiprocessor a block, or several, and for all others what
    their kernels leave open."""
    few = int(own["tile_rows"]) <= 32
    shapes = [(int(own["width"]), int(own["cluster"])), (64, 2), (128, 1), (48, 1), (96, 2), (64, 1)]
    for groups, (width, cluster) in product((2, 3, 4) if few else (2,), shapes):
        sizes: dict[str, ParamValue] = {"width": width, "cluster": cluster, "warpgroups": groups}
        blocks = _up(columns, width) * cluster
        if width % (32 if own["gated"] else 16) or blocks < 96 or inner < 1024 * cluster:
            continue
        if cluster > 1 and blocks > 2 * _MULTIPROCESSORS:
            continue
        sizes["stages"] = _quantized_stages({**own, **sizes}, inner, 108_000 if few else 220_000)
        if int(sizes["stages"]) * (quantized_stage({**own, **sizes}) + 16) < 230_000:
            yield sizes
    if "panels" in own:
        for panels in (1, 2):
            yield {"panels": panels}
    if "tile_columns" in own:
        for size in (64, 128, 256):
            yield {"tile_columns": size, "split": 256 // size}


def _quantized_stages(sizes: Mapping[str, ParamValue], inner: int, shared: int) -> int:
    """As many as fit and are of use: two for each turn, and as many for each."""
    turns = quantized_turns(int(sizes["width"]), int(sizes["warpgroups"]))
    most = min(_up(inner, int(sizes["depth"]) * int(sizes["cluster"])), max(4, 2 * turns))
    return max(turns, 2 // turns * turns, min(most, shared // (quantized_stage(sizes) + 16)) // turns * turns)


def _few(columns: int, inner: int, tile_rows: int) -> _Tile:
    """Columns of a tile, split of K, depth and bytes of shared memory where reading the weight is all: every
    multiprocessor should read as much, in one block with all of its shared memory, or in more.
    """
    tiles = _up(columns, 64)
    if tiles > 6 * _MULTIPROCESSORS:
        return 64, 1, 64, 74_000
    if tiles > 2 * _MULTIPROCESSORS:  # too few for an even share of small ones
        if tile_rows <= 16:
            return 16 * _up(columns, 32 * _MULTIPROCESSORS), 1, 64, 106_000
        return min(256, 32 * _up(columns, 32 * _MULTIPROCESSORS)), 1, 64, 212_000
    if tiles > _MULTIPROCESSORS:
        return 64, 1, 64, 106_000
    if tile_rows == 32 and tiles > _MULTIPROCESSORS // 2:
        return 16 * _up(columns, 16 * _MULTIPROCESSORS), 1, 128, 212_000
    split = next((split for split in (1, 2, 4) if tiles * split >= 120 or inner <= 512 * split), 8)
    return 64, split, 64, 212_000 if split <= 2 and tiles * split <= _MULTIPROCESSORS else 106_000


def _many(rows: int, columns: int, inner: int) -> tuple[int, int]:
    """Columns of a tile and split of K where the rows fill a tile or more: an even number of tiles for every
    multiprocessor."""
    row_tiles = _up(rows, 64 if rows <= 64 else 128)
    if row_tiles == 2 and inner >= 8192 and 48 * 64 <= columns <= 64 * _MULTIPROCESSORS:
        return 128, 2  # the larger tile multiplies faster than two of half its size
    rounds = _up(row_tiles * columns, 256 * _MULTIPROCESSORS)
    tile_columns = min(256, max(64, 32 * _up(row_tiles * columns, 32 * rounds * _MULTIPROCESSORS)))
    tiles = row_tiles * _up(columns, tile_columns)
    if 4 * tiles <= _MULTIPROCESSORS and inner >= 2048:
        return 128, 4
    return tile_columns, 2 if 2 * tiles <= _MULTIPROCESSORS and inner >= 1024 else 1


def _few_tiles(columns: int, inner: int) -> list[_Tile]:
    """Tiles as `_few` says them, those first that keep most of the multiprocessors' shared memory at work."""

    def idle(tile: _Tile) -> float:
        size, split, _, shared = tile
        blocks, places = _up(columns, size) * split, _MULTIPROCESSORS * (227_000 // shared)
        return 1 + _SPLIT * split.bit_length() - blocks / (_up(blocks, places) * places)

    share = min(256, 16 * _up(columns, 16 * _MULTIPROCESSORS))
    return _best_of_sizes(
        idle,
        [
            (size, split, 64, shared)
            for size in (64, 32, 96, 128, share)
            for split in (1, 2, 4, 8)
            for shared in (106_000, 212_000, 74_000)
            if split == 1 or inner >= 512 * split
        ],
    )


def _many_tiles(rows: int, columns: int, inner: int) -> list[_Tile]:
    """Tiles as `_many` says them, those first that end soonest if a multiprocessor does one after the other."""
    tile_rows = 64 if rows <= 64 else 128

    def time(tile: _Tile) -> float:
        size, split = tile[:2]
        rounds = _up(_up(rows, tile_rows) * _up(columns, size) * split, _MULTIPROCESSORS)
        return rounds * (size + tile_rows) / split * (1 + _SPLIT * split.bit_length())

    sizes, splits = range(64, 257, 32), [split for split in (1, 2, 4) if split == 1 or inner >= 512 * split]
    return _best_of_sizes(time, [(size, split, 64, 220_000) for size in sizes for split in splits])


def _best_of_sizes(cost: Callable[[_Tile], float], tiles: list[_Tile]) -> list[_Tile]:
    """Of tiles of as many columns the one that costs least; then the rest."""
    ordered = sorted(tiles, key=cost)
    best = list({tile[0]: tile for tile in reversed(ordered)}.values())
    return [*sorted(best, key=cost), *(tile for tile in ordered if tile not in best)]


def _up(size: int, part: int) -> int:
    """Parts that hold that size."""
    return -(-size // part)
