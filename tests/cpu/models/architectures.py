"""Tiny random configurations of every architecture we test, and reference logits from their Hugging Face models."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache, PretrainedConfig, PreTrainedModel

from toolkit.compiler.shapes import Bounds

BOUNDS = Bounds(max_tokens=64, max_sequences=8, max_rows=16, max_context=128)

_SHAPE: dict[str, Any] = {
    "vocab_size": 99,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
"""One shape for all, so that they share compiled kernels."""
_GPT_SHAPE: dict[str, Any] = {
    "vocab_size": 99,
    "n_embd": 64,
    "n_layer": 3,
    "n_head": 4,
    "n_positions": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


@dataclass(frozen=True)
class Architecture:
    """A model type: names that people know its models by, a configuration, and what other configurations change."""

    names: str
    values: Mapping[str, Any]
    variants: Mapping[str, Mapping[str, Any]]


def _model(names: str, variants: Mapping[str, Mapping[str, Any]] | None = None, **values: Any) -> Architecture:
    return Architecture(names, _SHAPE | values, variants or {})


def _gpt(names: str, **values: Any) -> Architecture:
    return Architecture(names, _GPT_SHAPE | values, {})


def _falcon(names: str, variants: Mapping[str, Mapping[str, Any]]) -> Architecture:
    values = {name: value for name, value in _SHAPE.items() if name != "head_dim"}
    return Architecture(names, values | {"ffn_hidden_size": _SHAPE["intermediate_size"]}, variants)


def _rope(kind: str, **values: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, **values}}


_LLAMA3 = _rope("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64)
_YARN = _rope("yarn", factor=4.0, original_max_position_embeddings=64)
_LONG = {
    **_rope("longrope", short_factor=[1 + i / 10 for i in range(8)], long_factor=[2 + i / 2 for i in range(8)]),
    "original_max_position_embeddings": 16,
}
_MIXED: dict[str, Any] = {"sliding_window": 8, "num_hidden_layers": 6}
"""Windows in some layers, as each model type has them."""
_LATE = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}
_GEMMA = {**_MIXED, "query_pre_attn_scalar": 20}
_FALCON_40B: dict[str, Any] = {"new_decoder_architecture": True, "num_kv_heads": 2}
_GRANITE: dict[str, Any] = {
    "embedding_multiplier": 2.0,
    "residual_multiplier": 0.5,
    "logits_scaling": 3.0,
    "attention_multiplier": 0.1,
}

ARCHITECTURES: Mapping[str, Architecture] = {
    "apertus": _model("Apertus"),
    "apertus1p5_text": _model("Apertus 1.5, text"),
    "arcee": _model("AFM"),
    "biogpt": _model("BioGPT"),
    "bitnet": _model("BitNet b1.58, with unquantized weights"),
    "codegen": _gpt("CodeGen", rotary_dim=8),
    "cohere": _model("Command R", {"qk norm": {"use_qk_norm": True}}),
    "cohere2": _model("Command R7B, Command A", **_MIXED),
    "ctrl": _gpt("CTRL", dff=96),
    "cwm": _model("Code World Model"),
    "ernie4_5": _model("ERNIE 4.5, dense"),
    "exaone": _model("EXAONE 3"),
    "exaone4": _model("EXAONE 4", **_MIXED),
    "falcon": _falcon(
        "Falcon 7B, 11B, 40B and 180B, Falcon RW",
        {
            "serial": {"parallel_attn": False, "bias": True},
            "grouped": _FALCON_40B,
            "grouped, one norm": {**_FALCON_40B, "num_ln_in_parallel_attn": 1},
            "alibi": {"alibi": True, "multi_query": False, "parallel_attn": False, "bias": True},
            "alibi, multi query": {"alibi": True},
        },
    ),
    "gemma": _model("Gemma", {"mqa": {"num_key_value_heads": 1}}),
    "gemma2": _model("Gemma 2", **_GEMMA),
    "gemma3_text": _model(
        "Gemma 3, text", {"softcap": {"attn_logit_softcapping": 5.0, "final_logit_softcapping": 9.0}}, **_GEMMA
    ),
    "gemma4_text": _model(
        "Gemma 4, text, dense",
        {"inputs of each layer": {"hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": 99}},
        **_GEMMA,
        hidden_size_per_layer_input=0,
        global_head_dim=16,
    ),
    "glm": _model("GLM-4 9B (2024)", partial_rotary_factor=0.5),
    "glm4": _model("GLM-4 (0414)", partial_rotary_factor=0.5),
    "gpt2": _gpt("GPT-2"),
    "gpt_bigcode": _gpt("StarCoder"),
    "gpt_neox": _model("GPT-NeoX, Pythia", {"sequential": {"use_parallel_residual": False}}),
    "gptj": _gpt("GPT-J", rotary_dim=8),
    "granite": _model("Granite 3, dense", **_GRANITE),
    "granite_swa": _model("Granite, with windows", **_GRANITE, **_MIXED),
    "helium": _model("Helium"),
    "hunyuan_v1_dense": _model("Hunyuan, dense"),
    "hyperclovax": _model("HyperCLOVA X SEED"),
    "internlm3": _model("InternLM 3"),
    "iquestcoder": _model("IQuest-Coder"),
    "jais2": _model("Jais 2"),
    "llama": _model(
        "Llama 1 to 3, SmolLM and SmolLM2, TinyLlama, Yi",
        {
            "tied": {"tie_word_embeddings": True},
            "biases": {"attention_bias": True, "mlp_bias": True},
            "linear rope": _rope("linear", factor=4.0),
            "llama3 rope": _LLAMA3,
            "yarn rope": _YARN,
            "dynamic rope": {**_rope("dynamic", factor=4.0), "max_position_embeddings": 12},
        },
        num_hidden_layers=4,
    ),
    "ministral": _model("Ministral", sliding_window=8),
    "ministral3": _model("Ministral 3"),
    "mistral": _model("Mistral 7B, Mistral Nemo, Mistral Small", sliding_window=8),
    "modernbert-decoder": _model("Ettin, decoders"),
    "nanochat": _model("nanochat"),
    "nemotron": _model("Nemotron 4, Minitron"),
    "olmo": _model("OLMo"),
    "olmo2": _model("OLMo 2"),
    "olmo3": _model("OLMo 3", **_MIXED),
    "opt": _model("OPT", ffn_dim=96, word_embed_proj_dim=64),
    "persimmon": _model("Persimmon"),
    "phi": _model("Phi-1, Phi-1.5, Phi-2", {"whole": {"partial_rotary_factor": 1.0}}, partial_rotary_factor=0.5),
    "phi3": _model(
        "Phi-3 mini and medium, Phi-4, Phi-4 mini",
        {"partial": {"partial_rotary_factor": 0.5, "sliding_window": 8}, "longrope": _LONG},
    ),
    "qwen2": _model("Qwen 1.5 to 2.5, dense", {"window": _LATE}),
    "qwen3": _model("Qwen 3, dense", {"window": _LATE}),
    "seed_oss": _model("Seed-OSS"),
    "smollm3": _model("SmolLM3", num_hidden_layers=5),
    "stablelm": _model("StableLM", {"qk norm": {"qk_layernorm": True, "use_parallel_residual": True}}),
    "starcoder2": _model("StarCoder 2", sliding_window=8),
    "vaultgemma": _model("VaultGemma", **_GEMMA),
}
"""Every tested model type. Sequences of more than 8 tokens leave the windows."""

CASES: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    f"{kind} {variant}".strip(): (kind, {**each.values, **values})
    for kind, each in ARCHITECTURES.items()
    for variant, values in {"": {}, **each.variants}.items()
}
"""Case name to model type and configuration."""


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


@cache
def half_model(case: str) -> PreTrainedModel:
    """The same model in bfloat16."""
    make: Any = AutoModelForCausalLM.from_config
    whole = tiny_model(case)
    implementation = whole.config._attn_implementation
    model: Any = make(copy.deepcopy(tiny_config(case)), dtype=torch.bfloat16, attn_implementation=implementation).eval()
    model.load_state_dict(whole.state_dict())
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
def reference_logits(case: str, tokens: Sequence[int], dtype: str = "float32") -> npt.NDArray[np.float32]:
    """Logits[n, V] of one sequence from the Hugging Face model."""
    model = tiny_model(case) if dtype == "float32" else half_model(case)
    if str((getattr(tiny_config(case), "rope_parameters", None) or {}).get("rope_type")) in ("dynamic", "longrope"):
        model = copy.deepcopy(model)  # it remembers the longest sequence
    logits: torch.Tensor = model(torch.tensor([list(tokens)]), use_cache=False).logits
    return logits[0].float().numpy()


@torch.no_grad()
def cached_logits(case: str, tokens: Sequence[int], prompt: int) -> npt.NDArray[np.float32]:
    """Logits[n, V] of one sequence from the Hugging Face model: a prompt in one step, then token by token over its
    cache.
    """
    model: Any = copy.deepcopy(tiny_model(case))  # it remembers the longest sequence
    past = DynamicCache(config=model.config)
    parts = [tokens[:prompt], *([token] for token in tokens[prompt:])]
    logits = [model(torch.tensor([part]), cache=past, use_cache=True).logits[0] for part in parts]
    return torch.cat(logits).numpy()
