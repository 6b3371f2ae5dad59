"""Tiny GGUF files from Hugging Face models, written as the community's converter does, with the gguf package."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt

Q8_0 = gguf.GGMLQuantizationType.Q8_0
ARCHS = {"gemma3_text": "gemma3"}
"""Hugging Face model type to GGUF architecture, where they differ."""


def write_gguf(model: Any, path: Path, *, quantize: bool = False, extra: dict[str, Any] | None = None) -> None:
    """Write a model's weights and hyperparameters; with `quantize`, matrices are Q8_0. `extra` are float32 tensors."""
    config = model.config
    arch = ARCHS.get(config.model_type, config.model_type)
    writer = gguf.GGUFWriter(path, arch)
    _hyperparameters(writer, config, arch)
    names = gguf.get_tensor_name_map(
        next(kind for kind, name in gguf.MODEL_ARCH_NAMES.items() if name == arch), config.num_hidden_layers
    )
    tied = config.tie_word_embeddings
    for name, parameter in model.state_dict().items():
        if name == "lm_head.weight" and tied:
            continue
        stem, suffix = name.rsplit(".", 1)
        array = _converted(name, parameter.float().numpy(), config, arch)
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


def _converted(name: str, array: npt.NDArray[np.float32], config: Any, arch: str) -> npt.NDArray[np.float32]:
    """What the converter does to a tensor."""
    if arch == "llama" and ".q_proj." in name:
        array = interleave(array, config.num_attention_heads)
    if arch == "llama" and ".k_proj." in name:
        array = interleave(array, config.num_key_value_heads)
    if arch.startswith("gemma") and name.endswith("norm.weight"):
        array = array + np.float32(1)
    if arch == "gpt2" and name.endswith(("c_attn.weight", "c_proj.weight", "c_fc.weight")):
        array = array.T
    return np.ascontiguousarray(array)


def interleave(array: npt.NDArray[np.float32], heads: int) -> npt.NDArray[np.float32]:
    """Rows of each head from halves to pairs."""
    split = array.reshape(heads, 2, array.shape[0] // heads // 2, *array.shape[1:])
    return split.swapaxes(1, 2).reshape(array.shape)


def _hyperparameters(writer: Any, config: Any, arch: str) -> None:
    writer.add_vocab_size(config.vocab_size)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_head_count(config.num_attention_heads)
    if arch == "gpt2":
        writer.add_feed_forward_length(4 * config.hidden_size)
        writer.add_layer_norm_eps(config.layer_norm_epsilon)
        return
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    rope = config.rope_parameters.get("full_attention", config.rope_parameters)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_rope_dimension_count(int(head_dim * rope.get("partial_rotary_factor", 1.0)))
    if getattr(config, "sliding_window", None) and arch in ("gemma2", "gemma3", "phi3"):
        writer.add_sliding_window(config.sliding_window)
    if getattr(config, "attn_logit_softcapping", None):
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
    if getattr(config, "final_logit_softcapping", None):
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    if rope["rope_type"] in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(rope["rope_type"]))
        writer.add_rope_scaling_factor(rope["factor"])
    if "original_max_position_embeddings" in rope:
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
