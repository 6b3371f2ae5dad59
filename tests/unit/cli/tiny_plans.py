"""Plans of tiny models made by the whole compile flow but the C++ compiler: they can be read, not run."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from toolkit import compile as compile_model
from toolkit.kernels_templates.catalog import KernelSpec
from toolkit.runtime.plan import ArchName, CudaModule, Library

SIZES = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
}
KINDS: dict[str, dict[str, Any]] = {
    "llama": {"num_hidden_layers": 4},
    "gemma3_text": {
        "num_hidden_layers": 5,
        "sliding_window": 20,
        "layer_types": [f"{kind}_attention" for kind in ("sliding", "sliding", "full", "sliding", "full")],
    },
}


def make_tiny_plan(folder: Path, kind: str, name: str = "plan", *, code: bool = False, **options: Any) -> Path:
    """Compile a tiny model with random weights into `folder/name`; `options` are those of `compile`.

    Only with `code` the plan has machine code.
    """
    model = folder / kind
    model.mkdir(exist_ok=True)
    (model / "config.json").write_text(json.dumps({"model_type": kind, **SIZES, **KINDS[kind]}))
    with pytest.MonkeyPatch.context() as patch:
        if not code:
            patch.setattr("toolkit.compiler.codegen.cpu.build_libraries", _no_libraries)
            patch.setattr("toolkit.compiler.codegen.cuda.build_modules", no_modules)
        return compile_model(model, output=folder / name, weights="random:1", max_batch=8, **options)


def _no_libraries(*given: Any, **options: Any) -> tuple[Library, ...]:
    directory: Path = given[3]
    (directory / "kernels").mkdir()
    (directory / "kernels/cpu.so").write_bytes(b"none")
    digest = hashlib.sha256(b"none").hexdigest()
    return (Library("x86-64-v3", "kernels/cpu.so", 4, digest, ("avx2",)),)


def no_modules(
    kernels: Mapping[str, KernelSpec], archs: Sequence[ArchName], directory: Path, progress: object = None
) -> tuple[CudaModule, ...]:
    """In the place of `build_modules`: files that hold no kernel."""
    (directory / "kernels").mkdir()
    for arch in archs:
        (directory / f"kernels/{arch}.bin").write_bytes(b"none")
    digest = hashlib.sha256(b"none").hexdigest()
    return tuple(CudaModule(arch, f"kernels/{arch}.bin", 4, digest, {}) for arch in archs)
