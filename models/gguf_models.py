"""GGUF architectures: for each, the Hugging Face config its metadata means and where each tensor belongs.

The converter that writes these files changes some tensors. `Architecture` says which changes to undo: rows of Q and K
interleaved per head (llama), 1 added to norm weights (gemma), linear weights transposed (gpt2).
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..runtime.errors import UserError, shown
from .gguf_file import GGUFFile

Config = dict[str, Any]


class Metadata:
    """The keys of one architecture: `key_length` below `attention` is `llama.attention.key_length` in a llama file."""

    def __init__(self, file: GGUFFile) -> None:
        self.file = file
        self.architecture = str(file.metadata.get("general.architecture", ""))

    def get(self, key: str, default: Any = None) -> Any:
        """A value; float32 numbers become the shortest decimal that means the same (1e-05, not 9.99999974e-06)."""
        value = self.file.metadata.get(f"{self.architecture}.{key}", default)
        if isinstance(value, np.ndarray) and value.size and np.all(value == value[0]):
            value = value[0].item()
        return float(str(np.float32(value))) if isinstance(value, float) else value

    def need(self, key: str) -> Any:
        value = self.get(key)
        if not isinstance(value, int | float) or value <= 0:
            raise UserError(
                f"{self.file.path.name} should give {self.architecture}.{key} as one positive number, "
                f"found {shown(value)}; convert the model again."
            )
        return value

    def floats(self, tensor: str) -> list[float]:
        """The values of a small float32 tensor."""
        stored = self.file.tensors[tensor]
        return [float(str(value)) for value in stored.type.decode_rows(self.file.rows(stored)).decode().ravel()]

    def token(self, name: str) -> int | None:
        value = self.file.metadata.get(f"tokenizer.ggml.{name}_token_id")
        return value if isinstance(value, int) else None


@dataclass(frozen=True)
class Architecture:
    """One GGUF architecture. `names` maps a tensor's name without `blk.N.` and suffix to its module in the model."""

    model_type: str
    config: Callable[[Metadata], Config]
    names: Mapping[str, str]
    interleaved: Mapping[str, str] = field(default_factory=dict)
    """Module to the config attribute that counts its heads. Rows of a head are stored in the order 0, D/2, 1, ..."""
    norm_offset: bool = False
    """Norm weights are stored plus 1."""
    transposed: tuple[str, ...] = ()
    """Modules whose weight the model has as [in, out]."""

    def place(self, name: str) -> str | None:
        """The model's name of a tensor, or None if it is no parameter."""
        match = re.fullmatch(r"(?:blk\.(\d+)\.)?(.+)\.(weight|bias)", name)
        if match is None or match[2] not in self.names:
            return None
        module = self.names[match[2]]
        return f"{module.format(match[1])}.{match[3]}" if ("{}" in module) == (match[1] is not None) else None


# --- configs ----------------------------------------------------------------------------------------------------------


def _decoder(meta: Metadata) -> Config:
    """What every decoder with RoPE and RMS norms says."""
    tensors = meta.file.tensors
    if meta.get("expert_count", 0):
        raise UserError(
            f"{meta.file.path.name} is a mixture of experts ({shown(meta.architecture)}), not supported yet."
        )
    heads, hidden = meta.need("attention.head_count"), meta.need("embedding_length")
    return {
        "vocab_size": _vocabulary(meta),
        "hidden_size": hidden,
        "intermediate_size": meta.need("feed_forward_length"),
        "num_hidden_layers": meta.need("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": meta.get("attention.head_count_kv", heads),
        "head_dim": meta.get("attention.key_length", hidden // heads),
        "max_position_embeddings": meta.need("context_length"),
        "rms_norm_eps": meta.need("attention.layer_norm_rms_epsilon"),
        "tie_word_embeddings": "output.weight" not in tensors,
        "rope_parameters": _rope(meta),
    }


def _vocabulary(meta: Metadata) -> int:
    if "token_embd.weight" not in meta.file.tensors:
        raise UserError(f"{meta.file.path.name} lacks the tensor token_embd.weight; it is no language model.")
    return meta.file.tensors["token_embd.weight"].shape[0]


def _rope(meta: Metadata) -> Config:
    rope: Config = {"rope_type": "default", "rope_theta": meta.get("rope.freq_base", 10000.0)}
    kind, factor = meta.get("rope.scaling.type", "none"), meta.get("rope.scaling.factor", 1.0)
    original = meta.get("rope.scaling.original_context_length")
    if "rope_freqs.weight" in meta.file.tensors:
        rope |= _llama3_scaling(meta.floats("rope_freqs.weight"), rope["rope_theta"], meta.file.path.name)
    elif "rope_factors_long.weight" in meta.file.tensors:
        rope |= {"rope_type": "longrope", "original_max_position_embeddings": original}
        rope |= {f"{name}_factor": meta.floats(f"rope_factors_{name}.weight") for name in ("short", "long")}
    elif kind == "linear":
        rope |= {"rope_type": "linear", "factor": factor}
    elif kind == "yarn":
        rope |= {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original}
    elif kind != "none":
        raise UserError(
            f"{meta.file.path.name} has RoPE scaling {shown(kind)}; none, linear, yarn, longrope are supported."
        )
    return rope


def _llama3_scaling(divisors: list[float], theta: float, file: str) -> Config:
    """The llama3 scaling whose frequencies are those of plain RoPE divided by `divisors`, which a file stores."""
    scaling: Config = {"rope_type": "llama3", "factor": max(divisors), "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    wavelength = 2 * math.pi * theta ** (np.arange(len(divisors)) / len(divisors))
    for original in (8192, 4096, 16384, 32768):
        smooth = np.clip((original / wavelength - 1.0) / 3.0, 0.0, 1.0)
        if np.allclose(1.0 / ((1.0 - smooth) / max(divisors) + smooth), divisors, rtol=1e-4):
            return scaling | {"original_max_position_embeddings": original}
    raise UserError(f"{file} has RoPE frequencies (rope_freqs.weight) that are not of the llama3 kind.")


def _llama(meta: Metadata) -> Config:
    tensors = meta.file.tensors
    biases = {"attention_bias": "blk.0.attn_q.bias" in tensors, "mlp_bias": "blk.0.ffn_up.bias" in tensors}
    return _decoder(meta) | biases


def _gemma(meta: Metadata, large: int) -> Config:
    """gemma2 and gemma3. Only the 27B models, of `large` layers, scale queries by something else than the head size."""
    config = _decoder(meta)
    scalar = config["head_dim"]
    if config["num_hidden_layers"] == large:
        scalar = config["hidden_size"] // config["num_attention_heads"]
    return config | {
        "query_pre_attn_scalar": scalar,
        "sliding_window": meta.need("attention.sliding_window"),
        "attn_logit_softcapping": meta.get("attn_logit_softcapping"),
        "final_logit_softcapping": meta.get("final_logit_softcapping"),
    }


def _gemma3(meta: Metadata) -> Config:
    config = _gemma(meta, large=62)
    local = {"rope_type": "default", "rope_theta": meta.get("rope.freq_base_swa", 10000.0)}
    return config | {
        "rope_parameters": {"full_attention": config["rope_parameters"], "sliding_attention": local},
    }


def _phi3(meta: Metadata) -> Config:
    config = _decoder(meta)
    rope = config["rope_parameters"]
    rope["partial_rotary_factor"] = meta.get("rope.dimension_count", config["head_dim"]) / config["head_dim"]
    original = rope.get("original_max_position_embeddings", config["max_position_embeddings"])
    window = meta.get("attention.sliding_window")
    return config | {"original_max_position_embeddings": original, "sliding_window": window}


def _gpt2(meta: Metadata) -> Config:
    return {
        "vocab_size": _vocabulary(meta),
        "n_positions": meta.need("context_length"),
        "n_embd": meta.need("embedding_length"),
        "n_layer": meta.need("block_count"),
        "n_head": meta.need("attention.head_count"),
        "n_inner": meta.need("feed_forward_length"),
        "layer_norm_epsilon": meta.need("attention.layer_norm_epsilon"),
        "tie_word_embeddings": "output.weight" not in meta.file.tensors,
    }


# --- the table --------------------------------------------------------------------------------------------------------

_LAYER = "model.layers.{}."
_OUTER = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_ATTENTION = {
    "attn_q": _LAYER + "self_attn.q_proj",
    "attn_k": _LAYER + "self_attn.k_proj",
    "attn_v": _LAYER + "self_attn.v_proj",
    "attn_output": _LAYER + "self_attn.o_proj",
}
_QK_NORM = {"attn_q_norm": _LAYER + "self_attn.q_norm", "attn_k_norm": _LAYER + "self_attn.k_norm"}
_MLP = {
    "ffn_gate": _LAYER + "mlp.gate_proj",
    "ffn_up": _LAYER + "mlp.up_proj",
    "ffn_down": _LAYER + "mlp.down_proj",
}
_PRE_NORM = {"attn_norm": _LAYER + "input_layernorm", "ffn_norm": _LAYER + "post_attention_layernorm"}
_POST_NORM = {
    "post_attention_norm": _LAYER + "post_attention_layernorm",
    "post_ffw_norm": _LAYER + "post_feedforward_layernorm",
}
_GEMMA_NORM = {
    "attn_norm": _LAYER + "input_layernorm",
    "ffn_norm": _LAYER + "pre_feedforward_layernorm",
    **_POST_NORM,
}
_LLAMA = {**_OUTER, **_ATTENTION, **_MLP, **_PRE_NORM}
_PHI3 = {
    **_OUTER,
    **_PRE_NORM,
    "attn_qkv": _LAYER + "self_attn.qkv_proj",
    "attn_output": _LAYER + "self_attn.o_proj",
    "ffn_up": _LAYER + "mlp.gate_up_proj",
    "ffn_down": _LAYER + "mlp.down_proj",
}
_BLOCK = "transformer.h.{}."
_GPT2 = {
    "token_embd": "transformer.wte",
    "position_embd": "transformer.wpe",
    "output_norm": "transformer.ln_f",
    "output": "lm_head",
    "attn_norm": _BLOCK + "ln_1",
    "ffn_norm": _BLOCK + "ln_2",
    "attn_qkv": _BLOCK + "attn.c_attn",
    "attn_output": _BLOCK + "attn.c_proj",
    "ffn_up": _BLOCK + "mlp.c_fc",
    "ffn_down": _BLOCK + "mlp.c_proj",
}

ARCHITECTURES: dict[str, Architecture] = {
    "llama": Architecture(
        "llama", _llama, _LLAMA, interleaved={"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}
    ),
    "qwen2": Architecture("qwen2", _decoder, _LLAMA),
    "qwen3": Architecture("qwen3", _decoder, {**_LLAMA, **_QK_NORM}),
    "phi3": Architecture("phi3", _phi3, _PHI3),
    "olmo2": Architecture("olmo2", _decoder, {**_OUTER, **_ATTENTION, **_QK_NORM, **_MLP, **_POST_NORM}),
    "gemma2": Architecture(
        "gemma2",
        lambda meta: _gemma(meta, large=46),
        {**_OUTER, **_ATTENTION, **_MLP, **_GEMMA_NORM},
        norm_offset=True,
    ),
    "gemma3": Architecture(
        "gemma3_text", _gemma3, {**_OUTER, **_ATTENTION, **_QK_NORM, **_MLP, **_GEMMA_NORM}, norm_offset=True
    ),
    "gpt2": Architecture("gpt2", _gpt2, _GPT2, transposed=("c_attn", "c_proj", "c_fc")),
}
"""By `general.architecture`. Mistral files are of architecture llama."""


def architecture(file: GGUFFile) -> Architecture:
    """The architecture of a file. Raises UserError for one that is not supported."""
    name = file.metadata.get("general.architecture")
    if name not in ARCHITECTURES:
        raise UserError(
            f"{file.path.name} is of architecture {shown(name)}; GGUF files of {', '.join(ARCHITECTURES)} can be "
            "compiled, for others give the Hugging Face directory."
        )
    return ARCHITECTURES[name]


def config_values(file: GGUFFile) -> Config:
    """The keyword arguments of the model's Hugging Face config."""
    meta = Metadata(file)
    ids = {f"{name}_token_id": meta.token(key) for name, key in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"))}
    return architecture(file).config(meta) | ids
