"""Tiny models of several architectures, and where `make_plans.py` puts them: `hf/MODEL-DTYPE/{model,plan}`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, GptOssConfig, GptOssForCausalLM, PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaMLP

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
WINDOWS = {"sliding_window": 70, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
DTYPES = ("float32", "bfloat16")


class DenseSinksConfig(GptOssConfig):  # type: ignore[no-untyped-call]
    """gpt-oss's attention, with sinks and windows, in a model without experts."""

    model_type = "dense_sinks"


class _Dense(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        config.hidden_act, config.mlp_bias = "silu", False
        mlp: Any = LlamaMLP
        self.inner = mlp(config)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, None]:
        return self.inner(x), None


class DenseSinksForCausalLM(GptOssForCausalLM):  # type: ignore[no-untyped-call]
    """The model of `DenseSinksConfig`."""

    config_class = DenseSinksConfig

    def __init__(self, config: DenseSinksConfig) -> None:
        super().__init__(config)
        for layer in self.model.layers:
            layer.mlp = _Dense(config)
        ready: Any = self.post_init
        ready()


AutoConfig.register("dense_sinks", DenseSinksConfig)
AutoModelForCausalLM.register(DenseSinksConfig, DenseSinksForCausalLM)

KINDS: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {},
    "gemma2": WINDOWS | {"query_pre_attn_scalar": 64},
    "gemma3_text": WINDOWS,
    "phi3": {"head_dim": 32},
    "dense_sinks": WINDOWS
    | {
        "num_local_experts": 2,
        "num_experts_per_tok": 1,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    },
}


def random_model(kind: str) -> PreTrainedModel:
    """The model in float32, the same each time."""
    torch.manual_seed(1)
    config = AutoConfig.for_model(kind, **(SIZES | KINDS[kind]))
    config.dtype = torch.float32
    from_config: Any = AutoModelForCausalLM.from_config
    model: PreTrainedModel = from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    return model


def folder(plans: Path, kind: str, dtype: str) -> Path:
    """Where one model is."""
    return plans / "hf" / f"{kind}-{dtype}"
