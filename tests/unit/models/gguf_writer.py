"""Tiny GGUF files from Hugging Face models, written as the community's converter does, with the gguf package."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt

Q8_0 = gguf.GGMLQuantizationType.Q8_0
Float32 = npt.NDArray[np.float32]
ARCHS = {
    "gemma3_text": "gemma3",
    "phi": "phi2",
    "gpt_neox": "gptneox",
    "gpt_bigcode": "starcoder",
    "cohere": "command-r",
    "hunyuan_v1_dense": "hunyuan-dense",
    "ministral3": "mistral3",
    "olmo3": "olmo2",
    "glm": "chatglm",
}
"""Hugging Face model type to GGUF architecture, where they differ."""
PERMUTED = ("llama", "internlm2", "granite", "minicpm", "olmo", "arcee", "smollm3", "mistral3")
"""Architectures whose queries and keys the converter interleaves."""


def write_gguf(
    model: Any, path: Path, *, arch: str = "", quantize: bool = False, extra: dict[str, Any] | None = None
) -> None:
    """Write a model's weights and hyperparameters; with `quantize`, matrices are Q8_0. `extra` are float32 tensors."""
    config = model.config
    arch = arch or ARCHS.get(config.model_type, config.model_type)
    writer = gguf.GGUFWriter(path, arch)
    _hyperparameters(writer, config, arch)
    names = gguf.get_tensor_name_map(
        next(kind for kind, name in gguf.MODEL_ARCH_NAMES.items() if name == arch), config.num_hidden_layers
    )
    for name, array in _tensors(model, arch).items():
        stem, suffix = name.rsplit(".", 1)
        stored = f"{names.get_name(stem)}.{suffix}"
        if quantize and array.ndim == 2:
            writer.add_tensor(stored, gguf.quants.quantize(array, Q8_0), raw_dtype=Q8_0)
        else:
            writer.add_tensor(stored, array)
    for name, values in (extra or {}).items():
        writer.add_tensor(name, np.asarray(values, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


# --- tensors ----------------------------------------------------------------------------------------------------------


def _tensors(model: Any, arch: str) -> dict[str, Float32]:
    """Everything to be written, under Hugging Face names."""
    config = model.config
    found = {name: value.float().numpy() for name, value in model.state_dict().items()}
    if config.tie_word_embeddings:
        found.pop("lm_head.weight")
    if arch == "stablelm":
        found = _stacked_norms(found, config.num_hidden_layers)
    if arch == "chatglm":
        found = _fused(found, config.num_hidden_layers)
    return {name: _converted(name, array, config, arch) for name, array in found.items()}


def _stacked_norms(found: dict[str, Float32], layers: int) -> dict[str, Float32]:
    """One matrix for the norms of all heads."""
    for layer in range(layers):
        for kind in "qk":
            stem = f"model.layers.{layer}.self_attn.{kind}_layernorm"
            rows = [found.pop(name) for name in list(found) if name.startswith(stem + ".norms.")]
            if rows:
                found[f"{stem}.weight"] = np.stack(rows)
    return found


def _fused(found: dict[str, Float32], layers: int) -> dict[str, Float32]:
    """Queries, keys and values as one, under the names of the original ChatGLM."""
    for layer in range(layers):
        for suffix in ("weight", "bias"):
            parts = [found.pop(f"model.layers.{layer}.self_attn.{kind}_proj.{suffix}") for kind in "qkv"]
            found[f"encoder.layers.{layer}.self_attention.query_key_value.{suffix}"] = np.concatenate(parts)
    return found


def _converted(name: str, array: Float32, config: Any, arch: str) -> Float32:
    """What the converter does to a tensor."""
    if arch in PERMUTED and re.search(r"\.[qk]_proj\.", name):
        query = ".q_proj." in name
        array = interleave(array, config.num_attention_heads if query else config.num_key_value_heads)
    if arch in ("gptneox", "falcon") and "query_key_value" in name:
        array = _queries_keys_values(array, config)
    if arch in ("gemma", "gemma2", "gemma3", "nemotron") and name.endswith("norm.weight"):
        array = array + np.float32(1)
    if arch == "gpt2" and name.endswith(("c_attn.weight", "c_proj.weight", "c_fc.weight")):
        array = array.T
    return np.ascontiguousarray(array)


def interleave(array: Float32, heads: int) -> Float32:
    """Rows of each head from halves to pairs."""
    split = array.reshape(heads, 2, array.shape[0] // heads // 2, *array.shape[1:])
    return split.swapaxes(1, 2).reshape(array.shape)


def _queries_keys_values(array: Float32, config: Any) -> Float32:
    """From the queries of a group, its key and its value, group by group, to all queries, all keys, all values."""
    heads = config.num_attention_heads
    groups = getattr(config, "num_kv_heads", heads)
    if config.model_type == "falcon" and not config.new_decoder_architecture and config.multi_query:
        groups = 1
    split = array.reshape(groups, heads // groups + 2, config.hidden_size // heads, *array.shape[1:])
    parts = split[:, :-2], split[:, [-2]], split[:, [-1]]
    return np.concatenate([part.reshape(-1, *array.shape[1:]) for part in parts])


# --- hyperparameters --------------------------------------------------------------------------------------------------


def _hyperparameters(writer: Any, config: Any, arch: str) -> None:
    writer.add_vocab_size(config.vocab_size)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_head_count(config.num_attention_heads)
    if arch in ("gpt2", "starcoder"):
        writer.add_feed_forward_length(4 * config.hidden_size)
        writer.add_layer_norm_eps(config.layer_norm_epsilon)
        if arch == "starcoder":
            writer.add_head_count_kv(1)
        return
    writer.add_feed_forward_length(getattr(config, "ffn_hidden_size", None) or config.intermediate_size)
    _attention(writer, config, arch)
    _scales(writer, config)
    _rotation(writer, config, arch)
    if arch in ("gptneox", "stablelm"):
        writer.add_parallel_residual(config.use_parallel_residual)


def _attention(writer: Any, config: Any, arch: str) -> None:
    if arch == "falcon":
        writer.add_head_count_kv(config.num_kv_heads if config.new_decoder_architecture else 1)
    elif arch != "gptneox":
        writer.add_head_count_kv(config.num_key_value_heads)
    if getattr(config, "head_dim", None) and arch != "falcon":
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)
    epsilons = ("layer_norm_eps", "layer_norm_epsilon", "norm_epsilon", "norm_eps")
    eps = next((getattr(config, name) for name in epsilons if hasattr(config, name)), 1e-5)
    writer.add_layer_norm_eps(eps)
    if hasattr(config, "rms_norm_eps"):
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    window = getattr(config, "sliding_window", None)
    if window and arch in ("gemma2", "gemma3", "phi3", "cohere2", "exaone4", "olmo2"):
        writer.add_sliding_window(window)
    if window and arch in ("exaone4", "olmo2"):
        writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in config.layer_types])
    if getattr(config, "clip_qkv", None):
        writer.add_clamp_kqv(config.clip_qkv)


def _scales(writer: Any, config: Any) -> None:
    adders = {
        "attn_logit_softcapping": writer.add_attn_logit_softcapping,
        "final_logit_softcapping": writer.add_final_logit_softcapping,
        "logit_scale": writer.add_logit_scale,
        "logits_scaling": writer.add_logit_scale,
        "attention_multiplier": writer.add_attention_scale,
        "embedding_multiplier": writer.add_embedding_scale,
        "residual_multiplier": writer.add_residual_scale,
    }
    for name, add in adders.items():
        if getattr(config, name, None):
            add(getattr(config, name))


def _rotation(writer: Any, config: Any, arch: str) -> None:
    rope = config.rope_parameters
    rope = rope.get("full_attention", rope)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    if arch == "hunyuan-dense" and rope["rope_type"] == "dynamic":
        writer.add_rope_freq_base(rope["rope_theta"] * rope["alpha"] ** (head_dim / (head_dim - 2)))
        writer.add_rope_scaling_type(gguf.RopeScalingType.NONE)
        writer.add_rope_scaling_factor(1)
        return
    if arch != "phi2":
        writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_rope_dimension_count(int(head_dim * rope.get("partial_rotary_factor", 1.0)))
    if rope["rope_type"] in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(rope["rope_type"]))
        writer.add_rope_scaling_factor(rope["factor"])
    if "original_max_position_embeddings" in rope:
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    if arch == "mistral3":
        writer.add_rope_scaling_yarn_log_mul(rope["mscale_all_dim"])
        writer.add_attn_temperature_scale(rope["llama_4_scaling_beta"])
