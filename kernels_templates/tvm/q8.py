"""Activations as 8-bit codes, in TIR: see `packing.py` and `cpu/q8.h.j2`."""

from __future__ import annotations

from collections.abc import Sequence

from ..packing import q8_row_bytes
from .script import Script

GROUP = 32
"""Columns that share a scale."""


def quantize_group(s: Script, values: Sequence[str], row: str, column: str, width: int) -> None:
    """Write 32 floats of a row as codes, scale and sum. `column` is the first of `width`; the rows are `Q8`."""
    bits = [s.value(s.i, f"T.bitwise_and({s.bits(value)}, {s.whole(0x7FFFFFFF)})") for value in values]
    while len(bits) > 1:
        bits = [s.value(s.i, f"T.max({a}, {b})") for a, b in zip(bits[::2], bits[1::2], strict=True)]
    largest = s.intrinsic("int32", "llvm.vector.reduce.smax", bits[0])
    top = s.value("float32", f'T.reinterpret("float32", {largest})')
    inverse = s.value("float32", f"T.Select({top} < T.float32(1e-30), T.float32(0), T.float32(127) / {top})")
    row_at = s.let(f"{row} * {q8_row_bytes(width)}")
    codes = []
    for lane, value in enumerate(values):
        codes.append(s.to_int(s.round(s.vector(f"{value} * {s.splat(inverse)}"))))
        s(f'Q8[{s.at(f"{row_at} + {column} + {lane * s.lanes}")}] = T.Cast("int8x{s.lanes}", {codes[-1]})')
    total = s.value(s.i, " + ".join(codes))
    scale = s.value("float32", f"{top} / T.float32(127)")
    # An infinite or missing number leaves a sum of codes that is a number: times zero it is not.
    exact = f'T.Cast("float32", {s.intrinsic("int32", "llvm.vector.reduce.add", total)})'
    sum_ = s.value("float32", f"{scale} * {exact} + {top} * T.float32(0)")
    for start, value in ((width, scale), (width + width // 8, sum_)):
        at = f"{row_at} + {start} + T.truncdiv({column}, {GROUP}) * 4"
        s(f'Q8[{s.at(at, 4)}] = T.reinterpret("int8x4", {value})')
