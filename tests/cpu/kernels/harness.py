"""Compiles one kernel into a shared object and calls it on numpy arrays, as the plan's threads would.

    kernel = load_kernel(KernelSpec("quantize"), isa)
    out = Guarded((rows, width), np.float32)
    kernel(x, out.array, rows, width, threads=3)
    out.check()

x86-64-v4 code runs natively where the CPU has it, else through SIMDe's emulation where its headers are installed.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from toolkit.compiler.cache import cached, content_key
from toolkit.compiler.codegen.cpu import ISA_LEVELS, compile_object, find_compiler
from toolkit.compiler.codegen.tvm import compile_tvm_object
from toolkit.kernels_templates.catalog import KernelSpec
from toolkit.kernels_templates.packing import q8_pack, q8_unpack
from toolkit.kernels_templates.registry import FAMILIES
from toolkit.kernels_templates.render import arguments, render, tvm_symbol
from toolkit.runtime.plan import IsaName

Array = npt.NDArray[Any]

_LEVELS = {level.name: level for level in ISA_LEVELS}
_SIMDE = Path("/usr/include/simde/x86/avx512.h")
_EXPORT = "#pragma GCC visibility push(default)\n"
_EMULATION = Path(__file__).with_name("simde.h")


@cache
def _cpu_flags() -> frozenset[str]:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("flags"):
            return frozenset(line.split(":")[1].split())
    return frozenset()


def _native(isa: IsaName) -> bool:
    return set(_LEVELS[isa].requires) <= _cpu_flags()


def isas() -> list[IsaName]:
    """The ISA levels whose code can run here."""
    emulated = _SIMDE.exists() and shutil.which("g++") is not None
    return [isa for isa in _LEVELS if _native(isa) or (isa == "x86-64-v4" and emulated)]


class Kernel:
    """A callable kernel. Arguments follow the catalog; arrays are passed by address and must be C-contiguous."""

    def __init__(self, spec: KernelSpec, library: Path, symbol: str = "") -> None:
        self.args = arguments(FAMILIES[spec.family], spec)
        self._library = ctypes.CDLL(str(library))
        self.function: Callable[..., None] = self._library[symbol or spec.symbol]

    def __call__(self, *values: Array | int | float, threads: int = 1) -> None:
        """Does the shares of all threads, one after the other."""
        assert len(values) == len(self.args), f"expected {[arg.name for arg in self.args]}"
        converted = [_convert(arg.ctype, value) for arg, value in zip(self.args, values, strict=True)]
        for tid in range(threads):
            self.function(*converted, ctypes.c_int32(tid), ctypes.c_int32(threads))


def _convert(ctype: str, value: Array | int | float) -> Any:
    if isinstance(value, np.ndarray):
        assert ctype.endswith("*"), f"an array for {ctype}"
        assert value.flags.c_contiguous
        return ctypes.c_void_p(value.ctypes.data)
    assert not ctype.endswith("*"), f"a number for {ctype}"
    number: Any = {"float": ctypes.c_float, "int32_t": ctypes.c_int32, "int64_t": ctypes.c_int64}[ctype]
    return number(value)


@cache
def load_kernel(spec: KernelSpec, isa: IsaName = "x86-64-v3") -> Kernel:
    """The compiled kernel, from the cache if it was compiled before."""
    source, level, optimize = _EXPORT + render(spec, isa), _LEVELS[isa], "-O3"
    if not _native(isa):  # emulation compiles several times slower at -O3
        source, level = source.replace("#include <immintrin.h>", _EMULATION.read_text()), _LEVELS["x86-64-v3"]
        optimize = "-O1"
    key = content_key("test", find_compiler().version, optimize, source)
    return Kernel(spec, cached(key, ".so", _linker(spec, source, level, optimize)))


@cache
def load_tvm_kernel(spec: KernelSpec, isa: IsaName) -> Kernel:
    """TVM's code for a kernel with a shape, for a level that runs natively."""
    compiled = compile_tvm_object(spec, isa)

    def link(path: Path) -> None:
        subprocess.run([*find_compiler().command, "-shared", str(compiled), "-lm", "-o", str(path)], check=True)

    return Kernel(spec, cached(content_key("test", compiled.name), ".so", link), tvm_symbol(spec))


def native_isas() -> list[IsaName]:
    """The ISA levels that the CPU has."""
    return [isa for isa in _LEVELS if _native(isa)]


def _linker(spec: KernelSpec, source: str, level: Any, optimize: str) -> Callable[[Path], None]:
    def make(path: Path) -> None:
        compiled = compile_object(source, level, spec.symbol, optimize)
        subprocess.run([*find_compiler().command, "-shared", str(compiled), "-lm", "-o", str(path)], check=True)

    return make


class Guarded:
    """A poisoned, 64-byte aligned output array (NaN, or 0x5A bytes of integers) with guard bytes around it."""

    GUARD = 256

    def __init__(self, shape: int | tuple[int, ...], dtype: npt.DTypeLike) -> None:
        kind = np.dtype(dtype)
        size = int(np.prod(shape)) * kind.itemsize
        self._bytes = np.full(size + 2 * self.GUARD + 64, 0x5A, np.uint8)
        self._start = self.GUARD + -(self._bytes.ctypes.data + self.GUARD) % 64
        self._end = self._start + size
        self.array: Array = self._bytes[self._start : self._end].view(kind).reshape(shape)
        if kind.kind == "f":
            self.array.fill(np.nan)

    def check(self) -> None:
        """Nothing was written outside the array."""
        assert (self._bytes[: self._start] == 0x5A).all(), "written before the array"
        assert (self._bytes[self._end :] == 0x5A).all(), "written behind the array"


def aligned(array: Array) -> Array:
    """A 64-byte aligned copy that ends where readable memory need not go on, as buffers in the arena do."""
    copy = Guarded(array.shape, array.dtype).array
    copy[...] = array
    return copy


def random_floats(rng: np.random.Generator, *shape: int, scale: float = 1.0) -> npt.NDArray[np.float32]:
    """Normal float32 numbers, aligned."""
    result: npt.NDArray[np.float32] = aligned(rng.standard_normal(shape, np.float32) * np.float32(scale))
    return result


def assert_q8(packed: npt.NDArray[np.uint8], want: npt.NDArray[np.floating[Any]]) -> None:
    """Rows that stand for `want` as closely as 127 steps a group can, with right scales and sums."""
    rows, width = want.shape
    top = np.abs(want).reshape(rows, -1, 32).max(axis=2).repeat(32, axis=1)
    assert (np.abs(q8_unpack(packed, width) - want) <= top * (0.501 / 127)).all()
    again = q8_pack(want.astype(np.float32))
    tables = slice(width, width + width // 4)
    np.testing.assert_allclose(
        np.ascontiguousarray(packed[:, tables]).view(np.float32)[:, : width // 32],
        np.ascontiguousarray(again[:, tables]).view(np.float32)[:, : width // 32],
        rtol=1e-5,
    )
    sums = np.ascontiguousarray(packed[:, tables]).view(np.float32)[:, width // 32 :]
    stated = q8_unpack(packed, width).reshape(rows, -1, 32).astype(np.float64).sum(axis=2)
    np.testing.assert_allclose(sums, stated, rtol=1e-5, atol=1e-5 * top.max())
