"""Runs one kernel on the GPU over numpy arrays.

With TOOLKIT_GPU_ARCH=sm80 (or sm86, sm89) kernels are those of that architecture, which the driver compiles from their
PTX for the GPU that is there.
"""

from __future__ import annotations

import ctypes
import os
from functools import cache
from math import prod
from typing import Any, cast

import numpy as np
import numpy.typing as npt
from cuda.bindings import driver

from toolkit.compiler.codegen.cuda import compile_kernel, compile_ptx, launch_grid
from toolkit.kernels_templates.catalog import Axis, KernelSpec, ParamValue
from toolkit.kernels_templates.registry import CUDA_FAMILIES
from toolkit.kernels_templates.render import arguments
from toolkit.runtime.device.cuda.driver import tensor_map
from toolkit.runtime.plan import ArchName

Array = npt.NDArray[Any]
POISON = 0xFF
"""Bytes of outputs before a kernel runs: NaN in every float format."""
_SCALARS = {"int32_t": ctypes.c_int32, "int64_t": ctypes.c_int64, "uint64_t": ctypes.c_uint64, "float": ctypes.c_float}


def check(result: tuple[Any, ...]) -> Any:
    """The value of a driver call. Raises AssertionError with the error's name."""
    status, *values = result
    assert int(status) == 0, driver.cuGetErrorName(status)[1].decode()
    return values[0] if values else None


@cache
def gpu() -> tuple[ArchName, int]:
    """The architecture to compile for, and the number of multiprocessors."""
    check(driver.cuInit(0))
    device = check(driver.cuDeviceGet(0))
    check(driver.cuCtxSetCurrent(check(driver.cuDevicePrimaryCtxRetain(device))))
    attribute = driver.CUdevice_attribute
    names = ("COMPUTE_CAPABILITY_MAJOR", "COMPUTE_CAPABILITY_MINOR", "MULTIPROCESSOR_COUNT")
    major, minor, count = (
        check(driver.cuDeviceGetAttribute(getattr(attribute, f"CU_DEVICE_ATTRIBUTE_{name}"), device)) for name in names
    )
    archs: dict[int, ArchName] = {80: "sm80", 86: "sm86", 89: "sm89", 90: "sm90"}
    return cast(ArchName, os.environ.get("TOOLKIT_GPU_ARCH", archs[10 * major + minor])), count


class Buffer:
    """Device memory with a copy of an array."""

    def __init__(self, array: Array) -> None:
        gpu()
        self.array = np.ascontiguousarray(array)
        self.address = int(check(driver.cuMemAlloc(max(1, self.array.nbytes))))
        check(driver.cuMemcpyHtoD(self.address, self.array.ctypes.data, self.array.nbytes))

    def read(self) -> Array:
        """What it holds now; the memory is freed."""
        result = np.empty_like(self.array)
        check(driver.cuMemcpyDtoH(result.ctypes.data, self.address, result.nbytes))
        check(driver.cuMemFree(self.address))
        return result


@cache
def load(spec: KernelSpec) -> Any:
    """The kernel as a function of the driver."""
    arch = gpu()[0]
    code = compile_ptx(spec, arch) if "TOOLKIT_GPU_ARCH" in os.environ else compile_kernel(spec, arch).code
    module = check(driver.cuModuleLoadData(code))
    function = check(driver.cuModuleGetFunction(module, spec.symbol.encode()))
    if shared := shared_bytes(spec):
        attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        check(driver.cuFuncSetAttribute(function, attribute, shared))
    return function


def shared_bytes(spec: KernelSpec) -> int:
    """Dynamic shared memory of a kernel."""
    arch = gpu()[0]
    return launch_grid(spec, arch).shared + compile_kernel(spec, arch).dynamic


def run(family: str, params: dict[str, ParamValue], **values: Any) -> dict[str, Array]:
    """Launch a kernel with arguments by name; arrays of outputs are poisoned first. Returns every array afterwards."""
    return run_kernel(KernelSpec(family, params), **values)


def run_kernel(spec: KernelSpec, **values: Any) -> dict[str, Array]:
    """As `run`, for a kernel that may have a shape."""
    gpu()
    family = spec.family
    specs = arguments(CUDA_FAMILIES[family], spec)
    assert {each.name for each in specs} == values.keys()
    for each in specs:
        if each.role == "out" and isinstance(values[each.name], np.ndarray):
            values[each.name].view(np.uint8)[...] = POISON
    buffers = {name: Buffer(value) for name, value in values.items() if isinstance(value, np.ndarray)}
    pointers = {name: ctypes.c_uint64(buffer.address) for name, buffer in buffers.items()}
    slots: list[Any] = [pointers.get(each.name) or _SCALARS[each.ctype](values[each.name]) for each in specs]
    addresses = [ctypes.addressof(slot) for slot in slots]
    maps = {
        name: tensor_map(buffers[name].address, values.get(tiles.rows, 0), values.get(tiles.columns, 0), tiles)
        for name, tiles in CUDA_FAMILIES[family].variant(gpu()[0]).tiles(spec.params).items()
    }
    addresses = [
        maps[each.name].getPtr() if each.name in maps else address
        for each, address in zip(specs, addresses, strict=True)
    ]
    packed = (ctypes.c_void_p * len(slots))(*addresses)
    grid = launch_grid(spec, gpu()[0])
    x, y, z = (blocks(axis, values) for axis in (grid.x, grid.y, grid.z))
    check(
        driver.cuLaunchKernel(
            load(spec), x, y, z, grid.threads, 1, 1, shared_bytes(spec), 0, ctypes.addressof(packed), 0
        )
    )
    check(driver.cuCtxSynchronize())
    return {name: buffer.read() for name, buffer in buffers.items()}


def blocks(axis: Axis, values: dict[str, Any]) -> int:
    """Thread blocks along an axis."""
    count = axis.times * -(-prod(int(values[name]) for name in axis.factors) // axis.divisor)
    return min(count, gpu()[1]) if axis.persistent else count
