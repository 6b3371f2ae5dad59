"""CUDA linear layers: time, bandwidth and operations a second at the sizes of two models, beside cuBLAS.

    python benchmarks/gpu/linear.py [--models 1b 8b] [--rows 1 8 64] [--encoding a4g128] [--sweep]
        [--compile] [--json FILE]

Each launch reads another copy of the weight, so that none of it is in L2, and overlaps the launch before it, as the
kernels of a step do; a captured graph of many launches is timed by events. `floor_us` is the larger of the bytes over
4.5 TB/s and the operations over 780 TF/s. `cublas_us` is torch.matmul in a graph, where torch is installed. Quantized
weights (`--encoding`) are bytes of any meaning. `--sweep` times every tile and prints the best; `--compile` only fills
the kernel cache, which needs no GPU.
"""

from __future__ import annotations

import argparse
import ctypes
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from itertools import product
from math import prod
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from toolkit.compiler.codegen.cuda import compile_kernel, launch_grid
from toolkit.kernels_templates.catalog import Axis, KernelSpec, ParamValue
from toolkit.kernels_templates.cuda.choose import choose_linear, quantized_kernel
from toolkit.kernels_templates.cuda.linear import quantized_stage, quantized_turns
from toolkit.kernels_templates.packing import layout_bytes, panel_encoding
from toolkit.kernels_templates.registry import CUDA_FAMILIES
from toolkit.kernels_templates.render import arguments
from toolkit.runtime.device.cuda.driver import tensor_map
from toolkit.runtime.errors import InternalError

BANDWIDTH, RATE = 4.5e12, 780e12
"""Bytes and operations a second of an H200 at best."""
ROWS = (1, 8, 32, 64, 128, 256, 1024, 8192)
MULTIPROCESSORS = 132
POOL = 3 << 30
"""Bytes of weights."""
HALF: Mapping[str, ParamValue] = {"real": "bfloat16", "has_bias": False, "extra1": "", "extra2": ""}
COMMON: Mapping[str, ParamValue] = {**HALF, "extra3": "", "extra4": "", "epilogue": "", "gated": False}


@dataclass(frozen=True)
class Layer:
    """A linear layer of a model."""

    model: str
    name: str
    columns: int
    inner: int
    gated: bool = False


LAYERS = (
    Layer("1b", "qkv", 3072, 2048),
    Layer("1b", "o", 2048, 2048),
    Layer("1b", "gate_up", 16384, 2048, gated=True),
    Layer("1b", "down", 2048, 8192),
    Layer("1b", "head", 128256, 2048),
    Layer("8b", "qkv", 6144, 4096),
    Layer("8b", "o", 4096, 4096),
    Layer("8b", "gate_up", 28672, 4096, gated=True),
    Layer("8b", "down", 4096, 14336),
    Layer("8b", "head", 128256, 4096),
)


def kernel_of(layer: Layer, family: str, sizes: Mapping[str, ParamValue]) -> KernelSpec:
    """The layer's kernel; a gated one has an activation."""
    own: dict[str, ParamValue] = {"gated": True, "epilogue": "(mul (silu in0) in1)"} if layer.gated else {}
    own |= {"norm_in": False, "norm_out": False} if family == "linear_skinny" else {}
    return KernelSpec(family, {**COMMON, **own, **sizes})


def chosen(layer: Layer, rows: int, encoding: str) -> KernelSpec:
    """What lowering takes."""
    family, sizes = choose_linear(
        rows,
        columns=layer.columns,
        inner=layer.inner,
        real="bfloat16",
        encoding=encoding,
        gated=layer.gated,
        narrow=True,
    )
    return kernel_of(layer, family, sizes)


def candidates(layer: Layer, rows: int, encoding: str) -> Iterator[KernelSpec]:
    """Every sensible tile."""
    if panel_encoding(encoding).kind == "affine":
        yield from quantized_candidates(layer, rows, encoding)
        return
    fit = next((size for size in (8, 16, 32, 64, 128, 256) if rows <= size), 256)
    for tile_rows in {fit, min(fit, 128)} if rows <= 256 else {128}:
        few = tile_rows < 64
        for columns in range(32 if layer.gated else 16, 257, 32 if layer.gated else 16):
            if columns * max(tile_rows, 64) > 256 * 128 or (rows > 256 and columns < 128):
                continue
            for split in (1, 2, 4, 8):
                blocks = -(-layer.columns // columns) * -(-rows // tile_rows) * split
                if not 60 <= blocks <= (300 if split > 1 else 20000) or layer.inner // split < 256:
                    continue
                even = blocks / (MULTIPROCESSORS * -(-blocks // MULTIPROCESSORS))
                if (even < 0.9 and columns not in {64, 128, 256}) or (blocks > 1000 and columns < 64):
                    continue
                for budget in (74_000, 110_000, 220_000) if few else (110_000, 220_000):
                    for depth in (64, 128, 256) if few else (64,):
                        stages = min(budget // ((columns + tile_rows) * depth * 2), 32 if few else 12)
                        stages -= stages % 2 if few else 0
                        steps = -(-layer.inner // depth // split)
                        if (
                            stages >= (4 if few else 3)
                            and (stages <= steps or budget == 74_000)
                            and (columns * depth <= 8192 or depth == 64)
                        ):
                            sizes: dict[str, ParamValue] = {"tile_rows": tile_rows, "tile_columns": columns}
                            sizes |= {"split": split, "stages": stages, "depth": depth}
                            yield kernel_of(layer, "linear_skinny" if few else "linear_tiled", sizes)


def quantized_candidates(layer: Layer, rows: int, encoding: str) -> Iterator[KernelSpec]:
    """Every sensible tile for affine weights."""
    family, own = quantized_kernel(
        rows, layer.columns, layer.inner, "bfloat16", encoding, gated=layer.gated, narrow=True
    )
    tile_rows = int(own["tile_rows"])
    tiles = -(-rows // tile_rows)
    for cluster, width in product((1, 2, 4), range(32 if layer.gated else 16, 257, 32 if layer.gated else 16)):
        blocks = -(-layer.columns // width) * cluster * tiles
        rounds = -(-blocks // MULTIPROCESSORS)
        if layer.inner // cluster < 1024 or (cluster > 1 and rounds > 2):
            continue
        if blocks < (0.9 if tile_rows <= 32 else 0.7) * rounds * MULTIPROCESSORS and width not in {64, 128}:
            continue
        if blocks < 0.9 * MULTIPROCESSORS or (tile_rows > 32 and width % 64):
            continue
        if rounds > 2 and width not in {64, 128, 192, 256}:
            continue
        for depth, budget, groups in product((128, 256, 512), (74_000, 108_000, 220_000), (2, 3, 4)):
            sizes = {**own, "cluster": cluster, "width": width, "depth": depth, "warpgroups": groups, "stages": 1}
            turns = quantized_turns(width, groups)
            stage = quantized_stage({**sizes, "gated": layer.gated}) + 16
            most = -(-layer.inner // depth // cluster) + turns - 1
            stages = min(budget // stage, most) // turns * turns
            narrow = tile_rows == 128 and width > 64 * (groups // turns)  # too few registers
            if narrow or (depth == 128 and "narrow" in own) or stages < max(2, turns):
                continue
            if budget < 100_000 or stages < most or budget > 200_000:
                yield kernel_of(layer, family, {**sizes, "stages": stages})


# --- launching --------------------------------------------------------------------------------------------------------


def check(result: tuple[Any, ...]) -> Any:
    """The value of a driver call. Raises InternalError with the error's name."""
    from cuda.bindings import driver

    status, *values = result
    if int(status):
        raise InternalError(driver.cuGetErrorName(status)[1].decode())
    return values[0] if values else None


class Gpu:
    """A stream, and a pool of random weights."""

    def __init__(self) -> None:
        from cuda.bindings import driver

        check(driver.cuInit(0))
        check(driver.cuCtxSetCurrent(check(driver.cuDevicePrimaryCtxRetain(check(driver.cuDeviceGet(0))))))
        self.stream = check(driver.cuStreamCreate(1))
        self.weights, self.x, self.out = (int(check(driver.cuMemAlloc(size))) for size in (POOL, 1 << 28, 3 << 30))
        normal = np.random.default_rng(0).standard_normal(1 << 24).astype(np.float32)
        words = (normal * 0.02).view(np.uint32) >> 16
        pattern = words.astype(np.uint16)
        for to, size in ((self.weights, POOL), (self.x, 1 << 28)):
            check(driver.cuMemcpyHtoD(to, pattern.ctypes.data, pattern.nbytes))
            for offset in range(pattern.nbytes, size, pattern.nbytes):
                check(driver.cuMemcpyDtoD(to + offset, to, pattern.nbytes))

    def time(self, launches: list[Callable[[], None]]) -> float:
        """Microseconds a launch, in a captured graph: the median of its replays."""
        from cuda.bindings import driver

        mode = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
        launches[0]()
        check(driver.cuStreamSynchronize(self.stream))
        check(driver.cuStreamBeginCapture(self.stream, mode))
        for launch in launches:
            launch()
        graph = check(driver.cuStreamEndCapture(self.stream))
        replay = check(driver.cuGraphInstantiate(graph, 0))
        start, end = (check(driver.cuEventCreate(0)) for _ in range(2))
        times = []
        for _ in range(7):
            check(driver.cuEventRecord(start, self.stream))
            check(driver.cuGraphLaunch(replay, self.stream))
            check(driver.cuEventRecord(end, self.stream))
            check(driver.cuEventSynchronize(end))
            times.append(check(driver.cuEventElapsedTime(start, end)) * 1e3 / len(launches))
        check(driver.cuGraphExecDestroy(replay))
        check(driver.cuGraphDestroy(graph))
        return median(times[2:])


@cache
def load(spec: KernelSpec) -> Any:
    """The kernel as a function of the driver."""
    from cuda.bindings import driver

    module = check(driver.cuModuleLoadData(compile_kernel(spec, "sm90").code))
    function = check(driver.cuModuleGetFunction(module, spec.symbol.encode()))
    attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    check(driver.cuFuncSetAttribute(function, attribute, shared_bytes(spec)))
    return function


def shared_bytes(spec: KernelSpec) -> int:
    """Dynamic shared memory of a kernel."""
    return launch_grid(spec, "sm90").shared + compile_kernel(spec, "sm90").dynamic


def launcher(gpu: Gpu, spec: KernelSpec, values: Mapping[str, int]) -> Callable[[], None]:
    """A launch of the kernel that overlaps the one before it."""
    from cuda.bindings import driver

    family = CUDA_FAMILIES[spec.family]
    grid, tiles = launch_grid(spec, "sm90"), family.variant("sm90").tiles(spec.params)
    cells: list[Any] = []
    for arg in arguments(family, spec):
        if arg.name in tiles:
            tile = tiles[arg.name]
            cells.append(tensor_map(values[arg.name], values[tile.rows], values[tile.columns], tile))
        else:
            cells.append((ctypes.c_int32 if arg.ctype == "int32_t" else ctypes.c_uint64)(values[arg.name]))
    addresses = [cell.getPtr() if hasattr(cell, "getPtr") else ctypes.addressof(cell) for cell in cells]
    packed = (ctypes.c_void_p * len(addresses))(*addresses)
    config, overlap = driver.CUlaunchConfig(), driver.CUlaunchAttribute()
    overlap.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
    overlap.value.programmaticStreamSerializationAllowed = 1
    config.gridDimX, config.gridDimY, config.gridDimZ = (blocks(axis, values) for axis in (grid.x, grid.y, grid.z))
    config.blockDimX, config.blockDimY, config.blockDimZ = grid.threads, 1, 1
    config.sharedMemBytes, config.hStream = shared_bytes(spec), gpu.stream
    config.attrs, config.numAttrs = [overlap], 1
    function = load(spec)

    def launch() -> None:
        check(driver.cuLaunchKernelEx(config, function, ctypes.addressof(packed), 0))

    launch.cells = cells  # type: ignore[attr-defined]  # alive as long as the launch
    return launch


def blocks(axis: Axis, values: Mapping[str, int]) -> int:
    """Thread blocks along an axis."""
    count = axis.times * -(-prod(values[name] for name in axis.factors) // axis.divisor)
    return min(count, MULTIPROCESSORS) if axis.persistent else count


# --- measuring --------------------------------------------------------------------------------------------------------


def weight_bytes(layer: Layer, encoding: str) -> int:
    """Of the weight as packed."""
    found = panel_encoding(encoding)
    return layout_bytes("operand16" if found.kind == "affine" else "rows", found, (layer.columns, layer.inner))


def copies(layer: Layer, encoding: str) -> int:
    """Copies of the weight in the pool."""
    return max(1, min(64, POOL // weight_bytes(layer, encoding)))


def count(layer: Layer, rows: int, encoding: str) -> int:
    """Launches in a graph: a millisecond or more."""
    return max(2, min(copies(layer, encoding), round(1.2e-3 / floor(layer, rows, encoding))))


def floor(layer: Layer, rows: int, encoding: str) -> float:
    """Seconds at the ceilings."""
    results = layer.columns // 2 if layer.gated else layer.columns
    moved = weight_bytes(layer, encoding) + 2 * rows * (layer.inner + results)
    return max(moved / BANDWIDTH, 2 * rows * layer.columns * layer.inner / RATE)


def measure(gpu: Gpu, layer: Layer, rows: int, spec: KernelSpec, encoding: str) -> float:
    """Microseconds a launch."""
    size = weight_bytes(layer, encoding)
    values = {"rows": rows, "N": layer.columns, "K": layer.inner, "x": gpu.x, "x_scale": gpu.x, "out": gpu.out}
    launches = [
        launcher(gpu, spec, {**values, "weight": gpu.weights + i * size}) for i in range(count(layer, rows, encoding))
    ]
    return gpu.time(launches)


def cublas(layer: Layer, rows: int) -> float | None:
    """Microseconds of torch.matmul, without what a gate does. None where torch is not installed."""
    try:
        import torch
    except ImportError:
        return None
    n = count(layer, rows, "bf16")
    x = torch.randn(rows, layer.inner, device="cuda", dtype=torch.bfloat16)
    weights = [torch.randn(layer.columns, layer.inner, device="cuda", dtype=torch.bfloat16) for _ in range(min(n, 16))]
    out = torch.empty(rows, layer.columns, device="cuda", dtype=torch.bfloat16)
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.mm(x, weights[0].T, out=out)
        stream.synchronize()
        with torch.cuda.graph(graph, stream=stream):
            for i in range(n):
                torch.mm(x, weights[i % len(weights)].T, out=out)
        times = []
        for _ in range(7):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record(stream)
            graph.replay()
            end.record(stream)
            end.synchronize()
            times.append(start.elapsed_time(end) * 1e3 / n)
    return float(median(times[2:]))


def report(layer: Layer, rows: int, spec: KernelSpec, microseconds: float, encoding: str) -> dict[str, Any]:
    """One line of the results."""
    tile = {
        name: spec.params.get(name)
        for name in (*("tile_rows", "tile_columns", "split", "stages", "depth", "width", "cluster", "warpgroups"),)
    }
    seconds = microseconds * 1e-6
    return {
        "model": layer.model,
        "layer": layer.name,
        "rows": rows,
        "encoding": encoding,
        **tile,
        "us": round(microseconds, 2),
        "TB/s": round(weight_bytes(layer, encoding) / seconds / 1e12, 3),
        "TF/s": round(2 * rows * layer.columns * layer.inner / seconds / 1e12, 1),
        "floor_us": round(floor(layer, rows, encoding) * 1e6, 2),
        "of_floor": round(floor(layer, rows, encoding) / seconds, 3),
    }


def main() -> None:
    """Parse arguments, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["1b", "8b"])
    parser.add_argument("--rows", nargs="+", type=int, default=ROWS)
    parser.add_argument("--encoding", default="bf16", help="of the weights, e.g. a4g128 or a8g32")
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    found: list[dict[str, Any]] = []
    gpu = None if options.compile else Gpu()
    for layer in (layer for layer in LAYERS if layer.model in options.models):
        for rows in options.rows:
            specs = (
                list(candidates(layer, rows, options.encoding))
                if options.sweep
                else [chosen(layer, rows, options.encoding)]
            )
            if gpu is None:
                for spec in specs:
                    compile_kernel(spec, "sm90")
                continue
            if not specs:
                continue
            lines = [
                report(layer, rows, spec, measure(gpu, layer, rows, spec, options.encoding), options.encoding)
                for spec in specs
            ]
            found += lines
            best = min(lines, key=lambda line: line["us"])
            best["cublas_us"] = cublas(layer, rows)
            print(json.dumps(best), flush=True)
            if options.json:
                options.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
