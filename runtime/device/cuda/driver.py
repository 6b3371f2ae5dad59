"""Calls of the CUDA driver, every status checked, and what a machine without a usable GPU is told."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from ...errors import InternalError, UserError

NEEDED_DRIVER = 13_000
"""CUDA version, times 1000, of the oldest driver that loads our kernels."""


class DriverError(InternalError):
    """The driver refused a call. `status` is the number of the error."""

    def __init__(self, name: str, status: int, text: str) -> None:
        super().__init__(f"{name} failed: {text}")
        self.status = status


def bindings() -> Any:
    """The module of the driver's functions. Raises UserError if the package is missing."""
    try:
        from cuda.bindings import driver
    except ImportError:
        raise UserError(
            "running a plan on a GPU needs cuda-bindings, not installed here: pip install 'plan-toolkit[cuda]'"
        ) from None
    return driver


def call(function: Callable[..., Any], *args: Any) -> Any:
    """What a driver function returns besides its status. Raises DriverError."""
    status, *values = function(*args)
    if int(status):
        raise DriverError(function.__name__, int(status), error_text(int(status)))
    return values[0] if len(values) == 1 else values


class Tile(Protocol):
    """How a kernel reads a matrix: see `plan.TensorMap`."""

    @property
    def box(self) -> int: ...
    @property
    def depth(self) -> int: ...
    @property
    def block(self) -> tuple[int, int, int, int] | None: ...
    @property
    def bytes(self) -> int: ...
    @property
    def width(self) -> int: ...


def tensor_map(address: int, rows: int, columns: int, tile: Tile) -> Any:
    """A descriptor of a matrix [rows, columns] that is read in tiles. Raises DriverError."""
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    if tile.width:
        rows, columns = 1 << 31, tile.width
    kinds, swizzles = bindings().CUtensorMapDataType, bindings().CUtensorMapSwizzle
    if tile.block is not None:
        height, width, parts, part = tile.block
        count = columns // width * parts  # in a panel
        shape, strides = (part // 8, count, -(-rows // height)), (part, count * part)
        box, kind, swizzle = (part // 8, tile.depth * parts, tile.box), kinds.CU_TENSOR_MAP_DATA_TYPE_FLOAT64, "NONE"
    elif tile.depth > 1:
        columns = columns * tile.bytes // 2
        shape, strides = (64, rows, -(-columns // 64)), (2 * columns, 128)
        box, kind, swizzle = (64, tile.box, tile.depth), kinds.CU_TENSOR_MAP_DATA_TYPE_UINT16, "128B"
    else:
        shape, strides, box = (columns, rows), (2 * columns,), (64, tile.box)
        kind, swizzle = kinds.CU_TENSOR_MAP_DATA_TYPE_UINT16, "128B"
    driver = bindings()
    numbers, sizes = driver.cuuint64_t, driver.cuuint32_t
    return call(
        driver.cuTensorMapEncodeTiled,
        kind,
        len(shape),
        address,
        [numbers(size) for size in shape],
        [numbers(size) for size in strides],
        [sizes(size) for size in box],
        [sizes(1) for _ in shape],
        driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
        getattr(swizzles, f"CU_TENSOR_MAP_SWIZZLE_{swizzle}"),
        driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
        driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
    )


def error_text(status: int) -> str:
    """The name of an error, and what it means."""
    driver = bindings()
    code = driver.CUresult(status)
    name, meaning = driver.cuGetErrorName(code)[1], driver.cuGetErrorString(code)[1]
    return " ".join(text.decode() for text in (name, meaning) if text) or f"error {status}"


class Gpu:
    """The first visible GPU with its primary context, as the calling thread's current one."""

    def __init__(self) -> None:
        """Raises UserError if there is no driver, no GPU, or the driver is too old."""
        driver = self.driver = bindings()
        initialize(driver)
        self.handle = call(driver.cuDeviceGet, 0)
        self.context = call(driver.cuDevicePrimaryCtxRetain, self.handle)
        self.make_current()
        self.name = device_name(driver, self.handle)
        self.arch = architecture(driver, self.handle)
        self.multiprocessors = self._attribute("MULTIPROCESSOR_COUNT")
        self.shared_memory = self._attribute("MAX_SHARED_MEMORY_PER_BLOCK_OPTIN")
        """Bytes that a block may have."""
        self.cuda_version = _version(int(call(driver.cuDriverGetVersion)))
        """The newest that the driver knows."""
        self.overlaps = self._attribute("COMPUTE_CAPABILITY_MAJOR") >= 9
        """Whether a kernel can be launched before the one before it has ended."""

    def _attribute(self, name: str) -> int:
        attribute = getattr(self.driver.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}")
        return int(call(self.driver.cuDeviceGetAttribute, attribute, self.handle))

    def make_current(self) -> None:
        """Let the calling thread use the GPU."""
        call(self.driver.cuCtxSetCurrent, self.context)

    def free_memory(self) -> int:
        """Bytes that could be allocated now."""
        free, _ = call(self.driver.cuMemGetInfo)
        return int(free)

    def allocate(self, size: int) -> int:
        """The address of new device memory. Raises UserError if there is not as much."""
        try:
            return int(call(self.driver.cuMemAlloc, max(1, size)))
        except DriverError as error:
            if error.status != int(self.driver.CUresult.CUDA_ERROR_OUT_OF_MEMORY):
                raise
            raise UserError(
                f"the GPU has no {size / 2**20:,.0f} MiB left in one piece, {self.free_memory() / 2**20:,.0f} MiB in "
                "all: end other processes on it, or lower --memory"
            ) from None

    def free(self, address: int) -> None:
        """Give device memory back."""
        call(self.driver.cuMemFree, address)

    def fill_zero(self, address: int, size: int) -> None:
        """Zero device memory."""
        if size:
            call(self.driver.cuMemsetD8, address, 0, size)

    def upload(self, address: int, data: bytes) -> None:
        """Copy bytes to the device, and wait until they are there."""
        if data:
            call(self.driver.cuMemcpyHtoD, address, data, len(data))

    def stream(self) -> Any:
        """A new stream that waits for no other."""
        return call(self.driver.cuStreamCreate, int(self.driver.CUstream_flags.CU_STREAM_NON_BLOCKING))

    def event(self, *, timed: bool = False) -> Any:
        """A new event."""
        flags = self.driver.CUevent_flags
        return call(self.driver.cuEventCreate, int(flags.CU_EVENT_DEFAULT if timed else flags.CU_EVENT_DISABLE_TIMING))

    def close(self) -> None:
        """Leave the context."""
        call(self.driver.cuDevicePrimaryCtxRelease, self.handle)


class Pinned:
    """Host memory that the GPU reads and writes at the same address."""

    def __init__(self, gpu: Gpu, size: int) -> None:
        self._gpu = gpu
        self.bytes = size
        driver = gpu.driver
        flags = driver.CU_MEMHOSTALLOC_DEVICEMAP | driver.CU_MEMHOSTALLOC_PORTABLE
        self.address = int(call(driver.cuMemHostAlloc, max(1, size), flags))
        mapped = int(call(driver.cuMemHostGetDevicePointer, self.address, 0))
        if mapped != self.address:
            raise InternalError("the GPU sees host memory at another address than the host")
        self.array: npt.NDArray[np.uint8] = np.frombuffer(
            memoryview((ctypes.c_uint8 * size).from_address(self.address)), np.uint8
        )

    def close(self) -> None:
        """Give it back; views of it are dangling."""
        call(self._gpu.driver.cuMemFreeHost, self.address)


def initialize(driver: Any) -> None:
    """Start the driver. Raises UserError if there is none, no GPU, or it is too old."""
    try:
        status = int(driver.cuInit(0)[0])
    except RuntimeError:  # libcuda is not there
        raise UserError(
            "this plan runs on an NVIDIA GPU, but this machine has no NVIDIA driver: install one, or compile with "
            "--target cpu"
        ) from None
    if status == int(driver.CUresult.CUDA_ERROR_NO_DEVICE):
        raise UserError(
            "this plan runs on an NVIDIA GPU, but the driver finds none: check CUDA_VISIBLE_DEVICES and `nvidia-smi`, "
            "or compile with --target cpu"
        )
    if status:
        raise UserError(f"the NVIDIA driver does not start: {error_text(status)}; does `nvidia-smi` work?")
    version = int(call(driver.cuDriverGetVersion))
    if version < NEEDED_DRIVER:
        raise UserError(
            f"plans need an NVIDIA driver for CUDA {_version(NEEDED_DRIVER)}, this machine's is for CUDA "
            f"{_version(version)}: install driver 580 or newer"
        )


def list_gpus() -> list[str]:
    """Name, architecture and memory of each GPU. Raises UserError as opening one would."""
    driver = bindings()
    initialize(driver)
    version = _version(int(call(driver.cuDriverGetVersion)))
    found = []
    for index in range(int(call(driver.cuDeviceGetCount))):
        device = call(driver.cuDeviceGet, index)
        memory = int(call(driver.cuDeviceTotalMem, device)) / 2**30
        arch = architecture(driver, device)
        found.append(f"{device_name(driver, device)} ({arch}, {memory:.0f} GiB, driver for CUDA {version})")
    return found


def device_name(driver: Any, device: Any) -> str:
    """The GPU's name as its vendor wrote it."""
    return bytes(call(driver.cuDeviceGetName, 128, device)).split(b"\0")[0].decode()


def architecture(driver: Any, device: Any) -> str:
    """The compute capability, written as targets are: `sm90`."""
    names = driver.CUdevice_attribute
    major = call(driver.cuDeviceGetAttribute, names.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, device)
    minor = call(driver.cuDeviceGetAttribute, names.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, device)
    return f"sm{int(major)}{int(minor)}"


def _version(number: int) -> str:
    return f"{number // 1000}.{number % 1000 // 10}"
