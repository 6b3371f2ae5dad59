"""Tiny models as plans for CPU and for GPUs: `make_plans.py DIRECTORY [--arch sm90]`, needs no GPU.

Weights are random, of one seed, so the plans of a model for both kinds of machine compute the same numbers.
"""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path

import torch
from gpu.runtime.models import DTYPES, KINDS, folder, random_model
from unit.models.float8_writer import store_float8

from toolkit.cli.driver import compile as compile_model

ON_BOTH = ("llama", "qwen3", "gemma3_text")
"""Models whose GPU plan is compared with their CPU plan; all are compared with transformers."""

TUNED = ("llama", "bfloat16")
"""The model whose plan carries alternatives to its kernels."""

FLOAT8 = "block"
"""What shares a scale where that model's checkpoint is in 8-bit floats; its CPU plan computes with their values."""

CACHES = ("int8", "fp8")
"""Caches of codes that the same model has plans for, compared with its CPU plan."""


def make_plans(directory: Path, arch: str) -> None:
    """Write DIRECTORY/MODEL-DTYPE-{cpu,gpu}, and DIRECTORY/hf/MODEL-DTYPE/{model,plan}."""
    for kind in KINDS:
        model = random_model(kind)
        for dtype in DTYPES:
            here = folder(directory, kind, dtype)
            model.to(getattr(torch, dtype)).save_pretrained(here / "model")
            compile_tiny = partial(compile_model, here / "model", max_batch=8, max_context=320)
            tuned = (kind, dtype) == TUNED
            compile_tiny(target=arch, output=here / "plan", alternatives=2 if tuned else 0)
            if kind in ON_BOTH:
                compile_tiny(target="cpu", output=directory / f"{kind}-{dtype}-cpu")
                (directory / f"{kind}-{dtype}-gpu").symlink_to(here.relative_to(directory) / "plan")
            for cache in CACHES if tuned else ():
                compile_tiny(target=arch, output=directory / f"{kind}+{cache}-{dtype}-gpu", kv_cache_dtype=cache)
                (directory / f"{kind}+{cache}-{dtype}-cpu").symlink_to(f"{kind}-{dtype}-cpu")
            if tuned:
                model.save_pretrained(directory / "hf8")
                store_float8(directory / "hf8", FLOAT8)
                for target, name in ((arch, "gpu"), ("cpu", "cpu")):
                    output = directory / f"{kind}+float8-{dtype}-{name}"
                    compile_model(directory / "hf8", max_batch=8, max_context=320, target=target, output=output)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--arch", default="sm90")
    options = parser.parse_args()
    make_plans(options.directory, options.arch)
