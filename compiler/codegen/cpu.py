"""CPU code generation: kernels and the step become one shared library for each ISA level.

A kernel is compiled on its own into an object of the content-addressed cache, since it does not depend on a plan's
shapes; only the step, which is a list of calls, is new for each plan. Libraries need libc's memory and clock
functions alone, so that they load on any x86-64 Linux.
"""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from threading import Lock

from ...kernels_templates.catalog import ArgSpec, KernelSpec
from ...kernels_templates.registry import FAMILIES
from ...kernels_templates.render import arguments, render, render_choice, render_template, signature, tvm_symbol
from ...kernels_templates.tvm.families import script
from ...runtime.errors import InternalError, UserError
from ...runtime.plan import (
    ArenaArg,
    Arg,
    Bucket,
    CacheArg,
    ConstArg,
    DimArg,
    InputArg,
    IsaName,
    Launch,
    Library,
    WeightArg,
)
from ...runtime.step import ABI_HASH, MAX_TOP
from ..cache import cached, content_key
from .tvm import compile_tvm_object

SPINS = 4000
"""Pauses a waiting thread makes before it sleeps: some tens of microseconds."""


@dataclass(frozen=True)
class IsaLevel:
    """One instruction set level: how gcc and clang, and how zig spell it, and the CPU flags a machine must have."""

    name: IsaName
    flags: tuple[str, ...]
    zig_flags: tuple[str, ...]
    requires: tuple[str, ...]


_V3 = ("avx2", "bmi1", "bmi2", "f16c", "fma", "movbe")
ISA_LEVELS: tuple[IsaLevel, ...] = (
    IsaLevel("x86-64-v3", ("-march=x86-64-v3",), ("-mcpu=x86_64_v3",), _V3),
    IsaLevel(
        "x86-64-v4",
        ("-march=x86-64-v4", "-mavx512vnni"),
        ("-mcpu=x86_64_v4+avx512vnni",),
        (*_V3, "avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl", "avx512_vnni"),
    ),
)

_COMPILE_FLAGS = (
    "-std=c++17",
    "-fno-exceptions",
    "-fno-rtti",
    "-fno-threadsafe-statics",
    "-fno-asynchronous-unwind-tables",
    "-fno-stack-protector",
    "-fno-math-errno",
    "-ffp-contract=fast",
    "-fPIC",
    "-fvisibility=hidden",
    "-w",
)


@dataclass(frozen=True)
class Compiler:
    """A C++ compiler: the command that starts it, and its version for cache keys and the plan's report."""

    command: tuple[str, ...]
    version: str = ""

    @property
    def is_gcc(self) -> bool:
        return bool(self.version) and "clang" not in self.version

    @property
    def linker(self) -> tuple[str, ...]:
        """The command that links: zig's for C, since that for C++ first builds a standard library."""
        return (*self.command[:-1], "cc") if "ziglang" in self.command else self.command

    def target_flags(self, level: IsaLevel) -> tuple[str, ...]:
        """Flags that choose the instruction set."""
        if "ziglang" in self.command:
            return ("-target", "x86_64-linux-gnu.2.17", *level.zig_flags)
        return level.flags


@cache
def find_compiler() -> Compiler:
    """`$CXX`, else the system's g++ or clang++ where it knows x86-64-v4, else ziglang's clang.

    Raises UserError if there is none.
    """
    chosen = os.environ.get("CXX")
    candidates = [(chosen,)] if chosen else [("g++",), ("clang++",), (sys.executable, "-m", "ziglang", "c++")]
    for command in candidates:
        if _works(Compiler(command)):
            version = subprocess.run([*command, "--version"], capture_output=True, text=True, check=False).stdout
            return Compiler(command, version.splitlines()[0] if version else command[0])
    wanted = f"$CXX ({chosen})" if chosen else "g++ (11 or newer), clang++ or the ziglang package"
    raise UserError(f"compiling for cpu needs a C++ compiler, but {wanted} does not work here: install `ziglang`")


def _works(compiler: Compiler) -> bool:
    if shutil.which(compiler.command[0]) is None:
        return False
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "probe.cpp").write_text("int probe(void) { return 0; }\n")
        command = [*compiler.command, *_COMPILE_FLAGS, *compiler.target_flags(ISA_LEVELS[-1]), "-c", "probe.cpp"]
        return subprocess.run(command, cwd=folder, capture_output=True, check=False).returncode == 0


def _run(command: Sequence[str], folder: Path, what: str) -> None:
    ran = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if ran.returncode and os.strerror(errno.ENOSPC) in ran.stderr:
        raise UserError(f"no space left while {what} in {folder}: free some, or set TMPDIR and TOOLKIT_CACHE elsewhere")
    if ran.returncode:
        raise InternalError(f"{what} failed: {' '.join(command)}\n{ran.stderr[-4000:]}")


def compile_object(source: str, level: IsaLevel, name: str, optimize: str = "-O3") -> Path:
    """The cached object file of a C++ source for one ISA level. Raises InternalError with the compiler's message."""
    compiler = find_compiler()
    flags = (optimize, *_COMPILE_FLAGS, *compiler.target_flags(level))

    def make(path: Path) -> None:
        # Compiled under a fixed relative name, so that the object's bytes depend on nothing else.
        (path.parent / "kernel.cpp").write_text(source)
        headers = _parsed_headers(compiler, flags) if _HEADERS[0] in source else ()
        command = [*compiler.command, *flags, *headers, "-c", "kernel.cpp", "-o", path.name]
        _run(command, path.parent, f"compiling {name} for {level.name}")

    return cached(content_key(source, compiler.version, *flags), ".o", make)


_HEADERS = ("#include <immintrin.h>", "#include <math.h>", "#include <stdint.h>", "#include <string.h>")
_HEADERS_LOCK = Lock()


def _parsed_headers(compiler: Compiler, flags: Sequence[str]) -> tuple[str, ...]:
    """Options by which gcc reads the system headers parsed: it takes longer to parse them than to compile most kernels.

    The object is the same with them and without.
    """
    if not compiler.is_gcc:
        return ()
    key = content_key("headers", compiler.version, *flags)
    text = cached(key, ".h", lambda path: path.write_text("\n".join(_HEADERS)))

    def make(path: Path) -> None:
        command = [*compiler.command, *flags, "-x", "c++-header", str(text), "-o", path.name]
        _run(command, path.parent, "parsing headers")

    with _HEADERS_LOCK:
        cached(key, ".h.gch", make)
    return ("-include", str(text))


def kernel_source_hash(kernel: KernelSpec) -> str:
    """Hash of a kernel's sources over all ISA levels, as `plan.Kernel` records it."""
    names = [level.name for level in ISA_LEVELS]
    sources = [render(kernel.any_shape, name) for name in names]
    if kernel.choices:
        sources += [render_choice(kernel, name) for name in names]
        sources += [script(kernel, tvm_symbol(kernel), name) for name in names]
    return content_key(*sources)[:16]


def build_libraries(
    buckets: Sequence[Bucket],
    kernels: Mapping[str, KernelSpec],
    weight_names: Iterable[str],
    directory: Path,
    *,
    levels: Sequence[IsaLevel] = ISA_LEVELS,
    progress: Callable[[str, int, int], None] | None = None,
) -> tuple[Library, ...]:
    """Compile and link `directory/kernels/cpu-<isa>.so` for every ISA level.

    `kernels` maps the names that launches use to specs; `weight_names` are the keys of `Plan.weights`; `progress` gets
    (what, done, of).
    """
    step = step_source(buckets, kernels, weight_names)
    jobs: list[Job] = []
    for level in levels:
        jobs += kernel_jobs([kernel for _, kernel in sorted(kernels.items())], level)
        jobs.append(Job(level, "step", partial(compile_object, step, level, "step", "-O1")))
    objects = compile_all(jobs, progress)
    (directory / "kernels").mkdir(exist_ok=True)
    return tuple(_library(objects[level.name], level, directory) for level in levels)


@dataclass(frozen=True)
class Job:
    """An object to make: the level and name are for reports."""

    level: IsaLevel
    name: str
    make: Callable[[], Path]


def kernel_jobs(kernels: Iterable[KernelSpec], level: IsaLevel) -> list[Job]:
    """The objects that kernels need at a level, each once: where there are choices, the code of those chosen too."""
    jobs: dict[str, Callable[[], Path]] = {}
    for kernel in kernels:
        chosen = {choice.generator for choice in kernel.choices if choice.isa == level.name}
        if not kernel.choices:
            jobs[kernel.symbol] = partial(_compile_cpp, kernel, level)
            continue
        source = render_choice(kernel, level.name)
        jobs[kernel.symbol] = partial(compile_object, source, level, kernel.symbol, "-O1")
        if "cpp" in chosen:
            jobs[kernel.any_shape.symbol] = partial(_compile_cpp, kernel.any_shape, level)
        if "tvm" in chosen:
            jobs[tvm_symbol(kernel)] = partial(compile_tvm_object, kernel, level.name)
    return [Job(level, name, make) for name, make in jobs.items()]


def compile_all(jobs: Sequence[Job], progress: Callable[[str, int, int], None] | None = None) -> dict[str, list[Path]]:
    """The objects of all jobs by level, in their order; `progress` gets (what, done, of)."""
    objects: dict[str, list[Path]] = {job.level.name: [] for job in jobs}
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        try:
            results = pool.map(lambda job: job.make(), jobs)
            for done, (job, path) in enumerate(zip(jobs, results, strict=True)):
                objects[job.level.name].append(path)
                if progress is not None:
                    progress(f"{job.name} for {job.level.name}", done + 1, len(jobs))
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)  # do not compile the rest before the error shows
            raise
    return objects


def _compile_cpp(kernel: KernelSpec, level: IsaLevel) -> Path:
    return compile_object(render(kernel, level.name), level, kernel.symbol)


def link(objects: Sequence[Path], level: IsaLevel, library: Path, exports: str) -> None:
    """Link objects into a shared library that shows only the symbols that start with `exports`."""
    flags = ("-shared", "-fPIC", "-nodefaultlibs", "-Wl,--build-id=none", "-Wl,-s", "-Wl,-z,noexecstack")
    compiler = find_compiler()
    with tempfile.TemporaryDirectory() as folder:
        shown = Path(folder, "exports")
        shown.write_text(f"{{ global: {exports}*; local: *; }};\n")
        inputs = [f"-Wl,--version-script={shown}", *map(str, objects), "-o", str(library.resolve()), "-lm", "-lc"]
        command = [*compiler.linker, *compiler.target_flags(level), *flags, *inputs]
        _run(command, library.parent, f"linking {library.name}")


def _library(objects: Sequence[Path], level: IsaLevel, directory: Path) -> Library:
    file = f"kernels/cpu-{level.name}.so"
    link(objects, level, directory / file, "toolkit_")
    data = (directory / file).read_bytes()
    return Library(level.name, file, len(data), hashlib.sha256(data).hexdigest(), level.requires)


# --- the step ---------------------------------------------------------------------------------------------------------


def step_source(buckets: Sequence[Bucket], kernels: Mapping[str, KernelSpec], weight_names: Iterable[str]) -> str:
    """The C++ of the step: one function a bucket, a call a launch."""
    index = {name: position for position, name in enumerate(sorted(weight_names))}
    rendered = []
    for bucket in buckets:
        launches = [
            {"call": _call(launch, kernels[launch.kernel], index), "barrier": launch.barrier}
            for launch in bucket.launches
        ]
        rendered.append(
            {
                "name": bucket.name,
                "max_tokens": bucket.max_tokens,
                "max_sequences": bucket.max_sequences,
                "max_rows": bucket.max_rows,
                "launches": launches,
            }
        )
    declarations = [signature(kernel) for _, kernel in sorted(kernels.items())]
    return render_template(
        "cpu/step.cpp.j2", buckets=rendered, declarations=declarations, abi=ABI_HASH, max_top=MAX_TOP, spins=SPINS
    )


def _call(launch: Launch, kernel: KernelSpec, weights: Mapping[str, int]) -> str:
    specs = arguments(FAMILIES[kernel.family], kernel)
    if len(specs) != len(launch.args):
        names = [spec.name for spec in specs]
        raise InternalError(f"launch of {launch.kernel} has {len(launch.args)} arguments for {names}")
    values = [_argument(arg, spec, weights) for arg, spec in zip(launch.args, specs, strict=True)]
    return f"{kernel.symbol}({', '.join(values)}, tid, n)"


def _argument(arg: Arg, spec: ArgSpec, weights: Mapping[str, int]) -> str:
    match arg:
        case ArenaArg(offset=offset):
            return f"({spec.ctype})(a + {offset})"
        case WeightArg(name=name):
            return f"({spec.ctype})w[{weights[name]}]"
        case CacheArg(group=group, slot=slot):
            return f"({spec.ctype})(c[{group}] + {slot} * stride[{group}])"
        case InputArg(name=("slots" | "pages" | "page_stride") as name, group=group):
            return f"s->{name}[{group}]"
        case InputArg(name=name):
            return f"s->{name}"
        case DimArg(name=name, factor=factor):
            return f"s->{name}" if factor == 1 else f"s->{name} * {factor}"
        case ConstArg(value=value):
            return f"{float(value)!r}f" if spec.ctype == "float" else f"{int(value)}"
