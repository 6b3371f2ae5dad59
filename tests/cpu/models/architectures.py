"""Tiny random configurations of every architecture we test, and reference logits from their Hugging Face models."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from toolkit.compiler.shapes import Bounds

BOUNDS = Bounds(max_tokens=64, max_sequences=8, max_rows=16, max_context=128)

_COMMON: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_WINDOWED = {"sliding_window": 8, "num_hidden_layers": 6}
_LINEAR_ROPE = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}

_YARN_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}
_LONG_ROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6, 1.7],
    "long_factor": [2.0, 2.5, 3.0, 3.5, 4.0, 4.5, 5.0, 5.5],
}
_DYNAMIC_ROPE = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
_GEMMA = _COMMON | _WINDOWED | {"query_pre_attn_scalar": 16}
_GPT = {"vocab_size": 96, "n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 256}
_LATE_WINDOW = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}
_FALCON = {name: value for name, value in _COMMON.items() if name != "head_dim"} | {"ffn_hidden_size": 80}
_FALCON_40B = {"new_decoder_architecture": True, "num_kv_heads": 2}
_FALCON_RW = {"alibi": True, "multi_query": False, "parallel_attn": False, "bias": True}
_GRANITE = {"embedding_multiplier": 2.0, "residual_multiplier": 0.5, "logits_scaling": 3.0, "attention_multiplier": 0.1}

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", _COMMON | {"num_hidden_layers": 4}),
    "llama tied": ("llama", _COMMON | {"tie_word_embeddings": True}),
    "llama biases": ("llama", _COMMON | {"attention_bias": True, "mlp_bias": True}),
    "llama llama3 rope": ("llama", _COMMON | {"rope_parameters": _LLAMA3_ROPE}),
    "llama linear rope": ("llama", _COMMON | {"rope_parameters": _LINEAR_ROPE}),
    "llama yarn rope": ("llama", _COMMON | {"rope_parameters": _YARN_ROPE}),
    "llama dynamic rope": ("llama", _COMMON | {"rope_parameters": _DYNAMIC_ROPE, "max_position_embeddings": 12}),
    "mistral": ("mistral", _COMMON | {"sliding_window": 8}),
    "ministral": ("ministral", _COMMON | {"sliding_window": 8}),
    "ministral3": ("ministral3", _COMMON),
    "qwen2": ("qwen2", _COMMON),
    "qwen2 window": ("qwen2", _COMMON | _LATE_WINDOW),
    "qwen3": ("qwen3", _COMMON),
    "qwen3 window": ("qwen3", _COMMON | _LATE_WINDOW),
    "gemma": ("gemma", _COMMON),
    "gemma2": ("gemma2", _GEMMA),
    "gemma3_text": ("gemma3_text", _GEMMA),
    "gemma3_text softcap": ("gemma3_text", _GEMMA | {"attn_logit_softcapping": 5.0, "final_logit_softcapping": 9.0}),
    "vaultgemma": ("vaultgemma", _GEMMA),
    "phi": ("phi", _COMMON | {"partial_rotary_factor": 0.5}),
    "phi3": ("phi3", _COMMON),
    "phi3 partial": ("phi3", _COMMON | {"partial_rotary_factor": 0.5, "sliding_window": 8}),
    "phi3 longrope": ("phi3", _COMMON | {"rope_parameters": _LONG_ROPE, "original_max_position_embeddings": 16}),
    "falcon": ("falcon", _FALCON),
    "falcon serial": ("falcon", _FALCON | {"parallel_attn": False, "bias": True}),
    "falcon grouped": ("falcon", _FALCON | _FALCON_40B),
    "falcon grouped, one norm": ("falcon", _FALCON | _FALCON_40B | {"num_ln_in_parallel_attn": 1}),
    "falcon alibi": ("falcon", _FALCON | _FALCON_RW),
    "falcon alibi, multi query": ("falcon", _FALCON | {"alibi": True}),
    "gpt2": ("gpt2", _GPT),
    "gptj": ("gptj", _GPT | {"rotary_dim": 8}),
    "codegen": ("codegen", _GPT | {"rotary_dim": 8}),
    "gpt_bigcode": ("gpt_bigcode", _GPT),
    "gpt_neox": ("gpt_neox", _COMMON),
    "opt": ("opt", _COMMON | {"ffn_dim": 80, "word_embed_proj_dim": 64}),
    "biogpt": ("biogpt", _COMMON),
    "olmo": ("olmo", _COMMON),
    "olmo2": ("olmo2", _COMMON),
    "olmo3": ("olmo3", _COMMON | _WINDOWED),
    "granite": ("granite", _COMMON | _GRANITE),
    "starcoder2": ("starcoder2", _COMMON | {"sliding_window": 8}),
    "stablelm": ("stablelm", _COMMON),
    "stablelm qk norm": ("stablelm", _COMMON | {"qk_layernorm": True, "use_parallel_residual": True}),
    "persimmon": ("persimmon", _COMMON),
    "cohere": ("cohere", _COMMON),
    "cohere qk norm": ("cohere", _COMMON | {"use_qk_norm": True}),
    "cohere2": ("cohere2", _COMMON | _WINDOWED),
    "smollm3": ("smollm3", _COMMON | {"num_hidden_layers": 5}),
    "glm": ("glm", _COMMON | {"partial_rotary_factor": 0.5}),
    "glm4": ("glm4", _COMMON | {"partial_rotary_factor": 0.5}),
    "exaone4": ("exaone4", _COMMON | _WINDOWED),
    "nemotron": ("nemotron", _COMMON),
    "seed_oss": ("seed_oss", _COMMON),
    "hunyuan_v1_dense": ("hunyuan_v1_dense", _COMMON),
    "ernie4_5": ("ernie4_5", _COMMON),
    "arcee": ("arcee", _COMMON),
    "apertus": ("apertus", _COMMON),
    "bitnet": ("bitnet", _COMMON),
    "nanochat": ("nanochat", _COMMON),
    "helium": ("helium", _COMMON),
    "jais2": ("jais2", _COMMON),
    "cwm": ("cwm", _COMMON),
}
"""Case name to model type and configuration. Sequences of more than 8 tokens leave the windows."""


@cache
def tiny_config(case: str) -> PretrainedConfig:
    """The configuration of a case; treat it as read-only."""
    kind, values = CASES[case]
    config = AutoConfig.for_model(kind, **values)
    assert isinstance(config, PretrainedConfig)
    return config


@cache
def tiny_model(case: str) -> PreTrainedModel:
    """A float32 model of a case with random weights, large enough for a mistake to show in the logits."""
    make: Any = AutoModelForCausalLM.from_config
    implementation = "sdpa" if "alibi" in case else "eager"  # eager falcon adds ALiBi twice
    model: Any = make(copy.deepcopy(tiny_config(case)), dtype=torch.float32, attn_implementation=implementation)
    random = torch.Generator().manual_seed(7)
    for name, parameter in model.named_parameters():
        values = torch.randn(parameter.shape, generator=random)
        is_norm = parameter.ndim == 1 and name.endswith("weight")
        parameter.data = 1 + 0.2 * values if is_norm else 0.15 * values
    model.eval()
    assert isinstance(model, PreTrainedModel)
    return model


def tensors(case: str) -> dict[str, npt.NDArray[np.float32]]:
    """The weights of a case by name, as its checkpoint has them: tied ones once."""
    return {name: parameter.detach().numpy() for name, parameter in tiny_model(case).named_parameters()}


def sequences(case: str, lengths: Sequence[int], seed: int = 0) -> list[list[int]]:
    """Random token sequences."""
    random = np.random.default_rng(seed)
    return [random.integers(3, tiny_config(case).vocab_size, length).tolist() for length in lengths]


@torch.no_grad()
def reference_logits(case: str, tokens: Sequence[int]) -> npt.NDArray[np.float32]:
    """Logits[n, V] of one sequence from the Hugging Face model."""
    model = copy.deepcopy(tiny_model(case))  # with dynamic RoPE it remembers the longest sequence
    logits: torch.Tensor = model(torch.tensor([list(tokens)]), use_cache=False).logits
    return logits[0].numpy()
