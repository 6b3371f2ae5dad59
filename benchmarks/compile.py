"""What compiling costs: seconds and peak memory of whole processes, with an empty kernel cache and again.

    compile.py MODELS [--only smol,1b,quant,8b,405b] [--json FILE]

Bars: 1.07B parameters from safetensors and GGUF in 90 s and 1.2 GB; an 8B shape with random weights in 60 s; a 405B
shape with random weights in 60 s and 1.5 GB; a second compilation in 10 s. Exits with 1 if one is missed. Beside the
seconds that passed are those that the processors worked, which other load on the machine changes less. Models are made
in `.bench/`.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from run import WORK, machine, random_1b
from transformers import AutoConfig

from toolkit.models.source import parameter_shapes

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "dtype": "bfloat16",
}
SHAPES: dict[str, dict[str, Any]] = {
    "1b": {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32}
    | {"num_key_value_heads": 8, "head_dim": 64, "vocab_size": 49152, "tie_word_embeddings": True},
    "8b": {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32}
    | {"num_key_value_heads": 8, "head_dim": 128, "tie_word_embeddings": False},
    "405b": {"hidden_size": 16384, "intermediate_size": 53248, "num_hidden_layers": 126, "num_attention_heads": 128}
    | {"num_key_value_heads": 8, "head_dim": 128, "tie_word_embeddings": False},
}


AGAIN = 10.0
"""Seconds for a second compilation."""


class Case(NamedTuple):
    """A compilation and its bars."""

    name: str
    arguments: list[str]
    seconds: float
    gigabytes: float | None = None


def folder(shape: str) -> Path:
    """A directory with the config of a shape alone."""
    path = WORK / f"llama-{shape}"
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(LLAMA | SHAPES[shape]))
    return path


def checkpoint_1b() -> Path:
    """A bfloat16 safetensors checkpoint of 1.07 billion random parameters."""
    path = folder("1b")
    target = path / "model.safetensors"
    if target.exists():
        return path
    header, offset, shapes = {}, 0, parameter_shapes(AutoConfig.from_pretrained(path))
    for name, shape in shapes.items():
        size = 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(header).encode()
    random = np.random.default_rng(0)
    with target.open("wb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        for shape in shapes.values():
            for _ in range(math.prod(shape) // shape[-1]):  # by rows: a process's peak counts what its parent held
                values = random.standard_normal(shape[-1], dtype=np.float32) * np.float32(0.02)
                stream.write(((values + np.float32(len(shape) == 1)).view(np.uint32) >> 16).astype(np.uint16).tobytes())
    return path


def cases(models: Path, only: set[str]) -> Iterator[Case]:
    """The compilations asked for."""
    if "smol" in only:
        yield Case("SmolLM2-135M, GGUF", [str(models / "smollm2.gguf")], 90, 1.2)
    if "1b" in only:
        yield Case("1.07B, Q4_0 GGUF, kept", [str(random_1b(models))], 90, 1.2)
        yield Case("1.07B, bf16 safetensors, kept", [str(checkpoint_1b())], 90, 1.2)
    if "quant" in only:
        for quant in ("int8", "int4"):
            yield Case(f"1.07B, bf16 safetensors, {quant}", [str(checkpoint_1b()), "--quant", quant], 90, 1.2)
    if "8b" in only:
        yield Case("8B shape, random bf16", [str(folder("8b")), "--weights", "random:0"], 60)
        yield Case("8B shape, random int4", [str(folder("8b")), "--weights", "random:0", "--quant", "int4"], 60)
    if "405b" in only:
        yield Case("405B shape, random bf16", [str(folder("405b")), "--weights", "random:0"], 60, 1.5)


def compile_once(case: Case, cache: str) -> dict[str, Any]:
    """Seconds, processor seconds and peak gigabytes (10^9 bytes) of one process; its compilers need far less memory."""
    command = [sys.executable, "-m", "toolkit.cli.main", "compile", *case.arguments]
    command += ["-o", str(WORK / "compiled"), "--force", "--json"]
    environment = {**os.environ, "TOOLKIT_CACHE": cache}
    began = time.perf_counter()
    with tempfile.TemporaryFile() as output:
        child = subprocess.Popen(command, stdout=output, env=environment)
        _, status, usage = os.wait4(child.pid, 0)
        seconds = time.perf_counter() - began
        child.returncode = os.waitstatus_to_exitcode(status)
        if child.returncode:
            sys.exit(f"{' '.join(command)} failed with exit code {child.returncode}")
        output.seek(0)
        summary = json.load(output)
    busy = usage.ru_utime + usage.ru_stime
    return {"seconds": seconds, "busy": busy, "gigabytes": _peak(usage), "phases": summary["seconds"]}


def _peak(usage: resource.struct_rusage) -> float:
    return usage.ru_maxrss * 1024 / 1e9


def main() -> None:
    """Compile each case twice with a cache of its own, print the table and write the record."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", type=Path)
    parser.add_argument("--only", default="smol,1b,quant,8b,405b")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    WORK.mkdir(exist_ok=True)
    rows, missed = [], 0
    print(f"{'':30} {'first':>7} {'bar':>5} {'busy':>7} {'GB':>6} {'bar':>5} {'again':>7} {'bar':>5} {'busy':>7}")
    for case in cases(args.models, set(args.only.split(","))):
        with tempfile.TemporaryDirectory() as cache:
            first, second = compile_once(case, cache), compile_once(case, cache)
        bars = [case.seconds, case.gigabytes, AGAIN]
        rows.append({"case": case.name, "bars": bars, "first": first, "second": second})
        met = first["seconds"] <= case.seconds and second["seconds"] <= AGAIN
        met = met and (case.gigabytes is None or first["gigabytes"] <= case.gigabytes)
        missed += not met
        print(
            f"{case.name:30} {first['seconds']:7.1f} {case.seconds:5.0f} {first['busy']:7.1f} "
            f"{first['gigabytes']:6.2f} {case.gigabytes or '':>5} {second['seconds']:7.1f} {AGAIN:5.0f} "
            f"{second['busy']:7.1f}{'' if met else '  missed'}",
            flush=True,
        )
    if args.json:
        args.json.write_text(json.dumps({**machine(), "rows": rows}, indent=1) + "\n")
    sys.exit(1 if missed else 0)


if __name__ == "__main__":
    main()
