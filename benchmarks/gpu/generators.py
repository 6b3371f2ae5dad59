"""GPU kernels in CUDA C++ and in Triton, in the same run: linear layers of many rows, norms, expressions, attention.

    python benchmarks/gpu/generators.py [--sweep] [--compile] [--json FILE]

Launches overlap in a captured graph and read memory in turns, as in `linear.py` and `kernels.py`. The CUDA C++ kernel
is the one that lowering takes; of Triton's, all are timed that `--generator race` may carry. `--sweep` times more tiles
of linear layers; `--compile` only fills the kernel cache, which needs no GPU.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from kernels import MODELS, Case, add_norm, attention
from kernels import launcher as case_launcher
from linear import Gpu, Layer, chosen, floor, measure

from toolkit.compiler.codegen.cuda import Compilers
from toolkit.compiler.codegen.triton import compiler_version
from toolkit.kernels_templates.catalog import POINTWISE_INPUTS, KernelSpec
from toolkit.kernels_templates.triton.choose import triton_kernels

SHAPES = ((4096, 4096), (14336, 4096), (4096, 14336))
"""Columns and inner size of linear layers."""
ROWS = (64, 128, 256, 512, 2048, 8192)
SHARED = 232_448


def tiles(rows: int) -> Iterator[dict[str, Any]]:
    """Tiles of a linear layer that may be worth a try."""
    few = [(64, columns, 4) for columns in (16, 32, 64, 128, 256)]
    middle = [*few[1:], (128, 32, 4), (128, 64, 4), (128, 128, 4), (128, 128, 8)]
    many = [(64, 256, 4), (128, 128, 4), (128, 128, 8), (128, 256, 8), (256, 128, 8)]
    for tile_rows, columns, warps in few if rows <= 64 else middle if rows <= 256 else many:
        for stages in (3, 4, 6, 8, 12):
            if (tile_rows + columns) * 128 * stages + tile_rows * min(columns, 128) * 2 > SHARED:
                continue
            if stages == 3 and tile_rows * columns < 128 * 256:
                continue
            for flatten, band in ((True, 8),) if rows <= 128 else ((True, 8), (False, 8), (True, 16)):
                sizes = {"tile_rows": tile_rows, "tile_columns": columns, "warps": warps, "stages": stages}
                yield {**sizes, "flatten": flatten, "band": band}


def linear_kernels(layer: Layer, rows: int, sweep: bool) -> tuple[KernelSpec, list[KernelSpec]]:
    """In CUDA C++ and in Triton."""
    own = chosen(layer, rows, "bf16")
    found = triton_kernels(own, {"rows": rows, "N": layer.columns, "K": layer.inner})
    if sweep:
        found += [replace(found[0], params={**found[0].params, **tile}) for tile in tiles(rows)]
    return own, list(dict.fromkeys(found))


def pointwise(rows: int, width: int) -> Case:
    """A gate, as it is without fusion."""
    inputs = {f"in{index}": "t" if index < 2 else "" for index in range(POINTWISE_INPUTS)}
    spec = KernelSpec("pointwise", {"real": "bfloat16", "expr": "(mul (silu in0) in1)", **inputs})
    size = rows * width * 2

    def make(gpu: Gpu, number: int) -> dict[str, Any]:
        return {"in0": gpu.weights, "in1": gpu.weights + size, "out": gpu.out, "rows": rows, "W": width}

    return Case(f"pointwise {rows}x{width}", spec, make, 3 * size)


def cases() -> Iterator[tuple[Case, dict[str, int]]]:
    """Kernels that are no linear layers, with the sizes that Triton's code is made for."""
    for model in MODELS:
        for count, length in ((1, 512), (1, 2048), (1, 8192), (16, 1024)):
            heads = {"S": 256, "heads": model.heads, "kv_heads": model.kv_heads, "page_tokens": 64}
            yield attention(model, [length] * count, [length] * count, False), heads
        for rows in (32, 256, 8192):
            yield add_norm(model, rows), {"rows": rows, "W": model.hidden, "weight_rows": 1}
    for rows in (32, 256, 2048):
        yield pointwise(rows, 14336), {"rows": rows, "W": 14336}


def everything(sweep: bool) -> list[KernelSpec]:
    """All kernels."""
    found = []
    for columns, inner in SHAPES:
        for rows in ROWS:
            own, others = linear_kernels(Layer("", "", columns, inner), rows, sweep)
            found += [own, *others]
    for case, sizes in cases():
        found += [case.spec, *triton_kernels(case.spec, sizes)]
    return list(dict.fromkeys(found))


def described(spec: KernelSpec, microseconds: float) -> dict[str, Any]:
    """A kernel's time beside its tile."""
    tile = ("tile_rows", "tile_columns", "tile_keys", "split", "stages", "warps", "flatten", "band", "block")
    return {"us": round(microseconds, 2), **{name: spec.params[name] for name in tile if name in spec.params}}


def line(name: str, cuda: dict[str, Any], triton: list[dict[str, Any]], floor_us: float) -> dict[str, Any]:
    """One result, printed short."""
    best = min(triton, key=lambda each: float(each["us"]))
    ratio = best["us"] / cuda["us"]
    print(f"{name:32} cuda {cuda['us']:9.2f}  triton {triton[0]['us']:9.2f}  best {best}  {ratio:.2f}", flush=True)
    return {"case": name, "cuda": cuda, "triton": triton, "best": best, "floor_us": round(floor_us, 2)}


def main() -> None:
    """Measure everything."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.compile:
        with Compilers() as compilers:
            for _ in compilers.compile((spec, "sm90", "cubin") for spec in everything(options.sweep)):
                pass
        return
    gpu, found = Gpu(), []
    for columns, inner in SHAPES:
        layer = Layer("", f"{columns}x{inner}", columns, inner)
        for rows in ROWS:
            own, others = linear_kernels(layer, rows, options.sweep)
            timed = [described(spec, measure(gpu, layer, rows, spec, "bf16")) for spec in (own, *others)]
            name = f"linear {columns}x{inner} {rows}"
            found.append(line(name, timed[0], timed[1:], floor(layer, rows, "bf16") * 1e6))
    for case, sizes in cases():
        both = [replace(case, spec=spec) for spec in (case.spec, *triton_kernels(case.spec, sizes))]
        timed = [
            described(each.spec, gpu.time([case_launcher(gpu, each, number) for number in range(each.launches)]))
            for each in both
        ]
        found.append(line(case.name, timed[0], timed[1:], case.floor * 1e6))
    if options.json:
        versions = {"triton": compiler_version().removeprefix("triton ")}
        options.json.write_text(json.dumps({"versions": versions, "results": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
