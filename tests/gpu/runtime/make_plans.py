"""Tiny models as plans for CPU and for GPUs: `make_plans.py DIRECTORY [--arch sm90]`, needs no GPU.

Weights are random, of one seed, so the plans of a model for both kinds of machine compute the same numbers.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from toolkit.cli.driver import compile as compile_model

SIZES = {
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
KINDS: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {},
    "gemma3_text": {
        "sliding_window": 70,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
}
DTYPES = ("float32", "bfloat16")


def make_plans(directory: Path, arch: str) -> None:
    """Write DIRECTORY/MODEL-DTYPE-{cpu,gpu}."""
    for kind, changes in KINDS.items():
        torch.manual_seed(1)
        config = AutoConfig.for_model(kind, **(SIZES | changes))
        config.dtype = torch.float32
        from_config: Any = AutoModelForCausalLM.from_config
        model = from_config(config).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.05)
        for dtype in DTYPES:
            source = directory / f"{kind}-{dtype}-model"
            model.to(getattr(torch, dtype)).save_pretrained(source)
            for target, name in (("cpu", "cpu"), (arch, "gpu")):
                compile_model(
                    *(source,), target=target, output=directory / f"{kind}-{dtype}-{name}", max_batch=8, max_context=320
                )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--arch", default="sm90")
    options = parser.parse_args()
    make_plans(options.directory, options.arch)
