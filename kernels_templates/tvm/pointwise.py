"""The `pointwise` and `quantize` families as TIR: see their templates in `cpu/`.

The width of a row is a constant here, and a multiple of a vector.
"""

from __future__ import annotations

from ...runtime.plan import IsaName
from ..catalog import POINTWISE_INPUTS, KernelSpec
from ..registry import FAMILIES
from ..render import arguments
from . import expression
from .q8 import GROUP, quantize_group
from .script import Script

BLOCK = 256
"""Columns that a thread does at a time."""


def takes_pointwise(kernel: KernelSpec) -> bool:
    """Whether a `pointwise` kernel can be written for its shape."""
    return kernel.shape["W"] % 16 == 0 and expression.supported(str(kernel.params["expr"]))


def takes_quantize(kernel: KernelSpec) -> bool:
    """Whether a `quantize` kernel can be written for its shape, which always is the case."""
    return kernel.shape["K"] % GROUP == 0


def write_pointwise(kernel: KernelSpec, name: str, isa: IsaName) -> str:
    """The script of an expression."""
    s, width = _script(kernel, name, isa), kernel.shape["W"]
    kinds = [str(kernel.params[f"in{index}"]) for index in range(POINTWISE_INPUTS)]
    blocks = -(-width // BLOCK)
    s.share(f"rows * {blocks}", "block")
    with s.block("for b in T.serial(block_first, block_last):"):
        row, first = _row_and_column(s, "b", blocks, BLOCK)
        vectors = f"T.truncdiv(T.min({BLOCK}, {width} - {first}), {s.lanes})"
        with s.block(f"for i in T.serial({vectors}):"):
            column = s.let(f"{first} + i * {s.lanes}")
            at = s.let(f"{row} * {width} + {column}")
            places = {"t": s.at(at), "n": s.at(column), "1": row, "s": "0"}
            inputs = []
            for index, kind in enumerate(kinds):
                if kind:
                    value = f"IN{index}[{places[kind]}]"
                    inputs.append(s.vector(value if kind in ("t", "n") else s.splat(value)))
            s(f"OUT[{s.at(at)}] = {expression.write(s, str(kernel.params['expr']), inputs)}")
    return s.text


def write_quantize(kernel: KernelSpec, name: str, isa: IsaName) -> str:
    """The script of the quantizer of rows."""
    s, width = _script(kernel, name, isa), kernel.shape["K"]
    s.share(f"rows * {width // GROUP}", "group")
    with s.block("for g in T.serial(group_first, group_last):"):
        row, first = _row_and_column(s, "g", width // GROUP, GROUP)
        values = [s.vector(f"X[{s.at(f'g * {GROUP} + {lane}')}]") for lane in range(0, GROUP, s.lanes)]
        quantize_group(s, values, row, first, width)
    return s.text


def _script(kernel: KernelSpec, name: str, isa: IsaName) -> Script:
    args = arguments(FAMILIES[kernel.family], kernel)
    s = Script(name, args, isa)
    for arg in args:
        if arg.ctype.endswith("*"):
            s.pointer(arg.name, "int8" if arg.name == "q8" else "float32")
    return s


def _row_and_column(s: Script, index: str, blocks: int, size: int) -> tuple[str, str]:
    """Row and first column of a block, if a row has so many of that size."""
    row = s.let(f"T.truncdiv({index}, {blocks})")
    return row, s.let(f"({index} - {row} * {blocks}) * {size}")
