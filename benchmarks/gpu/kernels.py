"""CUDA kernels other than linear layers: time, bandwidth and operations a second at the sizes of two models.

    python benchmarks/gpu/kernels.py [--only NAME ...] [--compile] [--json FILE]

Launches read memory in turns, more than fits L2, and overlap as the kernels of a step do; a captured graph of many is
timed by events. `floor_us` is the larger of the bytes over 4.5 TB/s and the operations over 780 TF/s. `--compile` only
fills the kernel cache, which needs no GPU.
"""

from __future__ import annotations

import argparse
import ctypes
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from linear import BANDWIDTH, POOL, RATE, Gpu, check, load, shared_bytes

from toolkit.compiler.codegen.cuda import compile_kernel, launch_grid
from toolkit.kernels_templates.catalog import KernelSpec, ParamValue
from toolkit.kernels_templates.cuda.attention import BLOCKS, decode_scratch
from toolkit.kernels_templates.cuda.basic import norm_threads
from toolkit.kernels_templates.cuda.sample import PART
from toolkit.kernels_templates.registry import CUDA_FAMILIES
from toolkit.kernels_templates.render import arguments
from toolkit.runtime.device.cuda.driver import tensor_map
from toolkit.runtime.step import MAX_TOP, RESULT, ROW

PAGE = 64
VOCABULARY = 128256
REAL: Mapping[str, ParamValue] = {"real": "bfloat16"}
PARTIAL = np.dtype([("best", "<u8"), ("sum", "<f4"), ("finite", "<i4")])


@dataclass(frozen=True)
class Model:
    """Sizes of a model."""

    name: str
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int


MODELS = (Model("1b", 2048, 32, 8, 64), Model("8b", 4096, 32, 8, 128))


@dataclass(frozen=True)
class Case:
    """A kernel at a size. `make(number)` gives the arguments of launch `number`: arrays, addresses and numbers."""

    name: str
    spec: KernelSpec
    make: Callable[[Gpu, int], dict[str, Any]]
    bytes: int
    flops: int = 0
    launches: int = 20

    @property
    def floor(self) -> float:
        """Seconds at the ceilings."""
        return max(self.bytes / BANDWIDTH, self.flops / RATE)


def attention(model: Model, context: Sequence[int], queries: Sequence[int], decode: bool) -> Case:
    """Sequences of these lengths, of which the last `queries` tokens ask."""
    family = "attention_decode" if decode else "attention_prefill"
    flags = dict.fromkeys(("has_window", "has_softcap", "has_sinks", "has_slopes"), False)
    dims = {"key_dim": model.head_dim, "value_dim": model.head_dim}
    page_bytes = 4 * PAGE * model.kv_heads * model.head_dim
    pages = [-(-length // PAGE) for length in context]
    pool, tokens = POOL // page_bytes, sum(queries)

    def make(gpu: Gpu, number: int) -> dict[str, Any]:
        order = np.random.default_rng(number).permutation(pool)
        first = sum(pages) * number % max(1, pool - sum(pages))
        order = (first + np.argsort(order[: sum(pages)])).astype(np.int32)
        table, at = np.zeros((len(context), max(pages)), np.int32), 0
        for s, count in enumerate(pages):
            table[s, :count], at = order[at : at + count], at + count
        return {
            **{"q": gpu.x, "cache": gpu.weights, "pages": table, "page_stride": np.array([max(pages)], np.int32)},
            **{"seq_start": np.cumsum([0, *queries], dtype=np.int32), "context": np.array(context, np.int32)},
            **{"out": gpu.out, "S": len(context), "heads": model.heads, "kv_heads": model.kv_heads},
            **{"page_tokens": PAGE, "scale": model.head_dim**-0.5, "blocks": BLOCKS},
            **({"scratch": np.zeros(decode_scratch(model.head_dim), np.uint8)} if decode else {}),
        }

    seen = sum(n * (length - n) + n * (n + 1) // 2 for length, n in zip(context, queries, strict=True))
    moved = sum(context) * page_bytes // PAGE + 4 * tokens * model.heads * model.head_dim
    spec = KernelSpec(family, {**REAL, **dims, "dtype": "bfloat16", **flags})
    name = f"{family} {model.name} {len(context)}x{context[0]}"
    flops = 4 * model.heads * model.head_dim * seen
    return Case(name, spec, make, moved, flops, 20 if decode or flops < 1e11 else 4)


def decode_and_write(model: Model, context: Sequence[int]) -> Case:
    """A decode step's attention that also rotates and writes."""
    plain = attention(model, context, [1] * len(context), True)

    def make(gpu: Gpu, number: int) -> dict[str, Any]:
        values = plain.make(gpu, number)
        last = np.array(context) - 1
        slots = (values["pages"][np.arange(len(context)), last // PAGE] * PAGE + last % PAGE).astype(np.int32)
        return values | {"cos": gpu.x, "sin": gpu.x + (1 << 24), "slots": slots, "eps": 1e-5, "offset": 0.0}

    rope = {"rotary": model.head_dim, "style": "half", "has_rope": True, "qk_norm": ""}
    spec = KernelSpec("attention_decode_write", {**plain.spec.params, **rope})
    return replace(plain, name=plain.name.replace("decode", "decode_write"), spec=spec, make=make)


def rope_kv_write(model: Model, tokens: int) -> Case:
    """Queries and keys rotated, keys and values written."""
    parts = model.heads + 2 * model.kv_heads

    def make(gpu: Gpu, number: int) -> dict[str, Any]:
        size = tokens * parts * model.head_dim * 2
        return {
            **{"qkv": gpu.x + number * size % (1 << 27), "cos": gpu.x, "sin": gpu.x + (1 << 24)},
            **{"slots": np.arange(tokens, dtype=np.int32) + PAGE, "cache": gpu.weights, "out": gpu.out},
            **{"T": tokens, "heads": model.heads, "kv_heads": model.kv_heads, "page_tokens": PAGE},
            **{"eps": 1e-5, "offset": 0.0},
        }

    params = {"head_dim": model.head_dim, "rotary": model.head_dim, "style": "half", "has_rope": True, "qk_norm": ""}
    spec = KernelSpec("rope_kv_write", {**REAL, **params, "dtype": "bfloat16"})
    return Case(f"rope_kv_write {model.name} {tokens}", spec, make, 4 * tokens * parts * model.head_dim)


def add_norm(model: Model, rows: int) -> Case:
    """A residual added, then the norm."""
    params = {"kind": "rms", "has_weight": True, "has_bias": False, "has_residual": True}
    params["row_threads"] = norm_threads(2 * model.hidden)

    def make(gpu: Gpu, number: int) -> dict[str, Any]:
        size = rows * model.hidden * 2
        return {
            **{"x": gpu.x, "residual": gpu.x + size, "weight": gpu.weights, "sum_out": gpu.out, "out": gpu.out + size},
            **{"rows": rows, "W": model.hidden, "weight_rows": 1, "eps": 1e-5, "offset": 0.0},
        }

    return Case(f"add_norm {model.name} {rows}", KernelSpec("norm", {**REAL, **params}), make, 8 * rows * model.hidden)


def sample(rows: int, name: str, **fields: Any) -> Case:
    """A token a row, which has been measured."""
    record, parts = np.zeros(rows, ROW), np.zeros((rows, -(-VOCABULARY // PART)), PARTIAL)
    for field, value in {"sample": 1, "top_p": 1.0, "repetition_penalty": 1.0, **fields}.items():
        record[field] = value
    record["seed"] = np.arange(rows)
    parts["best"], parts["sum"], parts["finite"] = (0xBE000000 << 32) | 0xFFFFFFFF, 4000.0, 1  # 0.125, token 0

    def make(gpu: Gpu, number: int) -> dict[str, Any]:
        size = rows * VOCABULARY * 2
        return {
            **{"logits": gpu.weights + number * size % (POOL - size), "parts": parts.view(np.uint8)},
            **{"rows": record.view(np.uint8), "tokens": np.zeros(rows, np.int32)},
            **{"results": np.zeros(rows * RESULT.itemsize, np.uint8), "scratch": gpu.out, "R": rows, "V": VOCABULARY},
            **{
                "top_tokens": np.zeros((rows, MAX_TOP), np.int32),
                "top_logprobs": np.zeros((rows, MAX_TOP), np.float32),
            },
        }

    moved = rows * VOCABULARY * 2 if fields else rows * parts.shape[1] * PARTIAL.itemsize
    return Case(f"sample {name} {rows}", KernelSpec("sample", REAL), make, moved)


def sample_measure(rows: int) -> Case:
    """The best token of each part of rows."""

    def make(gpu: Gpu, number: int) -> dict[str, Any]:
        size = rows * VOCABULARY * 2
        return {"logits": gpu.weights + number * size % (POOL - size), "parts": gpu.out, "R": rows, "V": VOCABULARY}

    return Case(f"sample_measure {rows}", KernelSpec("sample_measure", REAL), make, rows * VOCABULARY * 2)


def cases() -> Iterator[Case]:
    """Everything that is measured."""
    for model in MODELS:
        for batch, context in ((1, 512), (1, 1024), (1, 8192), (32, 640), (32, 8192), (128, 640), (256, 640)):
            yield attention(model, [context] * batch, [1] * batch, True)
            yield decode_and_write(model, [context] * batch)
        for count, length in ((1, 512), (1, 2048), (1, 8192), (16, 1024)):
            yield attention(model, [length] * count, [length] * count, False)
        for rows in (1, 32, 256, 8192):
            yield rope_kv_write(model, rows)
            yield add_norm(model, rows)
    for rows in (1, 32, 256):
        yield sample_measure(rows)
        yield sample(rows, "greedy")
        yield sample(rows, "temperature", temperature=0.6)
        yield sample(rows, "top_p", temperature=0.6, top_p=0.95)
        yield sample(rows, "top_k+top_p", temperature=0.6, top_p=0.95, top_k=50)


# --- launching --------------------------------------------------------------------------------------------------------


def launcher(gpu: Gpu, case: Case, number: int) -> Callable[[], None]:
    """A launch of the kernel that overlaps the one before it. Its arrays stay on the device."""
    from cuda.bindings import driver

    attribute = driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT
    most = check(driver.cuDeviceGetAttribute(attribute, check(driver.cuCtxGetDevice())))
    values = case.make(gpu, number)
    specs, grid = arguments(CUDA_FAMILIES[case.spec.family], case.spec), launch_grid(case.spec, "sm90")
    tiles = CUDA_FAMILIES[case.spec.family].variant("sm90").tiles(case.spec.params)
    cells: list[Any] = []
    for arg in specs:
        value = values[arg.name]
        if arg.name in tiles:
            cells.append(tensor_map(value, 0, 0, tiles[arg.name]))
            continue
        if isinstance(value, np.ndarray):
            address = check(driver.cuMemAlloc(value.nbytes))
            check(driver.cuMemcpyHtoD(address, np.ascontiguousarray(value).ctypes.data, value.nbytes))
            value = int(address)
        kinds = {"int32_t": ctypes.c_int32, "float": ctypes.c_float}
        cells.append(kinds.get(arg.ctype, ctypes.c_uint64)(value))
    packed = (ctypes.c_void_p * len(cells))(
        *(cell.getPtr() if hasattr(cell, "getPtr") else ctypes.addressof(cell) for cell in cells)
    )
    config, overlap = driver.CUlaunchConfig(), driver.CUlaunchAttribute()
    overlap.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
    overlap.value.programmaticStreamSerializationAllowed = 1

    def blocks(axis: Any) -> int:
        count: int = axis.times * -(-prod(values[name] for name in axis.factors) // axis.divisor)
        return min(count, most) if axis.persistent else count

    config.gridDimX, config.gridDimY, config.gridDimZ = (blocks(axis) for axis in (grid.x, grid.y, grid.z))
    config.blockDimX, config.blockDimY, config.blockDimZ = grid.threads, 1, 1
    config.sharedMemBytes, config.hStream = shared_bytes(case.spec), gpu.stream
    config.attrs, config.numAttrs = [overlap], 1
    function = load(case.spec)

    def launch() -> None:
        check(driver.cuLaunchKernelEx(config, function, ctypes.addressof(packed), 0))

    launch.cells = cells  # type: ignore[attr-defined]  # alive as long as the launch
    return launch


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=[""], help="beginnings of names")
    parser.add_argument("--compile", action="store_true", help="only compile")
    parser.add_argument("--json", type=Path, help="write the results here")
    args = parser.parse_args()
    chosen = [case for case in cases() if case.name.startswith(tuple(args.only))]
    if args.compile:
        for spec in dict.fromkeys(case.spec for case in chosen):
            compile_kernel(spec, "sm90")
        return
    gpu, results = Gpu(), []
    for case in chosen:
        seconds = gpu.time([launcher(gpu, case, number) for number in range(case.launches)]) / 1e6
        row = {
            "case": case.name,
            "us": round(seconds * 1e6, 2),
            "floor_us": round(case.floor * 1e6, 2),
            "TB/s": round(case.bytes / seconds / 1e12, 2),
            "TF/s": round(case.flops / seconds / 1e12, 1),
        }
        results.append(row)
        print(json.dumps(row), flush=True)
    if args.json:
        args.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
