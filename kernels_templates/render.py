"""Rendering a kernel: its family's template with its parameters becomes one self-contained source text."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import jinja2

from ..runtime.encodings import LEVELS
from ..runtime.plan import LARGEST_CODE, ArchName, IsaName
from ..runtime.step import MAX_TOP
from .catalog import ArgSpec, Family, KernelSpec
from .cuda.attention import (
    decode_tiles,
    head_threads,
    prefill_panels,
    prefill_tiles,
    takes_tensor_cores,
    takes_wide_loads,
)
from .cuda.linear import quantized_turns
from .cuda.sample import PART
from .expression import inputs_of, to_cpp, to_passes
from .packing import block_columns, block_offsets, panel_encoding
from .registry import CUDA_FAMILIES, FAMILIES
from .triton.expression import to_triton
from .triton.families import MOST_TILE


@cache
def _environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= {
        "to_cpp": to_cpp,
        "to_passes": to_passes,
        "to_triton": to_triton,
        "inputs_of": inputs_of,
        "panel_encoding": panel_encoding,
        "block_columns": block_columns,
        "block_offsets": block_offsets,
    }
    environment.tests["coded"] = LARGEST_CODE.__contains__
    environment.globals |= {"levels": LEVELS, "max_top": MAX_TOP, "sample_part": PART, "largest_code": LARGEST_CODE}
    environment.globals |= {
        each.__name__: each
        for each in (
            *(decode_tiles, head_threads, prefill_panels, prefill_tiles),
            *(takes_tensor_cores, takes_wide_loads, quantized_turns),
        )
    }
    return environment


def arguments(family: Family, kernel: KernelSpec) -> tuple[ArgSpec, ...]:
    """The kernel's arguments in order, without the optional ones that its parameters remove."""
    return tuple(arg for arg in family.args if not arg.when or kernel.params[arg.when])


def tvm_symbol(kernel: KernelSpec) -> str:
    """The C name of TVM's code for a kernel with a shape."""
    return f"{kernel.symbol}_tvm"


def signature(kernel: KernelSpec, symbol: str = "") -> str:
    """The C declaration of the kernel, or of its code under another name, without a semicolon."""
    args = arguments(FAMILIES[kernel.family], kernel)
    declared = ", ".join(f"{arg.ctype} {arg.name}" for arg in args)
    return f'extern "C" void {symbol or kernel.symbol}({declared}, int32_t tid, int32_t threads)'


def render_choice(kernel: KernelSpec, isa: IsaName) -> str:
    """The C++ source of a kernel with choices: it calls whose code was chosen for the number of rows."""
    args = arguments(FAMILIES[kernel.family], kernel)
    codes = {"cpp": kernel.any_shape.symbol, "tvm": tvm_symbol(kernel)}
    mine = [choice for choice in kernel.choices if choice.isa == isa]
    choices = [
        (choice.rows, codes[choice.generator])
        for choice, following in zip(mine, [*mine[1:], None], strict=True)
        if following is None or following.generator != choice.generator
    ]
    return render_template(
        "cpu/choose.cpp.j2",
        signature=signature(kernel),
        declarations=[signature(kernel, symbol) for symbol in sorted({symbol for _, symbol in choices})],
        choices=[{"rows": most, "symbol": symbol} for most, symbol in choices],
        rows=next(arg.name for arg in args if arg.role == "dim"),
        args=", ".join(arg.name for arg in args),
    )


def render(kernel: KernelSpec, isa: IsaName) -> str:
    """The C++ source of a kernel for one ISA, headers included in the text, so that its hash identifies the object."""
    family = FAMILIES[kernel.family]
    return render_template(family.template, isa=isa, signature=signature(kernel), symbol=kernel.symbol, **kernel.params)


def render_cuda(kernel: KernelSpec, arch: ArchName) -> str:
    """The source of a kernel for one GPU architecture, in CUDA C++ or Triton."""
    family = CUDA_FAMILIES[kernel.family]
    if family.triton:
        return render_triton(kernel, arch)
    variant = family.variant(arch)
    grid, tiles = variant.grid(kernel.params), variant.tiles(kernel.params)
    types = dict.fromkeys(tiles, "const __grid_constant__ tensor_map")
    declared = ", ".join(f"{types.get(arg.name, arg.ctype)} {arg.name}" for arg in arguments(family, kernel))
    cluster = f" __cluster_dims__(1, 1, {grid.cluster})" if grid.cluster > 1 else ""
    alone = grid.shared > (116_000 if arch == "sm90" else 64_000)  # on its multiprocessor, so it may have all registers
    bounds = f"{grid.threads}, 1" if alone else f"{grid.threads}"
    return render_template(
        variant.template,
        arch=int(arch[2:]),
        threads=grid.threads,
        signature=f'extern "C" __global__ void __launch_bounds__({bounds}){cluster} {kernel.symbol}({declared})',
        symbol=kernel.symbol,
        **kernel.params,
    )


def render_triton(kernel: KernelSpec, arch: ArchName, *, interpreted: bool = False) -> str:
    """The Triton source of a kernel: a Python module with a function of the kernel's name.

    `interpreted`: without what Triton's interpreter lacks.
    """
    family = CUDA_FAMILIES[kernel.family]
    names = ", ".join(arg.name for arg in arguments(family, kernel))
    return render_template(
        family.variant(arch).template,
        arch=int(arch[2:]),
        interpreted=interpreted,
        signature=f"def {kernel.symbol}({names})",
        shape=kernel.shape,
        most_columns=MOST_TILE,
        **kernel.params,
    )


def render_template(template: str, **values: object) -> str:
    """Any template below `kernels_templates/` with the given values."""
    return _environment().get_template(template).render(**values)
