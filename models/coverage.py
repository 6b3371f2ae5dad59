"""The architectures whose logits are tested against their Hugging Face implementations.

Capture knows no architecture: whatever is made of known parts is captured. This table says what has been proved.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

TESTED: Mapping[str, str] = MappingProxyType(
    {
        "apertus": "Apertus",
        "arcee": "AFM",
        "biogpt": "BioGPT",
        "bitnet": "BitNet b1.58, with unquantized weights",
        "codegen": "CodeGen",
        "cohere": "Command R",
        "cohere2": "Command R7B, Command A",
        "cwm": "Code World Model",
        "ernie4_5": "ERNIE 4.5, dense",
        "exaone4": "EXAONE 4",
        "falcon": "Falcon 7B, 11B, 40B and 180B, Falcon RW",
        "gemma": "Gemma",
        "gemma2": "Gemma 2",
        "gemma3_text": "Gemma 3, text",
        "glm": "GLM-4 9B (2024)",
        "glm4": "GLM-4 (0414)",
        "gpt2": "GPT-2",
        "gpt_bigcode": "StarCoder",
        "gpt_neox": "GPT-NeoX, Pythia",
        "gptj": "GPT-J",
        "granite": "Granite 3, dense",
        "helium": "Helium",
        "hunyuan_v1_dense": "Hunyuan, dense",
        "jais2": "Jais 2",
        "llama": "Llama 1 to 3, SmolLM and SmolLM2, TinyLlama, Yi",
        "ministral": "Ministral",
        "ministral3": "Ministral 3",
        "mistral": "Mistral 7B, Mistral Nemo, Mistral Small",
        "nanochat": "nanochat",
        "nemotron": "Nemotron 4, Minitron",
        "olmo": "OLMo",
        "olmo2": "OLMo 2",
        "olmo3": "OLMo 3",
        "opt": "OPT",
        "persimmon": "Persimmon",
        "phi": "Phi-1, Phi-1.5, Phi-2",
        "phi3": "Phi-3 mini and medium, Phi-4, Phi-4 mini",
        "qwen2": "Qwen 1.5 to 2.5, dense",
        "qwen3": "Qwen 3, dense",
        "seed_oss": "Seed-OSS",
        "smollm3": "SmolLM3",
        "stablelm": "StableLM",
        "starcoder2": "StarCoder 2",
        "vaultgemma": "VaultGemma",
    }
)
"""Model type, as in config.json, to models that have it."""
