"""Triton's interpreter in a process of its own, since Triton asks for TRITON_INTERPRET when it is imported.

As a script it runs the kernels that come on its standard input, and answers with their arrays.
"""

from __future__ import annotations

import linecache
import os
import pickle
import subprocess
import sys
from dataclasses import dataclass
from math import prod
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from toolkit.kernels_templates.catalog import Axis, KernelSpec
from toolkit.kernels_templates.registry import CUDA_FAMILIES
from toolkit.kernels_templates.render import arguments, render_triton
from toolkit.runtime.plan import ArchName

Array = npt.NDArray[Any]
GUARD = 64
"""Numbers before and behind each output that a kernel must leave alone."""
MULTIPROCESSORS = 3
"""Of the GPU that is interpreted: few, so that persistent programs make several tiles."""


@dataclass(frozen=True)
class Order:
    """A kernel to run: its source, its arguments in order and by how many programs."""

    source: str
    symbol: str
    args: tuple[Any, ...]
    """Numbers, names of arrays, and names with the box of a tensor map."""
    arrays: dict[str, Array]
    outputs: set[str]
    """Names of arrays that have guards."""
    grid: tuple[int, int, int]


class Interpreter:
    """Runs kernels of Triton families over numpy arrays of float32 or float16."""

    def __init__(self) -> None:
        environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
        command = [sys.executable, "-m", "cpu.kernels.triton_interpreter"]
        self._process = subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def close(self) -> None:
        """End the process."""
        self._process.communicate()

    def run(self, kernel: KernelSpec, arch: ArchName, **values: Any) -> dict[str, Array]:
        """The outputs of a kernel, which are poisoned and guarded while it runs; arrays come as arguments by name."""
        family = CUDA_FAMILIES[kernel.family]
        specs, variant = arguments(family, kernel), family.variant(arch)
        assert {spec.name for spec in specs} == values.keys()
        tiles, outputs = variant.tiles(kernel.params), {spec.name for spec in specs if spec.role == "out"}
        arrays = {
            name: np.full(value.size + 2 * GUARD, np.nan, value.dtype) if name in outputs else value
            for name, value in values.items()
            if isinstance(value, np.ndarray)
        }
        args = tuple(
            (spec.name, tiles[spec.name].box) if spec.name in tiles else spec.name if spec.name in arrays else number
            for spec, number in ((spec, values[spec.name]) for spec in specs)
        )
        grid = variant.grid(kernel.params)
        source = render_triton(kernel, arch, interpreted=True)
        x, y, z = (_programs(axis, values) for axis in (grid.x, grid.y, grid.z))
        found = self._ask(Order(source, kernel.symbol, args, arrays, outputs, (x, y, z)))
        for name in outputs:
            edges = np.concatenate([found[name][:GUARD], found[name][-GUARD:]])
            assert np.isnan(edges).all(), f"{kernel.symbol} wrote outside of {name}"
        return {name: found[name][GUARD:-GUARD].reshape(values[name].shape) for name in outputs}

    def _ask(self, order: Order) -> dict[str, Array]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        pickle.dump(order.__dict__, self._process.stdin)
        self._process.stdin.flush()
        answer = pickle.load(self._process.stdout)
        assert isinstance(answer, dict), answer
        return answer


def _programs(axis: Axis, values: dict[str, Any]) -> int:
    count = -(-prod(int(values[name]) for name in axis.factors) // axis.divisor)
    return min(count, MULTIPROCESSORS) if axis.persistent else count


# --- the process ------------------------------------------------------------------------------------------------------


def serve(orders: BinaryIO, answers: BinaryIO) -> None:
    """Answer orders until there are no more; an error is answered as its text."""
    while True:
        try:
            order = Order(**pickle.load(orders))
        except EOFError:
            return
        try:
            answer: Any = interpret(order)
        except Exception as error:
            answer = f"{order.symbol}: {error!r}\n{order.source}"
        pickle.dump(answer, answers)
        answers.flush()


def interpret(order: Order) -> dict[str, Array]:
    """The arrays after the kernel has run."""
    import torch
    from triton.tools.tensor_descriptor import TensorDescriptor

    file = f"<{order.symbol}>"
    linecache.cache[file] = (len(order.source), None, order.source.splitlines(keepends=True), file)
    module: dict[str, Any] = {"__name__": order.symbol}
    exec(compile(order.source, file, "exec"), module)
    tensors = {name: torch.from_numpy(array) for name, array in order.arrays.items()}
    args: list[Any] = []
    for arg in order.args:
        if isinstance(arg, tuple):
            args.append(TensorDescriptor.from_tensor(tensors[arg[0]], [arg[1], 64]))
        elif isinstance(arg, str):
            args.append(tensors[arg][GUARD * (arg in order.outputs) :])
        else:
            args.append(arg)
    module[order.symbol][order.grid](*args)
    return order.arrays


if __name__ == "__main__":
    serve(sys.stdin.buffer, sys.stdout.buffer)
