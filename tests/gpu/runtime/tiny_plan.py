"""A plan made by hand: each token's embedding gives the logits of the next, so the numpy reference is one line."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from toolkit.compiler.codegen.cuda import build_modules
from toolkit.compiler.emit import write_plan
from toolkit.kernels_templates.catalog import KernelSpec
from toolkit.kernels_templates.cuda import runtime_kernels
from toolkit.kernels_templates.cuda.sample import sample_parts, sample_scratch
from toolkit.kernels_templates.registry import CUDA_FAMILIES
from toolkit.kernels_templates.render import arguments
from toolkit.runtime.encodings import FLOAT32
from toolkit.runtime.plan import (
    MAJOR,
    MINOR,
    ArchName,
    ArenaArg,
    Arg,
    Bucket,
    CacheResource,
    ConstArg,
    DimArg,
    InputArg,
    Kernel,
    Launch,
    MemoryPlan,
    Model,
    Plan,
    RandomFill,
    Report,
    WeightArg,
    WeightEntry,
    WeightFile,
)
from toolkit.runtime.step import ABI_HASH

Floats = npt.NDArray[np.float32]
FILE = "weights.safetensors"
VOCABULARY, CONTEXT, PAGE_TOKENS, PAGE_BYTES, MAX_BATCH, MAX_TOKENS = 200, 512, 64, 4096, 8, 64
ROW = 4 * VOCABULARY
INPUTS = ("rows", "tokens", "results", "top_tokens", "top_logprobs")
KERNELS = {
    "embedding": KernelSpec("embedding", {"real": "float32", "encoding": "f32"}),
    "take_rows": KernelSpec("take_rows", {"real": "float32"}),
    "sample_measure": KernelSpec("sample_measure", {"real": "float32"}),
    "sample": KernelSpec("sample", {"real": "float32"}),
}


def logits() -> Floats:
    """[V, V]: of the token after each token. Random, never alike."""
    return np.random.default_rng(3).standard_normal((VOCABULARY, VOCABULARY)).astype(np.float32) * 3


def make_plan(directory: Path, *, arch: ArchName = "sm90", random: bool = False) -> Plan:
    """Write the plan; with `random` its weights are made when it is loaded."""
    specs = KERNELS | {spec.family: spec for spec in runtime_kernels()}
    modules = build_modules(specs, (arch,), directory)
    data = logits().tobytes()
    (directory / FILE).write_bytes(bytes(64) + data)
    size = 64 + len(data)
    digest = hashlib.sha256((directory / FILE).read_bytes()).hexdigest()
    plan = Plan(
        format="toolkit-plan",
        major=MAJOR,
        minor=MINOR,
        abi=ABI_HASH,
        model=Model(
            *("tiny", "chain", VOCABULARY, VOCABULARY, 2, CONTEXT, "float32", "keep"),
            random_weights=7 if random else None,
        ),
        target=arch,
        max_batch=MAX_BATCH,
        buckets=buckets(),
        kernels={name: Kernel(spec.family, dict(spec.params), "") for name, spec in specs.items()},
        libraries=(),
        modules=modules,
        weights={"table": WeightEntry(FILE, 64, len(data), (VOCABULARY, VOCABULARY), FLOAT32, "rows", fill="f")},
        weight_files=(WeightFile(FILE, size, "" if random else digest, random=random),),
        caches=(CacheResource("kv", (0, 1), PAGE_TOKENS, PAGE_BYTES, 1, 8, 8, "float32", "kv-rows"),),
        memory=MemoryPlan(_arena(MAX_TOKENS), size, 1 << 20),
        text=None,
        eos_token_ids=(),
        bos_token_id=None,
        report=Report(0, 0, ()),
        fills={"f": RandomFill("ffff7f00", "0000003f")},
    )
    write_plan(plan, directory)
    return plan


def _arena(tokens: int) -> int:
    return tokens * (2 * ROW + sample_parts(VOCABULARY) + sample_scratch(VOCABULARY))


def buckets() -> tuple[Bucket, ...]:
    """Launch programs whose arguments are bound by name: AssertionError if a kernel has others."""
    sizes = [(f"decode[{size}]", size, True) for size in (1, 2, 4, 8)] + [("tokens[64]", MAX_TOKENS, False)]
    return tuple(_bucket(name, tokens, decode) for name, tokens, decode in sizes)


def _launch(family: str, **args: Arg) -> Launch:
    names = [spec.name for spec in arguments(CUDA_FAMILIES[family], KERNELS[family])]
    assert set(names) == args.keys()
    return Launch(family, tuple(args[name] for name in names), op=family)


def _bucket(name: str, tokens: int, decode: bool) -> Bucket:
    used = 0

    def buffer(row_bytes: int) -> ArenaArg:
        nonlocal used
        used += tokens * row_bytes
        return ArenaArg(used - tokens * row_bytes, tokens * row_bytes, "x")

    x, logits_, parts = buffer(ROW), buffer(ROW), buffer(sample_parts(VOCABULARY))
    inputs: dict[str, Any] = {name: InputArg(name) for name in INPUTS}
    size, rows = ConstArg(VOCABULARY), DimArg("R")
    return Bucket(
        *(name, tokens, min(tokens, MAX_BATCH), tokens),
        (
            _launch(
                *("embedding",),
                weight=WeightArg("table"),
                ids=InputArg("tokens"),
                out=x,
                T=DimArg("T"),
                V=size,
                W=size,
                scale=ConstArg(1.0),
            ),
            _launch("take_rows", x=x, rows=InputArg("rows"), out=logits_, R=rows, W=size),
        ),
        (
            _launch("sample_measure", logits=logits_, parts=parts, R=rows, V=size),
            _launch(
                *("sample",),
                logits=logits_,
                parts=parts,
                scratch=buffer(sample_scratch(VOCABULARY)),
                R=rows,
                V=size,
                **inputs,
            ),
        ),
        decode=decode,
    )
