"""Triton code generation: kernels become machine code ahead of time, with neither a GPU nor torch here.

A kernel's parameters are made those of the catalog's argument list, as those of CUDA C++ kernels are: Triton appends
pointers to scratch memory, and a shape and strides to each tensor map, which no kernel here uses. So whoever launches a
kernel need not know what it was written in.
"""

from __future__ import annotations

import json
import linecache
import re
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, distribution, version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from ...kernels_templates.catalog import ArgSpec, KernelSpec, Tiles
from ...kernels_templates.registry import CUDA_FAMILIES
from ...kernels_templates.render import arguments
from ...runtime.errors import InternalError, UserError
from ...runtime.plan import ArchName

PTX = 87
"""Version of the PTX, which driver 580 and older ones take: 8.7."""
_REALS = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}
_SCALARS = {"int32_t": "i32", "int64_t": "i64", "uint64_t": "u64", "float": "fp32"}
_MAP_EXTRAS = 4
"""Parameters behind a tensor map of a matrix: two sizes and two strides."""
_SCRATCH = 2
"""Parameters behind all others: scratch memory of the kernel and of its profile."""


@dataclass(frozen=True)
class Assembled:
    """A kernel as PTX and as machine code."""

    ptx: bytes
    cubin: bytes
    shared: int
    """Bytes of dynamic shared memory."""
    log: str
    """What ptxas says of registers and spills."""


@cache
def compiler_version() -> str:
    """Triton's version and that of the ptxas in its wheel, for cache keys and reports. Raises UserError without it."""
    try:
        found = version("triton")
    except PackageNotFoundError:
        raise UserError("Triton kernels need Triton, not installed here: pip install 'plan-toolkit[triton]'") from None
    text = subprocess.run([_ptxas(), "--version"], capture_output=True, text=True, check=True).stdout
    match = re.search(r"V([\d.]+)", text)
    return f"triton {found} ptxas {match[1] if match else text}"


def _ptxas() -> Path:
    """Triton's own assembler, found without importing Triton."""
    return Path(str(distribution("triton").locate_file("triton/backends/nvidia/bin/ptxas")))


def options(kernel: KernelSpec, arch: ArchName) -> Mapping[str, Any]:
    """What Triton is told besides the source: `num_stages` is how many parts of a loop's inputs are on their way."""
    warps, stages = (
        CUDA_FAMILIES[kernel.family].variant(arch).grid(kernel.params).threads // 32,
        int(kernel.params.get("stages", 1)),
    )
    most = stages if arch == "sm90" else 3
    return {"num_warps": warps, "num_stages": min(stages, most), "ptx_version": PTX}


def assemble(source: str, kernel: KernelSpec, arch: ArchName) -> Assembled:
    """Compile a kernel from its source for an architecture. Raises InternalError with the compiler's message."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    family = CUDA_FAMILIES[kernel.family]
    specs, variant = arguments(family, kernel), family.variant(arch)
    tiles = variant.tiles(kernel.params)
    with TemporaryDirectory() as folder, triton.knobs.cache.scope(), triton.knobs.compilation.scope():
        triton.knobs.cache.dir = folder
        triton.knobs.compilation.disable_line_info = True  # it names files of this machine
        function = _function(source, kernel.symbol)
        types = {spec.name: _type(spec, str(kernel.params["real"]), tiles) for spec in specs}
        aligned = {(i,): [["tt.divisibility", 16]] for i, spec in enumerate(specs) if types[spec.name][0] == "*"}
        try:
            compiled = triton.compile(
                ASTSource(function, signature=types, attrs=aligned),
                target=GPUTarget("cuda", int(arch[2:]), 32),
                options=dict(options(kernel, arch)),
            )
        except Exception as error:
            raise InternalError(f"compiling {kernel.symbol} for {arch} failed: {error}") from error
        _check_maps(kernel, compiled.metadata.tensordesc_meta or (), tiles)
        ptx = own_parameters(compiled.asm["ptx"], [spec.name in tiles for spec in specs])
        cubin, log = _machine_code(ptx, arch, Path(folder))
    return Assembled(ptx.encode() + b"\0", cubin, compiled.metadata.shared, log)


def _function(source: str, name: str) -> Any:
    """The kernel of a module's text, which Triton reads again by the module's file name."""
    file = f"<{name}>"
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    module: dict[str, Any] = {"__name__": name}
    exec(compile(source, file, "exec"), module)
    return module[name]


def _type(spec: ArgSpec, real: str, tiles: Mapping[str, Tiles]) -> str:
    if spec.name in tiles:
        return f"tensordesc<{_REALS[real]}[{tiles[spec.name].box}, 64]>"
    if spec.ctype.endswith("*"):
        return f"*{_REALS[real] if 'real' in spec.ctype else _SCALARS[spec.ctype.split()[-2]]}"
    return _SCALARS[spec.ctype]


def _check_maps(kernel: KernelSpec, found: Sequence[Mapping[str, Any]], tiles: Mapping[str, Tiles]) -> None:
    """Raise InternalError if Triton reads tiles in another way than the runtime's tensor maps say."""
    for each, tile in zip(found, tiles.values(), strict=True):
        if (list(each["block_size"]), each["swizzle"]) != ([tile.box, 64], 3):
            raise InternalError(f"{kernel.symbol} wants a tensor map as {json.dumps(each)}, not in boxes of {tile.box}")


def own_parameters(ptx: str, maps: Sequence[bool]) -> str:
    """The PTX of an entry without the parameters that Triton adds to its arguments, of which `maps` are tensor maps.

    Raises InternalError if the kernel reads any of them.
    """
    head = re.search(r"(?s)\.entry\s+\w+\((.*?)\n\)", ptx)
    assert head is not None
    declared = [line.strip().rstrip(",") for line in head[1].strip().splitlines()]
    kept = []
    for is_map in maps:
        kept.append(declared.pop(0))
        added, declared = declared[: _MAP_EXTRAS * is_map], declared[_MAP_EXTRAS * is_map :]
        _check_unused(ptx, added)
    if len(declared) != _SCRATCH:
        raise InternalError(f"a Triton kernel of {len(maps)} arguments has other parameters than expected: {head[1]}")
    _check_unused(ptx, declared)
    return f"{ptx[: head.start(1)]}\n\t{', '.join(kept)}{ptx[head.end(1) :]}"


def _check_unused(ptx: str, declared: Sequence[str]) -> None:
    for line in declared:
        name = re.findall(r"\w+", line.partition("[")[0])[-1]
        if len(re.findall(rf"\b{name}\b", ptx)) > 1:
            raise InternalError(f"a Triton kernel reads {name}, a parameter that is no argument of it")


def _machine_code(ptx: str, arch: ArchName, folder: Path) -> tuple[bytes, str]:
    source, target = folder / "kernel.ptx", folder / "kernel.cubin"
    source.write_text(ptx)
    name = "sm_90a" if arch == "sm90" else arch.replace("sm", "sm_")
    command = [str(_ptxas()), "-v", f"--gpu-name={name}", source.name, "-o", target.name]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=folder)
    if done.returncode:
        raise InternalError(f"ptxas failed for {arch}: {done.stderr[-4000:]}")
    return target.read_bytes(), done.stderr
