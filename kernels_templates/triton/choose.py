"""Which Triton kernels can stand in for a CUDA C++ kernel, the most promising first."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from ..catalog import KernelSpec, ParamValue
from .expression import supported
from .families import MOST_COLUMNS

_Params = dict[str, ParamValue]
_MULTIPROCESSORS = 132
_SHAPE = ("N", "K", "W", "weight_rows", "heads", "kv_heads", "page_tokens")
"""Constants that a kernel's code is made for."""


def triton_kernels(kernel: KernelSpec, sizes: Mapping[str, int]) -> list[KernelSpec]:
    """Kernels that compute what a CUDA C++ kernel does from the same arguments; none, if Triton has no template for it.

    `sizes` are its whole numbers: constants, and of dimensions the largest.
    """
    rule = _RULES.get(kernel.family)
    found = rule(kernel.params, sizes) if rule is not None else []
    shape = {name: size for name, size in sizes.items() if name in _SHAPE}
    name = f"{kernel.family.removesuffix('_tiled').removesuffix('_exact')}_triton"
    return [KernelSpec(name, params, shape) for params in found]


def _norm(params: Mapping[str, ParamValue], sizes: Mapping[str, int]) -> list[_Params]:
    own = {name: value for name, value in params.items() if name != "row_threads"}
    return [{**own, **_row(sizes["W"])}] if sizes["W"] <= MOST_COLUMNS else []


def _reduction(params: Mapping[str, ParamValue], sizes: Mapping[str, int]) -> list[_Params]:
    fits = sizes["W"] <= MOST_COLUMNS and supported(str(params["exprs"]))
    return [{**params, **_row(sizes["W"])}] if fits else []


def _row(width: int) -> _Params:
    """A thread has 8 to 32 numbers."""
    block = _power(width)
    return {"block": block, "warps": max(1, min(16, block // 512))}


def _pointwise(params: Mapping[str, ParamValue], sizes: Mapping[str, int]) -> list[_Params]:
    columns = min(1024, _power(sizes["W"]))
    tile: _Params = {"tile_rows": 1024 // columns, "tile_columns": columns, "warps": 4}
    return [{**params, **tile}] if supported(str(params["expr"])) else []


def _tiled(params: Mapping[str, ParamValue], sizes: Mapping[str, int]) -> list[_Params]:
    return _linear(params, _tiles(sizes)) if supported(str(params["epilogue"])) else []


def _exact(params: Mapping[str, ParamValue], sizes: Mapping[str, int]) -> list[_Params]:
    if params["real"] != "float32" or params["encoding"] != "f32" or not supported(str(params["epilogue"])):
        return []
    rows = max(16, min(64, _power(sizes["rows"])))
    tile = {"tile_rows": rows, "tile_columns": 64, "stages": 2, "warps": 4}
    return _linear(params, [tile])


def _linear(params: Mapping[str, ParamValue], tiles: list[dict[str, int]]) -> list[_Params]:
    layer = ("real", "has_bias", "epilogue", "gated", "extra1", "extra2", "extra3", "extra4")
    own: _Params = {name: params[name] for name in layer}
    return [{**own, "band": 8, "flatten": True, **tile} for tile in tiles]


def _tiles(sizes: Mapping[str, int]) -> list[dict[str, int]]:
    """Tiles for 16-bit numbers, those first that end soonest if a multiprocessor does one after the other."""
    rows, columns = sizes["rows"], sizes["N"]

    def time(tile: dict[str, int]) -> float:
        blocks = _up(rows, tile["tile_rows"]) * _up(columns, tile["tile_columns"])
        return _up(blocks, _MULTIPROCESSORS) * (tile["tile_rows"] + tile["tile_columns"])

    shapes = [(64, 32), (64, 64), (64, 128)] if rows <= 64 else [(128, 64), (128, 128), (128, 256), (64, 128)]
    tiles = [_tile(*shape) for shape in shapes]
    return sorted(tiles, key=time)


def _tile(rows: int, columns: int) -> dict[str, int]:
    stage = (rows + columns) * 64 * 2
    return {
        **{"tile_rows": rows, "tile_columns": columns},
        **{"stages": max(3, min(6, 160_000 // stage)), "warps": 8 if rows * columns > 64 * 128 else 4},
    }


def _attention(params: Mapping[str, ParamValue], sizes: Mapping[str, int]) -> list[_Params]:
    dims = [_power(int(params[name])) for name in ("key_dim", "value_dim")]
    exact = params["real"] == "float32"
    if params["dtype"] != params["real"] or max(dims) > (128 if exact else 256) or min(dims) < 16:
        return []
    tile = {"tile_rows": 32, "tile_keys": 32, "warps": 4} if exact else {"tile_rows": 128, "tile_keys": 64, "warps": 8}
    tile |= {"tile_rows": 64, "tile_keys": 32} if max(dims) > 128 else {}
    own: _Params = {"key_block": dims[0], "value_block": dims[1], "sequences": _power(sizes["S"])}
    return [{**params, **own, **tile, "stages": 2}]


def _power(size: int) -> int:
    """The next power of two."""
    return 1 << max(0, size - 1).bit_length()


def _up(size: int, part: int) -> int:
    return -(-size // part)


_RULES: Mapping[str, Callable[[Mapping[str, ParamValue], Mapping[str, int]], list[_Params]]] = {
    "norm": _norm,
    "reduction": _reduction,
    "pointwise": _pointwise,
    "linear_tiled": _tiled,
    "linear_exact": _exact,
    "attention_prefill": _attention,
}
"""By family of the CUDA C++ kernel."""
