"""CUDA code generation: kernels become machine code for each GPU architecture, with no GPU and no CUDA toolkit here.

NVRTC compiles a kernel on its own into a cubin of the content-addressed cache. What a GPU can't launch, for want of
shared memory or registers, is refused now and not when the plan is loaded.
"""

from __future__ import annotations

import io
import os
import re
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache, partial
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path
from typing import Any

import msgspec

from ...kernels_templates.catalog import Axis, Grid, KernelSpec
from ...kernels_templates.registry import CUDA_FAMILIES
from ...kernels_templates.render import arguments, render_cuda
from ...runtime.errors import InternalError, UserError
from ...runtime.plan import ArchName, CudaKernel, CudaModule, GridAxis, TensorMap
from ..cache import cached, content_key

SHARED_LIMITS: Mapping[ArchName, int] = {"sm80": 166_912, "sm86": 101_376, "sm89": 101_376, "sm90": 232_448}
"""Bytes of shared memory that a block may have (CUDA C++ programming guide, compute capabilities)."""
REGISTERS = 65_536
"""Of a multiprocessor, on every architecture here."""
_OPTIONS: Mapping[str, Any] = {
    "std": "c++17",
    "device_as_default_execution_space": True,
    "ptxas_options": ["-v"],
}


class Compiled(msgspec.Struct, frozen=True):
    """A cubin, and what it takes of a multiprocessor."""

    cubin: bytes
    registers: int
    """A thread."""
    shared: int
    """Static bytes."""
    spilled: int
    """Bytes of registers kept in memory, a thread."""


@cache
def compiler_version() -> str:
    """NVRTC's version, for cache keys and reports. Raises UserError if it isn't installed."""
    try:
        return f"nvrtc {version('nvidia-cuda-nvrtc')}"
    except ImportError:
        raise UserError(
            "compiling for CUDA needs NVRTC, not installed here: pip install 'plan-toolkit[compile]'"
        ) from None


def compile_kernel(kernel: KernelSpec, arch: ArchName) -> Compiled:
    """The machine code of a kernel, from the cache or compiled now.

    Raises InternalError with the compiler's message, or if a GPU of this architecture could not launch it.
    """
    source = render_cuda(kernel, arch)
    key = content_key(source, compiler_version(), arch, str(_OPTIONS))
    path = cached(
        key, ".cubin", lambda target: target.write_bytes(msgspec.msgpack.encode(_compile(source, kernel, arch)))
    )
    compiled = msgspec.msgpack.decode(path.read_bytes(), type=Compiled)
    _check_resources(kernel, arch, compiled)
    return compiled


def kernel_source_hash(kernel: KernelSpec, archs: Sequence[ArchName]) -> str:
    """Hash of a kernel's sources over all architectures, as `plan.Kernel` records it."""
    return content_key(*(render_cuda(kernel, arch) for arch in archs))[:16]


def _compile(source: str, kernel: KernelSpec, arch: ArchName) -> Compiled:
    from cuda.core import Program, ProgramOptions

    options = ProgramOptions(arch=_target(arch), include_path=_includes(), **_OPTIONS)
    log = io.StringIO()
    try:
        cubin = Program(source, code_type="c++", options=options).compile("cubin", logs=log).code
    except Exception as error:
        raise InternalError(
            f"compiling {kernel.symbol} for {arch} failed: {error}\n{log.getvalue()[-4000:]}"
        ) from error
    text = log.getvalue()
    return Compiled(
        bytes(cubin),
        _found(r"Used (\d+) registers", text),
        _found(r"(\d+) bytes smem", text),
        _found(r"(\d+) bytes spill stores", text),
    )


def _target(arch: ArchName) -> str:
    """As NVRTC spells it; `a` allows the instructions that only this architecture has."""
    return "sm_90a" if arch == "sm90" else arch.replace("sm", "sm_")


@cache
def _includes() -> list[str]:
    """Folders of CUDA's headers, as the wheels install them."""
    import nvidia

    return [str(path) for root in nvidia.__path__ for path in sorted(Path(root).glob("cu*/include"))]


def _found(pattern: str, text: str) -> int:
    match = re.search(pattern, text)
    return int(match[1]) if match else 0


def _check_resources(kernel: KernelSpec, arch: ArchName, compiled: Compiled) -> None:
    grid = launch_grid(kernel, arch)
    shared, registers = compiled.shared + grid.shared, compiled.registers * grid.threads
    if shared > SHARED_LIMITS[arch] or registers > REGISTERS:
        raise InternalError(
            f"{kernel.symbol} needs {shared} bytes of shared memory and {registers} registers a block, "
            f"{arch} has {SHARED_LIMITS[arch]} and {REGISTERS}"
        )


def launch_grid(kernel: KernelSpec, arch: ArchName) -> Grid:
    """How a kernel is launched."""
    return CUDA_FAMILIES[kernel.family].variant(arch).grid(kernel.params)


# --- modules ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Job:
    arch: ArchName
    name: str
    kernel: KernelSpec


def build_modules(
    kernels: Mapping[str, KernelSpec],
    archs: Sequence[ArchName],
    directory: Path,
    progress: Callable[[str, int, int], None] | None = None,
) -> tuple[CudaModule, ...]:
    """Compile `kernels` (by the names that launches use) and write `directory/kernels/ARCH.bin` for every architecture.

    `progress` gets (what, done, of).
    """
    jobs = [_Job(arch, name, kernel) for arch in archs for name, kernel in sorted(kernels.items())]
    found: dict[ArchName, dict[str, Compiled]] = {arch: {} for arch in archs}
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        results = pool.map(lambda job: compile_kernel(job.kernel, job.arch), jobs)
        for done, (job, compiled) in enumerate(zip(jobs, results, strict=True), 1):
            found[job.arch][job.name] = compiled
            if progress is not None:
                progress(f"{job.name} for {job.arch}", done, len(jobs))
    (directory / "kernels").mkdir(exist_ok=True)
    return tuple(_write(arch, found[arch], kernels, directory) for arch in archs)


def _write(
    arch: ArchName, compiled: Mapping[str, Compiled], kernels: Mapping[str, KernelSpec], directory: Path
) -> CudaModule:
    file, data, entries = f"kernels/{arch}.bin", bytearray(), {}
    for name, each in compiled.items():
        entries[name] = _entry(kernels[name], arch, each, len(data))
        data += each.cubin
        data += bytes(-len(data) % 64)
    (directory / file).write_bytes(data)
    return CudaModule(arch, file, len(data), sha256(data).hexdigest(), entries)


def _entry(kernel: KernelSpec, arch: ArchName, compiled: Compiled, offset: int) -> CudaKernel:
    grid, family = launch_grid(kernel, arch), CUDA_FAMILIES[kernel.family]
    names = [spec.name for spec in arguments(family, kernel)]
    tiles = family.variant(arch).tiles(kernel.params)
    axis = partial(_axis, names=names)
    return CudaKernel(
        offset=offset,
        bytes=len(compiled.cubin),
        entry=kernel.symbol,
        threads=grid.threads,
        grid=(axis(grid.x), axis(grid.y), axis(grid.z)),
        shared=grid.shared,
        registers=compiled.registers,
        static_shared=compiled.shared,
        spilled=compiled.spilled,
        maps=tuple(
            TensorMap(names.index(name), names.index(each.rows), names.index(each.columns), each.box)
            for name, each in tiles.items()
        ),
    )


def _axis(axis: Axis, names: Sequence[str]) -> GridAxis:
    return GridAxis(tuple(names.index(name) for name in axis.factors), axis.divisor, axis.persistent, axis.times)
