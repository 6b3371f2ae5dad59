"""CUDA code generation: kernels become machine code for each GPU architecture, with no GPU and no CUDA toolkit here.

NVRTC, or Triton for what is written in it, compiles a kernel on its own into a cubin of the content-addressed cache.
What a GPU can't launch, for want of shared memory or registers, is refused now and not when the plan is loaded.
"""

from __future__ import annotations

import io
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cache, partial
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import msgspec

from ...kernels_templates.catalog import Axis, Grid, KernelSpec, ParamValue
from ...kernels_templates.registry import CUDA_FAMILIES, is_triton
from ...kernels_templates.render import arguments, render_cuda
from ...runtime.errors import InternalError, UserError
from ...runtime.plan import ArchName, CodeForm, CudaKernel, CudaModule, GridAxis, TensorMap
from ..cache import cached, cached_path, content_key
from . import triton

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
    """Code of a kernel, and what its machine code takes of a multiprocessor."""

    code: bytes
    registers: int
    """A thread."""
    shared: int
    """Static bytes."""
    spilled: int
    """Bytes of registers kept in memory, a thread."""
    dynamic: int = 0
    """Bytes of dynamic shared memory besides the grid's, which the compiler chose."""


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
    path = cached(
        _key(source, kernel, arch),
        ".cubin",
        lambda target: target.write_bytes(msgspec.msgpack.encode(_compile(source, kernel, arch))),
    )
    compiled = msgspec.msgpack.decode(path.read_bytes(), type=Compiled)
    _check_resources(kernel, arch, compiled)
    return compiled


def _key(source: str, kernel: KernelSpec, arch: ArchName) -> str:
    record = ",".join(Compiled.__struct_fields__)  # as it is stored
    if is_triton(kernel):
        return content_key(source, triton.compiler_version(), arch, str(triton.options(kernel, arch)), record)
    return content_key(source, compiler_version(), arch, str(_OPTIONS), record)


def kernel_source_hash(kernel: KernelSpec, archs: Sequence[ArchName]) -> str:
    """Hash of a kernel's sources over all architectures, as `plan.Kernel` records it."""
    return content_key(*(render_cuda(kernel, arch) for arch in archs))[:16]


def compile_ptx(kernel: KernelSpec, arch: ArchName) -> bytes:
    """The kernel as PTX, which drivers compile for newer GPUs too. Raises InternalError with the compiler's message."""
    source = render_cuda(kernel, arch)
    return cached(
        _key(source, kernel, arch), ".ptx", lambda target: target.write_bytes(_to_ptx(source, kernel, arch))
    ).read_bytes()


def compile_form(kernel: KernelSpec, arch: ArchName, form: CodeForm) -> Compiled:
    """A kernel's code in either form, with what its machine code takes. Raises InternalError as `compile_kernel`."""
    compiled = compile_kernel(kernel, arch)
    return compiled if form == "cubin" else msgspec.structs.replace(compiled, code=compile_ptx(kernel, arch))


def _to_ptx(source: str, kernel: KernelSpec, arch: ArchName) -> bytes:
    if is_triton(kernel):
        return triton.assemble(source, kernel, arch).ptx
    from cuda.bindings import nvrtc  # cuda.core asks the driver first, which need not be here

    options = [
        *(f"--gpu-architecture={_target(arch).replace('sm', 'compute')}", "-std=c++17"),
        *("--device-as-default-execution-space", *(f"-I{folder}" for folder in _includes())),
    ]
    _, program = nvrtc.nvrtcCreateProgram(source.encode(), b"kernel.cu", 0, [], [])
    (status,) = nvrtc.nvrtcCompileProgram(program, len(options), [option.encode() for option in options])
    if int(status):
        log = bytes(nvrtc.nvrtcGetProgramLogSize(program)[1])
        nvrtc.nvrtcGetProgramLog(program, log)
        raise InternalError(f"compiling {kernel.symbol} for {arch} failed: {log.decode()[-4000:]}")
    ptx = bytes(nvrtc.nvrtcGetPTXSize(program)[1])
    nvrtc.nvrtcGetPTX(program, ptx)
    nvrtc.nvrtcDestroyProgram(program)
    return ptx


def _compile(source: str, kernel: KernelSpec, arch: ArchName) -> Compiled:
    if is_triton(kernel):
        made = triton.assemble(source, kernel, arch)
        return _read(made.cubin, made.log, made.shared)
    from cuda.core import Program, ProgramOptions

    options = ProgramOptions(arch=_target(arch), include_path=_includes(), **_OPTIONS)
    log = io.StringIO()
    try:
        cubin = Program(source, code_type="c++", options=options).compile("cubin", logs=log).code
    except Exception as error:
        raise InternalError(
            f"compiling {kernel.symbol} for {arch} failed: {error}\n{log.getvalue()[-4000:]}"
        ) from error
    return _read(bytes(cubin), log.getvalue())


def _read(cubin: bytes, log: str, dynamic: int = 0) -> Compiled:
    """Machine code with what ptxas says of it."""
    return Compiled(
        cubin,
        registers=_found(r"Used (\d+) registers", log),
        shared=_found(r"(\d+) bytes smem", log),
        spilled=_found(r"(\d+) bytes spill stores", log),
        dynamic=dynamic,
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
    shared, registers = compiled.shared + grid.shared + compiled.dynamic, compiled.registers * grid.threads
    if shared > SHARED_LIMITS[arch] or registers > REGISTERS:
        raise InternalError(
            f"{kernel.symbol} needs {shared} bytes of shared memory and {registers} registers a block, "
            f"{arch} has {SHARED_LIMITS[arch]} and {REGISTERS}"
        )


def launch_grid(kernel: KernelSpec, arch: ArchName) -> Grid:
    """How a kernel is launched."""
    return CUDA_FAMILIES[kernel.family].variant(arch).grid(kernel.params)


# --- processes --------------------------------------------------------------------------------------------------------


class _Order(msgspec.Struct, frozen=True):
    """A kernel for a process to compile."""

    family: str
    params: dict[str, ParamValue]
    shape: dict[str, int]
    arch: ArchName
    form: CodeForm


class Compilers:
    """Compiles many kernels at once in a process for each core, since NVRTC compiles one at a time in each.

    The cache is how machine code comes back, so a process is started only for what is not there.
    """

    def __init__(self) -> None:
        count = len(os.sched_getaffinity(0))
        self._pool = ThreadPoolExecutor(count)
        self._started: list[subprocess.Popen[bytes]] = []
        self._idle: SimpleQueue[subprocess.Popen[bytes] | None] = SimpleQueue()
        for _ in range(count):
            self._idle.put(None)

    def __enter__(self) -> Compilers:
        return self

    def __exit__(self, *error: object) -> None:
        self._pool.shutdown(cancel_futures=True)
        for process in self._started:
            process.communicate()  # the end of its input ends it

    def compile(self, jobs: Iterable[tuple[KernelSpec, ArchName, CodeForm]]) -> Iterator[Compiled]:
        """The code of each, in order. Raises InternalError as `compile_kernel` does."""
        return self._pool.map(lambda job: self._compile(*job), jobs)

    def _compile(self, kernel: KernelSpec, arch: ArchName, form: CodeForm) -> Compiled:
        if not cached_path(_key(render_cuda(kernel, arch), kernel, arch), f".{form}").exists():
            self._have_compiled(_Order(kernel.family, dict(kernel.params), dict(kernel.shape), arch, form))
        return compile_form(kernel, arch, form)  # if that failed, this says why

    def _have_compiled(self, order: _Order) -> None:
        process = self._idle.get()
        try:
            if process is None:
                command = [sys.executable, "-P", "-m", __name__]
                process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
                self._started.append(process)
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write(msgspec.json.encode(order) + b"\n")
            process.stdin.flush()
            process.stdout.readline()
        except OSError:
            process = None  # it died; the caller compiles
        finally:
            self._idle.put(process)


def main() -> None:
    """Compile each order that comes in a line of the standard input, and answer with a line when it is done."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent's to handle
    for line in sys.stdin:
        order = msgspec.json.decode(line, type=_Order)
        with suppress(Exception):  # the parent meets it too
            compile_form(KernelSpec(order.family, order.params, order.shape), order.arch, order.form)
        print(flush=True)


# --- modules ----------------------------------------------------------------------------------------------------------


def build_modules(
    kernels: Mapping[str, KernelSpec],
    archs: Sequence[ArchName],
    directory: Path,
    progress: Callable[[str, int, int], None] | None = None,
) -> tuple[CudaModule, ...]:
    """Compile `kernels` (by the names that launches use) and write `directory/kernels/ARCH.bin` for every architecture,
    and the PTX of the newest one below sm90, whose own instructions no newer GPU has.

    `progress` gets (what, done, of).
    """
    portable = [arch for arch in sorted(archs) if arch != "sm90"][-1:]
    modules: list[tuple[ArchName, CodeForm]] = [
        *((arch, "cubin") for arch in archs),
        *((arch, "ptx") for arch in portable),
    ]
    jobs = [(*module, name) for module in modules for name in sorted(kernels)]
    found: dict[tuple[ArchName, CodeForm], dict[str, Compiled]] = {module: {} for module in modules}
    with Compilers() as compilers:
        results = compilers.compile([(kernels[name], arch, form) for arch, form, name in jobs])
        for done, ((arch, form, name), compiled) in enumerate(zip(jobs, results, strict=True), 1):
            found[arch, form][name] = compiled
            if progress is not None:
                progress(f"{name} for {arch}{' and newer' if form == 'ptx' else ''}", done, len(jobs))
    (directory / "kernels").mkdir(exist_ok=True)
    return tuple(_write(*module, found[module], kernels, directory) for module in modules)


def _write(
    arch: ArchName, form: CodeForm, compiled: Mapping[str, Compiled], kernels: Mapping[str, KernelSpec], directory: Path
) -> CudaModule:
    file, data, entries = f"kernels/{arch}{'-ptx' if form == 'ptx' else ''}.bin", bytearray(), {}
    for name, each in compiled.items():
        entries[name] = _entry(kernels[name], arch, each, len(data))
        data += each.code
        data += bytes(-len(data) % 64)
    (directory / file).write_bytes(data)
    return CudaModule(arch, file, len(data), sha256(data).hexdigest(), entries, form)


def _entry(kernel: KernelSpec, arch: ArchName, compiled: Compiled, offset: int) -> CudaKernel:
    grid, family = launch_grid(kernel, arch), CUDA_FAMILIES[kernel.family]
    names = [spec.name for spec in arguments(family, kernel)]
    tiles = family.variant(arch).tiles(kernel.params)
    axis = partial(_axis, names=names)
    return CudaKernel(
        offset=offset,
        bytes=len(compiled.code),
        entry=kernel.symbol,
        threads=grid.threads,
        grid=(axis(grid.x), axis(grid.y), axis(grid.z)),
        shared=grid.shared + compiled.dynamic,
        registers=compiled.registers,
        static_shared=compiled.shared,
        spilled=compiled.spilled,
        pdl=arch == "sm90" and (family.triton or "depend();" in render_cuda(kernel, arch)),
        maps=tuple(
            TensorMap(
                argument=names.index(name),
                rows=names.index(each.rows or name),
                columns=names.index(each.columns or name),
                box=each.box,
                depth=each.depth,
                block=each.block,
                bytes=each.bytes,
                width=each.width,
            )
            for name, each in tiles.items()
        ),
    )


def _axis(axis: Axis, names: Sequence[str]) -> GridAxis:
    return GridAxis(tuple(names.index(name) for name in axis.factors), axis.divisor, axis.persistent, axis.times)


if __name__ == "__main__":
    main()
