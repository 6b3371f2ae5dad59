"""CUDA kernel families of attention: rotary embedding, writes to the K/V cache, and attention over it.

They have the names, parameters and arguments of the CPU's families; activations are in the type `real`.

Attention shares its work among as many thread blocks as the GPU has multiprocessors: `blocks` is the most of them that
scratch memory was made for, and the constant `BLOCKS` is more than any GPU has.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import get_args

from ...runtime.plan import LARGEST_CODE, KvDType
from ..catalog import (
    ANY,
    BOOLS,
    CACHE_IN,
    CACHE_OUT,
    ArgSpec,
    Axis,
    Family,
    Grid,
    ParamValue,
    Tiles,
    Variant,
    dim_arg,
    float_arg,
    input_arg,
    int_arg,
)
from .basic import REALS, blocks, out_arg, real_arg, weight_arg

BLOCKS = 256
"""What callers give for `blocks`."""
KV_DTYPES = get_args(KvDType)


ROPE_TABLE = Family(
    name="rope_table",
    template="cuda/rope_table.cu.j2",
    params={"real": REALS, "function": ("cos", "sin")},
    args=(
        *(input_arg("positions"), input_arg("lengths"), weight_arg("frequencies"), out_arg("out")),
        *(dim_arg("T"), int_arg("W"), int_arg("first"), int_arg("last"), float_arg("scale")),
    ),
    ops=("rope_table",),
    doc="out[t] = scale * cos or sin of positions[t] * frequencies[r], where r is lengths[t] - first in 0 .. last.",
    grid=blocks("T", "W", divisor=256),
)

ROPE = Family(
    name="rope",
    template="cuda/rope.cu.j2",
    params={"real": REALS, "head_dim": ANY, "rotary": ANY, "style": ("half", "pair")},
    args=(
        *(real_arg("x"), real_arg("cos"), real_arg("sin"), out_arg("out")),
        *(dim_arg("T"), int_arg("heads"), int_arg("x_stride")),
    ),
    ops=("rope",),
    doc="Rotates the first `rotary` columns of every head of x[T, heads, head_dim] by cos and sin [T, rotary / 2]. "
    "`x_stride` is the number of elements from one token of x to the next; out is contiguous.",
    grid=blocks("T", "heads", divisor=8),
)


def takes_wide_loads(head_dim: int, rotary: int, real: str, dtype: str) -> bool:
    """Whether heads and what turns of them are pairs of 16 bytes, stored in the cache as they come."""
    return real != "float32" and dtype == real and head_dim % 16 == 0 and rotary % 16 == 0


def head_threads(head_dim: int) -> int:
    """Threads that have a head, 16 columns each, some none: a power of two."""
    return 1 << (head_dim // 16 - 1).bit_length()


def _rope_kv_write_grid(params: Mapping[str, ParamValue]) -> Grid:
    rotary = int(params["rotary"]) if params["has_rope"] else 0
    wide = takes_wide_loads(int(params["head_dim"]), rotary, str(params["real"]), str(params["dtype"]))
    return Grid(192, Axis(("T",)), Axis() if wide else Axis(("kv_heads",)))


ROPE_KV_WRITE = Family(
    name="rope_kv_write",
    template="cuda/rope_kv_write.cu.j2",
    params={
        "real": REALS,
        "head_dim": ANY,
        "rotary": ANY,
        "style": ("half", "pair"),
        "has_rope": BOOLS,
        "qk_norm": ("", "rms", "layer"),
        "dtype": KV_DTYPES,
    },
    args=(
        *(real_arg("qkv"), real_arg("cos", "has_rope"), real_arg("sin", "has_rope")),
        *(weight_arg("q_weight", "qk_norm"), weight_arg("k_weight", "qk_norm")),
        *(input_arg("slots"), CACHE_OUT, out_arg("out")),
        *(dim_arg("T"), int_arg("heads"), int_arg("kv_heads"), int_arg("page_tokens")),
        *(float_arg("eps"), float_arg("offset"), int_arg("weight_stride", "qk_norm")),
    ),
    ops=("rope_kv_write",),
    doc="Splits qkv[T, (heads + 2 kv_heads) * head_dim], normalizes and rotates queries and keys, writes keys and "
    "values to the cache at the step's slots, and queries to out[T, heads, head_dim]. `weight_stride` is the number of "
    "floats from one head's norm weights to the next's: 0 if all heads share them.",
    grid=_rope_kv_write_grid,
)

KV_WRITE = Family(
    name="kv_write",
    template="cuda/kv_write.cu.j2",
    params={"real": REALS, "key_dim": ANY, "value_dim": ANY, "dtype": KV_DTYPES},
    args=(
        *(real_arg("k"), real_arg("v"), input_arg("slots"), CACHE_OUT),
        *(dim_arg("T"), int_arg("kv_heads"), int_arg("page_tokens"), int_arg("k_stride"), int_arg("v_stride")),
    ),
    ops=("kv_write",),
    doc="Writes k[T, kv_heads, key_dim] and v[T, kv_heads, value_dim] to the cache at the step's slots; the strides "
    "are elements from one token to the next.",
    grid=blocks("T", "kv_heads", divisor=8),
)


_PARAMS: Mapping[str, tuple[ParamValue, ...]] = {
    "real": REALS,
    "key_dim": ANY,
    "value_dim": ANY,
    "dtype": KV_DTYPES,
    **dict.fromkeys(("has_window", "has_softcap", "has_sinks", "has_slopes"), BOOLS),
}
_ARGS = (
    *(
        real_arg("q"),
        CACHE_IN,
        input_arg("pages"),
        input_arg("page_stride"),
        input_arg("seq_start"),
        input_arg("context"),
    ),
    *(weight_arg("sinks", "has_sinks"), weight_arg("slopes", "has_slopes"), out_arg("out")),
    *(dim_arg("S"), int_arg("heads"), int_arg("kv_heads"), int_arg("page_tokens"), float_arg("scale")),
    *(int_arg("window", "has_window"), float_arg("softcap", "has_softcap"), int_arg("blocks")),
)
_DOC = """Causal attention of q[T, heads, key_dim] over the pages of each sequence, to out[T, heads, value_dim].

`page_stride` points to the number of pages of a row of `pages`; `page_tokens` is a multiple of 64."""


def takes_tensor_cores(real: str, dtype: str) -> bool:
    """Whether attention over a cache of this type can be computed by tensor cores."""
    return real != "float32" and (dtype == real or dtype in LARGEST_CODE)


@dataclass(frozen=True)
class DecodeTiles:
    """Shared memory of `attention_decode`: `warps` with `stages` of `tile` keys and values each."""

    tile: int
    warps: int
    stages: int
    key_row: int
    """Bytes of a key."""
    value_row: int
    stage_bytes: int
    value_columns: int
    """Rounded up."""

    @property
    def shared(self) -> int:
        """Bytes of dynamic shared memory: the stages, and half of the warps' results."""
        return self.warps * self.stages * self.stage_bytes + self.warps // 2 * (self.value_columns * 8 + 128) * 4

    @property
    def most_teams(self) -> int:
        """Teams of warps that share the work, if `BLOCKS` blocks do."""
        return BLOCKS * self.warps


def decode_tiles(key_dim: int, value_dim: int, dtype: str, arch: int) -> DecodeTiles:
    """As many warps and stages as fit; `arch` is a compute capability, as a number."""
    limit = 232_448 if arch == 90 else 101_376
    size = 1 if dtype in LARGEST_CODE else 2
    columns = [-(-width // 16) * 16 for width in (key_dim, value_dim)]
    key_row, value_row = (width * size + (16 if width * size // 16 % 2 == 0 else 32) for width in columns)
    tile = 32 if max(columns) <= 64 else 16  # a warp's step takes about as long for either
    stage = tile * (key_row + value_row + (4 if dtype in LARGEST_CODE else 0))
    options = [
        DecodeTiles(tile, warps, stages, key_row, value_row, stage, columns[1])
        for warps, least in ((8, 3), (4, 2), (2, 2))
        for stages in (4, 3, 2)
        if stages >= least
    ]
    return next(option for option in options if option.shared + 1024 <= limit)


@dataclass(frozen=True)
class PrefillTiles:
    """Shared memory of `attention_prefill`: two stages of `keys` keys and values each."""

    keys: int
    key_row: int
    """Bytes of a key."""
    value_row: int
    stage_bytes: int


def prefill_tiles(key_dim: int, value_dim: int, dtype: str) -> PrefillTiles:
    """As many keys as fit on every architecture."""
    decode, keys = decode_tiles(key_dim, value_dim, dtype, 80), 64 if max(key_dim, value_dim) <= 128 else 32
    return PrefillTiles(keys, decode.key_row, decode.value_row, decode.stage_bytes * keys // decode.tile)


@dataclass(frozen=True)
class PrefillPanels:
    """Shared memory of `attention_prefill` on sm90: tiles of `rows` queries, stages of `keys` keys and values, in
    panels of 64 16-bit columns.
    """

    rows: int
    keys: int
    key_panels: int
    value_panels: int
    queries: int
    """Tiles of queries."""
    stages: int
    threads: int

    @property
    def shared(self) -> int:
        """Bytes of dynamic shared memory, with room to begin at a multiple of 1024, and for barriers."""
        queries, stages = self.queries * self.key_panels * self.rows, self.stages * self.keys
        return (
            1024
            + 128 * (queries + stages * (self.key_panels + self.value_panels))
            + 16 * (self.queries + 2 * self.stages)
        )


def prefill_panels(key_dim: int, value_dim: int) -> PrefillPanels:
    """Wide heads leave registers for fewer keys at once, and room for fewer queries. Only where keys and values have
    the same width are they copied by a warpgroup of their own."""
    panels = -(-key_dim // 64), -(-value_dim // 64)
    keys = 128 if max(panels) <= 2 else 64
    if key_dim != value_dim:
        return PrefillPanels(128, keys, *panels, queries=1, stages=2, threads=256)
    return PrefillPanels(
        128, keys, *panels, queries=2 if panels[0] <= 2 else 1, stages=4 if panels[0] == 1 else 2, threads=384
    )


def _persistent(threads: int, shared: int = 0) -> Grid:
    return Grid(threads, Axis(("blocks",), persistent=True), shared=shared)


def _decode_grid(arch: int, params: Mapping[str, ParamValue]) -> Grid:
    if not takes_tensor_cores(str(params["real"]), str(params["dtype"])):
        return _persistent(256)
    tiles = decode_tiles(int(params["key_dim"]), int(params["value_dim"]), str(params["dtype"]), arch)
    return _persistent(tiles.warps * 32, tiles.shared)


def _prefill_grid(hopper: bool, params: Mapping[str, ParamValue]) -> Grid:
    dtype, dims = str(params["dtype"]), (int(params["key_dim"]), int(params["value_dim"]))
    if not takes_tensor_cores(str(params["real"]), dtype):
        return _persistent(256)
    if hopper and dtype not in LARGEST_CODE:
        panels = prefill_panels(*dims)
        return _persistent(panels.threads, panels.shared)
    return _persistent(256, 2 * prefill_tiles(*dims, dtype).stage_bytes)


def _prefill_maps(params: Mapping[str, ParamValue]) -> Mapping[str, Tiles]:
    real, dtype, width = str(params["real"]), str(params["dtype"]), int(params["key_dim"])
    if not takes_tensor_cores(real, dtype) or dtype in LARGEST_CODE or width != params["value_dim"]:
        return {}
    return {"cache": Tiles("", "", 64, width=width)}


ATTENTION_PREFILL = Family(
    name="attention_prefill",
    template="cuda/attention_prefill.cu.j2",
    params=_PARAMS,
    args=_ARGS,
    ops=("paged_attention",),
    doc=_DOC,
    grid=partial(_prefill_grid, False),
    hopper=Variant("cuda/attention_prefill_hopper.cu.j2", partial(_prefill_grid, True), _prefill_maps),
)

ATTENTION_DECODE = Family(
    name="attention_decode",
    template="cuda/attention_decode.cu.j2",
    params=_PARAMS,
    args=(*_ARGS, ArgSpec("scratch", "float *", "scratch")),
    ops=("paged_attention",),
    doc=_DOC + " A sequence has at most one query. The work is shared among blocks by keys; `scratch` has "
    "`decode_scratch` bytes, for parts of results.",
    grid=partial(_decode_grid, 80),
    hopper=Variant("cuda/attention_decode.cu.j2", partial(_decode_grid, 90)),
)


ATTENTION_DECODE_WRITE = Family(
    name="attention_decode_write",
    template="cuda/attention_decode.cu.j2",
    params={
        **_PARAMS,
        **{"rotary": ANY, "style": ("half", "pair"), "has_rope": BOOLS, "qk_norm": ("", "rms", "layer")},
    },
    args=(
        *(CACHE_OUT if arg is CACHE_IN else arg for arg in ATTENTION_DECODE.args),
        *(real_arg("cos", "has_rope"), real_arg("sin", "has_rope")),
        *(weight_arg("q_weight", "qk_norm"), weight_arg("k_weight", "qk_norm"), input_arg("slots")),
        *(float_arg("eps"), float_arg("offset"), int_arg("weight_stride", "qk_norm")),
    ),
    ops=("rope_kv_write", "paged_attention"),
    doc="`rope_kv_write` and then `attention_decode`, of q[T, (heads + 2 kv_heads) * key_dim].",
    grid=partial(_decode_grid, 80),
    hopper=Variant("cuda/attention_decode.cu.j2", partial(_decode_grid, 90)),
)


def can_decode_and_write(head_dim: int, rotary: int, style: str, real: str, dtype: str) -> bool:
    """Whether `attention_decode_write` takes heads like these: columns that turn together are in one lane."""
    whole = rotary % 32 == 0 if style == "half" else rotary % 2 == 0
    return real != "float32" and dtype == real and head_dim % 16 == 0 and whole


def decode_scratch(value_dim: int) -> int:
    """Bytes of scratch memory of a call of `attention_decode` with `BLOCKS` blocks: two parts of results for each of
    their teams of warps."""
    return BLOCKS * 8 * 2 * (-(-value_dim // 16) * 16 * 8 + 128) * 4


FAMILIES: tuple[Family, ...] = (
    *(ROPE_TABLE, ROPE, ROPE_KV_WRITE, KV_WRITE),
    *(ATTENTION_PREFILL, ATTENTION_DECODE, ATTENTION_DECODE_WRITE),
)
