"""A bucket's launches with every argument in place: what is left to do in a step is to set its size and launch."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from ...errors import InternalError
from ...plan import CudaKernel, DimArg, TensorMap
from .driver import Gpu, call, error_text, tensor_map
from .kernels import Function

DIMS = ("T", "S", "R")


@dataclass(frozen=True)
class Call:
    """One launch: numbers, addresses, and dimensions of the step."""

    op: str
    """For errors: what it computes."""
    function: Function
    args: tuple[int | float | DimArg, ...]


class Program:
    """Launches in order.

    An argument is a cell of 8 bytes, of which a kernel reads as many as its parameter has: little-endian whole numbers
    and addresses fill all, a float the first four. Tensor maps lie elsewhere.
    """

    def __init__(self, gpu: Gpu, stream: Any, calls: Sequence[Call], bounds: tuple[int, int, int] = (1, 1, 1)) -> None:
        """`bounds` are the largest T, S and R."""
        self._gpu, self._stream, self.calls = gpu, stream, tuple(calls)
        counts = [len(each.args) for each in calls]
        starts = np.concatenate([[0], np.cumsum(counts)]).astype(int).tolist()
        self._cells = np.zeros(starts[-1] + 1, np.int64)
        self._cells[-1] = 1  # the factor of grids that depend on nothing
        self._dims: dict[str, tuple[list[int], list[int]]] = {name: ([], []) for name in DIMS}
        for each, start in zip(calls, starts, strict=False):
            for index, arg in enumerate(each.args, start):
                self._set(index, arg)
        self._launches: list[tuple[Any, Any, int]] = []
        self.size = (0, 0, 0)
        address = self._cells.ctypes.data
        self._pointers = address + 8 * np.arange(starts[-1] + 1, dtype=np.uint64)
        self._init_grids(starts)
        self.resize(*bounds)
        self._maps = [self._map(start, each) for start, function in self._functions(starts) for each in function.maps]
        self._launches = [
            (self._config(each.function), each.function.handle, self._pointers.ctypes.data + 8 * start)
            for each, start in zip(calls, starts, strict=False)
        ]
        self._set_grids()

    def _set(self, index: int, arg: int | float | DimArg) -> None:
        if isinstance(arg, DimArg):
            cells, factors = self._dims[arg.name]
            cells.append(index)
            factors.append(arg.factor)
        elif isinstance(arg, float):
            self._cells[index] = int.from_bytes(struct.pack("<f", arg), "little")
        else:
            self._cells[index] = arg - (1 << 64) if arg >= 1 << 63 else arg

    def _init_grids(self, starts: Sequence[int]) -> None:
        """Each axis of each launch as cells whose product is to be divided, rounded up and bounded."""
        axes = [
            ([start + factor for factor in axis.factors], axis)
            for each, start in zip(self.calls, starts, strict=False)
            for axis in each.function.kernel.grid
        ]
        width = max([1, *(len(cells) for cells, _ in axes)])
        self._factors = np.full((len(axes), width), len(self._cells) - 1)
        for row, (cells, _) in enumerate(axes):
            self._factors[row, : len(cells)] = cells
        self._divisors = np.array([axis.divisor for _, axis in axes], np.int64)
        self._times = np.array([axis.times for _, axis in axes], np.int64)
        most = self._gpu.multiprocessors
        self._limits = np.array([most if axis.persistent else 2**31 - 1 for _, axis in axes], np.int64)

    def _functions(self, starts: Sequence[int]) -> Iterator[tuple[int, CudaKernel]]:
        for each, start in zip(self.calls, starts, strict=False):
            yield start, each.function.kernel

    def _map(self, start: int, each: TensorMap) -> Any:
        """Make an argument a tensor map, for the number of rows that is set."""
        at = start + each.argument
        address, rows, columns = (int(self._cells[cell]) for cell in (at, start + each.rows, start + each.columns))
        found = tensor_map(address, rows, columns, each)
        self._pointers[at] = found.getPtr()
        return found

    def _config(self, function: Function) -> Any:
        driver, kernel = self._gpu.driver, function.kernel
        config = driver.CUlaunchConfig()
        config.blockDimX, config.blockDimY, config.blockDimZ = kernel.threads, 1, 1
        config.sharedMemBytes = kernel.shared
        config.hStream = self._stream
        if kernel.pdl and self._gpu.overlaps:
            attribute, value = driver.CUlaunchAttribute(), driver.CUlaunchAttributeValue()
            attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
            value.programmaticStreamSerializationAllowed = 1
            attribute.value = value
            config.attrs, config.numAttrs = [attribute], 1
        return config

    def resize(self, T: int, S: int, R: int) -> None:
        """Set the step's dimensions: arguments and grids that depend on them."""
        if self.size == (T, S, R):
            return
        self.size = (T, S, R)
        for name, value in zip(DIMS, self.size, strict=True):
            cells, factors = self._dims[name]
            if cells:
                self._cells[cells] = np.multiply(factors, value)
        self._set_grids()

    def _set_grids(self) -> None:
        blocks = self._times * -(-self._cells[self._factors].prod(axis=1) // self._divisors)
        grids = np.minimum(blocks, self._limits).reshape(-1, 3).tolist()
        for (config, _, _), grid in zip(self._launches, grids, strict=False):
            config.gridDimX, config.gridDimY, config.gridDimZ = grid

    def set_argument(self, launch: int, index: int, value: int) -> None:
        """Change a whole number: argument `index` of a launch."""
        self._cells[sum(len(each.args) for each in self.calls[:launch]) + index] = value

    def launch(self) -> None:
        """Queue all launches. Raises InternalError naming the op whose launch was refused."""
        start = self._gpu.driver.cuLaunchKernelEx
        for index, (config, function, params) in enumerate(self._launches):
            status = start(config, function, params, 0)[0]
            if status:
                self._refused(index, int(status))

    def _refused(self, index: int, status: int) -> None:
        each, (config, _, _) = self.calls[index], self._launches[index]
        grid = (config.gridDimX, config.gridDimY, config.gridDimZ)
        raise InternalError(
            f"launching {each.function.name} for {each.op}, {grid} blocks, failed: {error_text(status)}"
        )

    def launch_timed(self) -> npt.NDArray[np.float64]:
        """Run all launches, each after the one before has ended; their seconds."""
        driver = self._gpu.driver
        events = [self._gpu.event(timed=True) for _ in range(len(self._launches) + 1)]
        call(driver.cuEventRecord, events[0], self._stream)
        for index, (config, function, params) in enumerate(self._launches):
            attributes, config.numAttrs = config.numAttrs, 0
            status = driver.cuLaunchKernelEx(config, function, params, 0)[0]
            config.numAttrs = attributes
            if status:
                self._refused(index, int(status))
            call(driver.cuEventRecord, events[index + 1], self._stream)
        call(driver.cuEventSynchronize, events[-1])
        times = np.array(list(self._elapsed(events))) * 1e-3
        for event in events:
            call(driver.cuEventDestroy, event)
        return times

    def _elapsed(self, events: Sequence[Any]) -> Iterator[float]:
        for before, after in pairwise(events):
            yield float(call(self._gpu.driver.cuEventElapsedTime, before, after))

    def capture(self) -> Any:
        """The launches as an executable graph, at the size that was set."""
        driver = self._gpu.driver
        mode = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
        call(driver.cuStreamBeginCapture, self._stream, mode)
        try:
            self.launch()
        except BaseException:
            driver.cuStreamEndCapture(self._stream)
            raise
        graph = call(driver.cuStreamEndCapture, self._stream)
        executable = call(driver.cuGraphInstantiate, graph, 0)
        call(driver.cuGraphDestroy, graph)
        call(driver.cuGraphUpload, executable, self._stream)
        return executable
