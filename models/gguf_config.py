"""What the metadata of a GGUF file says of its model: the keyword arguments of the Hugging Face config.

Keys and their meaning are those that llama.cpp's converter writes. What a file does not say (activations, which layers
have a window, ...) is what all models of the architecture have, which is the config's default.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ..runtime.errors import UserError, shown
from .gguf_file import GGUFFile
from .sizes import check_sizes

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

    @property
    def layers(self) -> int:
        count: int = self.need("block_count")
        check_sizes({"num_hidden_layers": count}, self.file.path.name)
        return count

    def floats(self, tensor: str) -> list[float]:
        """The values of a small float32 tensor."""
        stored = self.file.tensors[tensor]
        return [float(str(value)) for value in stored.type.decode_rows(self.file.rows(stored)).decode().ravel()]

    def token(self, name: str) -> int | None:
        value = self.file.metadata.get(f"tokenizer.ggml.{name}_token_id")
        return value if isinstance(value, int) else None

    def has(self, tensor: str) -> bool:
        """Whether the first layer has a tensor, `attn_q.bias` say."""
        return f"blk.0.{tensor}" in self.file.tensors

    @property
    def tied(self) -> bool:
        """Whether the head is the embedding."""
        return "output.weight" not in self.file.tensors


def vocabulary(meta: Metadata) -> int:
    """Rows of the embedding."""
    if "token_embd.weight" not in meta.file.tensors:
        raise UserError(f"{meta.file.path.name} lacks the tensor token_embd.weight; it is no language model.")
    return meta.file.tensors["token_embd.weight"].shape[0]


# --- RoPE -------------------------------------------------------------------------------------------------------------


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
        keys = {name: meta.get(f"rope.scaling.yarn_{name}") for name in ("beta_fast", "beta_slow")}
        rope |= {name: value for name, value in keys.items() if value is not None}
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


def _partial(meta: Metadata, config: Config) -> Config:
    """The config with RoPE over the first columns of each head."""
    share = meta.get("rope.dimension_count", config["head_dim"]) / config["head_dim"]
    return config | {"rope_parameters": config["rope_parameters"] | {"partial_rotary_factor": share}}


# --- decoders ---------------------------------------------------------------------------------------------------------


def decoder(meta: Metadata, eps: str = "rms_norm_eps") -> Config:
    """What every decoder with RoPE says. `eps` is the config's name of the norms' epsilon."""
    if meta.get("expert_count", 0):
        raise UserError(
            f"{meta.file.path.name} is a mixture of experts ({shown(meta.architecture)}), not supported yet."
        )
    heads, hidden = meta.need("attention.head_count"), meta.need("embedding_length")
    kind = "rms_" if eps == "rms_norm_eps" else ""
    return {
        "vocab_size": vocabulary(meta),
        "hidden_size": hidden,
        "intermediate_size": meta.need("feed_forward_length"),
        "num_hidden_layers": meta.layers,
        "num_attention_heads": heads,
        "num_key_value_heads": meta.get("attention.head_count_kv", heads),
        "head_dim": meta.get("attention.key_length", hidden // heads),
        "max_position_embeddings": meta.need("context_length"),
        eps: meta.need(f"attention.layer_norm_{kind}epsilon"),
        "tie_word_embeddings": meta.tied,
        "rope_parameters": _rope(meta),
    }


def biased(meta: Metadata) -> Config:
    """A decoder whose projections may have biases."""
    return decoder(meta) | {"attention_bias": meta.has("attn_q.bias"), "mlp_bias": meta.has("ffn_up.bias")}


def layer_norm(meta: Metadata) -> Config:
    """A decoder with layer norms, whose projections may have biases."""
    biases = {"attention_bias": meta.has("attn_q.bias"), "mlp_bias": meta.has("ffn_up.bias")}
    return decoder(meta, "layer_norm_eps") | biases


def gemma(meta: Metadata, large: int) -> Config:
    """gemma2 and gemma3. Only the 27B models, of `large` layers, scale queries by something else than the head size."""
    config = decoder(meta)
    scalar = config["head_dim"]
    if config["num_hidden_layers"] == large:
        scalar = config["hidden_size"] // config["num_attention_heads"]
    return config | {
        "query_pre_attn_scalar": scalar,
        "sliding_window": meta.need("attention.sliding_window"),
        "attn_logit_softcapping": meta.get("attn_logit_softcapping"),
        "final_logit_softcapping": meta.get("final_logit_softcapping"),
    }


def gemma3(meta: Metadata) -> Config:
    """Layers with a window have a RoPE base of their own and no scaling."""
    config = gemma(meta, large=62)
    local = {"rope_type": "default", "rope_theta": meta.get("rope.freq_base_swa", 10000.0)}
    return config | {
        "rope_parameters": {"full_attention": config["rope_parameters"], "sliding_attention": local},
    }


def phi2(meta: Metadata) -> Config:
    """Phi-1 to Phi-2."""
    return _partial(meta, decoder(meta, "layer_norm_eps"))


def phi3(meta: Metadata) -> Config:
    """Phi-3 and Phi-4; a window of 0 is none."""
    config = _partial(meta, decoder(meta))
    original = config["rope_parameters"].get("original_max_position_embeddings", config["max_position_embeddings"])
    window = meta.get("attention.sliding_window") or None
    return config | {"original_max_position_embeddings": original, "sliding_window": window}


def gpt2(meta: Metadata) -> Config:
    """Learned positions, layer norms."""
    return {
        "vocab_size": vocabulary(meta),
        "n_positions": meta.need("context_length"),
        "n_embd": meta.need("embedding_length"),
        "n_layer": meta.layers,
        "n_head": meta.need("attention.head_count"),
        "n_inner": meta.need("feed_forward_length"),
        "layer_norm_epsilon": meta.need("attention.layer_norm_epsilon"),
        "tie_word_embeddings": meta.tied,
    }


def starcoder(meta: Metadata) -> Config:
    """gpt2 with one head of keys and values."""
    return gpt2(meta) | {"multi_query": meta.get("attention.head_count_kv") == 1}


def starcoder2(meta: Metadata) -> Config:
    """The file does not say that 15B has a window, and llama.cpp has none."""
    return decoder(meta, "norm_epsilon") | {"use_bias": meta.has("attn_q.bias"), "sliding_window": None}


def gpt_neox(meta: Metadata) -> Config:
    """GPT-NeoX and Pythia."""
    return _partial(meta, decoder(meta, "layer_norm_eps")) | {
        "use_parallel_residual": bool(meta.get("use_parallel_residual", True)),
        "attention_bias": meta.has("attn_qkv.bias"),
    }


def falcon(meta: Metadata) -> Config:
    """Falcon with rotary positions; more than one head of keys, or a second norm, is the newer decoder."""
    config = decoder(meta, "layer_norm_epsilon")
    heads, groups = config["num_attention_heads"], config["num_key_value_heads"]
    renamed = {"ffn_hidden_size": config.pop("intermediate_size"), "num_kv_heads": config.pop("num_key_value_heads")}
    config.pop("head_dim")
    return (
        config
        | renamed
        | {
            "multi_query": groups == 1,
            "new_decoder_architecture": 1 < groups < heads or meta.has("attn_norm_2.weight"),
            "num_ln_in_parallel_attn": 2 if meta.has("attn_norm_2.weight") else 1,
            "bias": meta.has("attn_qkv.bias"),
        }
    )


def stablelm(meta: Metadata) -> Config:
    """Layers without a second norm are parallel."""
    return _partial(meta, decoder(meta, "layer_norm_eps")) | {
        "use_parallel_residual": not meta.has("ffn_norm.weight"),
        "use_qkv_bias": meta.has("attn_q.bias"),
        "qk_layernorm": meta.has("attn_q_norm.weight"),
    }


def nemotron(meta: Metadata) -> Config:
    """Nemotron-3, Nemotron-4 and Minitron."""
    config = _partial(meta, layer_norm(meta))
    return config | {"norm_eps": config.pop("layer_norm_eps")}


def cohere(meta: Metadata) -> Config:
    """Command R."""
    return layer_norm(meta) | {"logit_scale": meta.need("logit_scale"), "use_qk_norm": meta.has("attn_q_norm.weight")}


def cohere2(meta: Metadata) -> Config:
    """Command R7B and Command A: every fourth layer sees everything."""
    return cohere(meta) | {"sliding_window": meta.need("attention.sliding_window")}


def granite(meta: Metadata) -> Config:
    """Granite, and MiniCPM which has the same factors."""
    config = biased(meta)
    return config | {
        "attention_multiplier": meta.get("attention.scale", config["head_dim"] ** -0.5),
        "embedding_multiplier": meta.get("embedding_scale", 1.0),
        "residual_multiplier": meta.get("residual_scale", 1.0),
        "logits_scaling": meta.get("logit_scale", 1.0),
    }


def olmo(meta: Metadata) -> Config:
    """OLMo: norms without weights."""
    return decoder(meta, "layer_norm_eps") | {"clip_qkv": meta.get("attention.clamp_kqv")}


def windowed(meta: Metadata) -> Config:
    """A decoder in which the file says which layers have a window: OLMo 3, EXAONE 4."""
    config = decoder(meta)
    window = meta.get("attention.sliding_window")
    if not window:
        return config | {"sliding_window": None, "layer_types": ["full_attention"] * config["num_hidden_layers"]}
    pattern = meta.get("attention.sliding_window_pattern", 4)
    count = config["num_hidden_layers"]
    if isinstance(pattern, bool | np.bool_):
        local = [bool(pattern)] * count
    elif isinstance(pattern, int) and pattern > 0:
        local = [(layer + 1) % pattern != 0 for layer in range(count)]
    else:
        local = [bool(layer) for layer in np.atleast_1d(pattern)]
    types = ["sliding_attention" if each else "full_attention" for each in local]
    return config | {"sliding_window": window, "layer_types": types}


def glm(meta: Metadata) -> Config:
    """GLM-4."""
    return _partial(meta, decoder(meta)) | {"attention_bias": meta.has("attn_q.bias") or meta.has("attn_qkv.bias")}


def seed_oss(meta: Metadata) -> Config:
    """Seed-OSS."""
    return biased(meta) | {"attention_out_bias": meta.has("attn_output.bias")}


def ernie(meta: Metadata) -> Config:
    """ERNIE 4.5, dense."""
    return decoder(meta) | {"use_bias": meta.has("attn_q.bias")}


def ministral3(meta: Metadata) -> Config:
    """Ministral 3: queries grow with their position. What YaRN scales cancels itself if its logarithm has a factor."""
    config = decoder(meta)
    extra: Config = {}
    if (multiplier := meta.get("rope.scaling.yarn_log_multiplier")) is not None:
        extra |= {"mscale": multiplier, "mscale_all_dim": multiplier}
    if (beta := meta.get("attention.temperature_scale")) is not None:
        extra |= {"llama_4_scaling_beta": beta}
    return config | {"rope_parameters": config["rope_parameters"] | extra}
