"""A small, valid plan on disk for tests of everything that reads plans; it can't be run."""

from __future__ import annotations

import hashlib
from pathlib import Path

import msgspec

from toolkit.runtime.encodings import FLOAT32
from toolkit.runtime.formats import Formats
from toolkit.runtime.plan import (
    MAJOR,
    MINOR,
    ArenaArg,
    Bucket,
    CacheArg,
    CacheResource,
    ConstArg,
    DimArg,
    InputArg,
    Kernel,
    Launch,
    Library,
    MemoryPlan,
    Model,
    PassReport,
    Plan,
    Report,
    Text,
    WeightArg,
    WeightEntry,
    WeightFile,
)
from toolkit.runtime.step import ABI_HASH


def sample_plan(library: bytes, weights: bytes, tokenizer: bytes, *, page_tokens: int = 4, window: int = 0) -> Plan:
    """A plan with one launch and two layers in one cache group, over files of these contents."""
    launch = Launch(
        kernel="k",
        args=(
            *(WeightArg("w"), InputArg("tokens"), CacheArg(0, 1)),
            *(ArenaArg(64, 64, "x"), DimArg("T"), ConstArg(0.5)),
        ),
        op="embedding:model.embed_tokens",
        bytes=64,
        flops=8,
    )
    cache = CacheResource("kv", (0, 1), page_tokens, 512, 2, 8, 8, "float32", "kv-head-major", window)
    return Plan(
        format="toolkit-plan",
        major=MAJOR,
        minor=MINOR,
        abi=ABI_HASH,
        model=Model("sample", "llama", 256, 64, 2, 128, "float32", "keep", {"config.json": "0" * 64}),
        target="cpu",
        max_batch=8,
        buckets=(Bucket("step", 32, 8, 8, (launch,), ()),),
        kernels={"k": Kernel("embedding", {"encoding": "f32"}, "abc")},
        libraries=(
            Library("x86-64-v3", "kernels/cpu.so", len(library), hashlib.sha256(library).hexdigest(), ("fma",)),
        ),
        weights={"w": WeightEntry("weights.safetensors", 0, 64, (4, 4), FLOAT32, "rows", ("model.w",))},
        weight_files=(WeightFile("weights.safetensors", len(weights), hashlib.sha256(weights).hexdigest()),),
        caches=(cache,),
        memory=MemoryPlan(128, len(weights), 1024),
        text=Text(
            {"tokenizer.json": hashlib.sha256(tokenizer).hexdigest()},
            "<s>",
            "</s>",
            add_bos=True,
            formats=Formats("hermes"),
        ),
        eos_token_ids=(2,),
        bos_token_id=1,
        report=Report(10, 5, (PassReport("fuse", 3, 10, 5),)),
    )


def write_sample_plan(directory: Path) -> Plan:
    """Write the sample plan with its files into `directory`."""
    library, weights, tokenizer = b"library", bytes(range(64)), b"{}"
    plan = sample_plan(library, weights, tokenizer)
    (directory / "kernels").mkdir(parents=True)
    (directory / "kernels/cpu.so").write_bytes(library)
    (directory / "weights.safetensors").write_bytes(weights)
    (directory / "tokenizer.json").write_bytes(tokenizer)
    (directory / "plan.json").write_bytes(msgspec.json.encode(plan))
    return plan
