"""A tiny model with random weights, none of which has its default."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

SIZES: dict[str, Any] = {
    "vocab_size": 199,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def save_tiny_model(folder: Path, kind: str, **values: Any) -> Any:
    """A float32 model of a type, saved in a folder; `values` go before `SIZES`."""
    torch.manual_seed(3)
    config = AutoConfig.for_model(kind, **{**SIZES, **values})
    config.dtype = torch.float32
    from_config: Any = AutoModelForCausalLM.from_config
    model = from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(folder)
    return model
