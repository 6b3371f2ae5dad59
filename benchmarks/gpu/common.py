"""What the GPU benchmarks share: the machine's description, floors, and where results go."""

from __future__ import annotations

import json
import platform
import subprocess
from collections import Counter
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from toolkit import __version__
from toolkit.runtime.device.cuda.driver import list_gpus
from toolkit.runtime.encodings import Encoding
from toolkit.runtime.plan import Plan
from toolkit.runtime.request import Add, SamplingParams

READ_RATE = 4.572e12
"""Bytes a second of the best kernel that only reads, on an H200."""
SHAPES = {4096: "8B", 2048: "1B"}
"""Hidden sizes of the two models that figures exist for."""


def shape(plan: Plan) -> str:
    """Which of the two models a plan is, else its name; with the encoding of most weights, if they are quantized."""
    name = SHAPES.get(plan.model.hidden_size, plan.model.name)
    bytes_of: Counter[Encoding] = Counter()
    for weight in plan.weights.values():
        bytes_of[weight.encoding] += weight.bytes
    encoding = bytes_of.most_common(1)[0][0]
    return f"{name} {encoding.name}" if encoding.kind == "affine" else name


def floor_ms(plan: Plan, batch: int, context: int) -> float:
    """Milliseconds to read all weights and the caches of a decode step once."""
    return (plan.memory.weights + batch * context * plan.kv_bytes_per_token) / READ_RATE * 1e3


def requests(plan: Plan, batch: int, prompt: int, new: int, *, seed: int = 0, **params: Any) -> list[Add]:
    """Greedy requests for exactly `new` tokens, with random prompts."""
    ids = np.random.default_rng(seed).integers(3, plan.model.vocab_size, (batch, prompt)).tolist()
    sampling = SamplingParams(**({"temperature": 0.0, "max_tokens": new, "ignore_eos": True} | params))
    return [Add(str(index), tokens, sampling) for index, tokens in enumerate(ids)]


def machine() -> dict[str, Any]:
    """Where and with what the figures were measured."""
    root = Path(__file__).resolve().parents[2]
    found = subprocess.run(
        ["git", "-C", str(root), "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    )
    return {
        "gpu": list_gpus()[0],
        "python": platform.python_version(),
        "toolkit": __version__,
        "cuda_bindings": version("cuda-bindings"),
        "commit": found.stdout.strip() or None,
    }


def save(path: Path | None, name: str, results: Any) -> None:
    """Write results as JSON with the machine, or print them."""
    text = json.dumps({"name": name, "machine": machine(), "results": results}, indent=1)
    if path is None:
        print(text)
    else:
        path.write_text(text + "\n")
