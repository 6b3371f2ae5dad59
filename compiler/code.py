"""The machine code of a plan, for either kind of target: its files, and the records of the kernels in them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ..kernels_templates.catalog import KernelSpec
from ..kernels_templates.cuda import runtime_kernels
from ..kernels_templates.registry import is_triton
from ..runtime.plan import CudaModule, Kernel, Library
from .codegen import cpu, cuda, triton
from .program import Program
from .targets import Target

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Code:
    """Kernels by the names that launches use, and the files that hold them."""

    kernels: Mapping[str, Kernel]
    libraries: tuple[Library, ...] = ()
    modules: tuple[CudaModule, ...] = ()
    versions: Mapping[str, str] = field(default_factory=dict)
    """Of what compiled them."""


def build_code(target: Target, programs: Sequence[Program], directory: Path, progress: Progress | None = None) -> Code:
    """Compile the kernels of all programs into files below `directory/kernels`.

    `progress` gets (what, done, of).
    """
    if target.kind == "cuda":
        return _build_modules(target, programs, directory, progress)
    (program,) = programs
    lowered = program.lowered
    libraries = cpu.build_libraries([program.bucket], lowered.kernels, lowered.weights, directory, progress=progress)
    return cpu_code(program, libraries)


def cpu_code(program: Program, libraries: tuple[Library, ...]) -> Code:
    """The code of a program that these libraries were built for."""
    kernels = _records(program.lowered.kernels, cpu.kernel_source_hash)
    return Code(kernels, libraries=libraries, versions={"c++": cpu.find_compiler().version})


def _build_modules(target: Target, programs: Sequence[Program], directory: Path, progress: Progress | None) -> Code:
    """Every kernel of any bucket, and those that the runtime launches around them."""
    kernels = {kernel.symbol: kernel for kernel in runtime_kernels()}
    for program in programs:
        kernels |= program.lowered.kernels
    modules = cuda.build_modules(kernels, target.archs, directory, progress)
    records = _records(kernels, lambda kernel: cuda.kernel_source_hash(kernel, target.archs))
    versions = {"nvrtc": cuda.compiler_version().removeprefix("nvrtc ")}
    if any(map(is_triton, kernels.values())):
        versions["triton"] = triton.compiler_version().removeprefix("triton ")
    return Code(records, modules=modules, versions=versions)


def _records(kernels: Mapping[str, KernelSpec], source_hash: Callable[[KernelSpec], str]) -> dict[str, Kernel]:
    return {
        name: Kernel(spec.family, dict(spec.params), source_hash(spec), dict(spec.shape), spec.choices)
        for name, spec in sorted(kernels.items())
    }
