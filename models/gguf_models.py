"""GGUF architectures: for each, the Hugging Face config its metadata means and where each tensor belongs.

The converter that writes these files changes some tensors. `Architecture` says which changes to undo: rows in another
order (Q and K of llama, fused Q, K and V of falcon), 1 added to norm weights (gemma), linear weights transposed (gpt2).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from ..runtime.errors import UserError, shown
from . import gguf_config as configs
from .gguf_config import Config, Metadata
from .gguf_file import GGUFFile

Rows = npt.NDArray[np.intp]


@dataclass(frozen=True)
class Heads:
    """Head counts of a model, for the order of rows."""

    query: int
    key: int

    @staticmethod
    def of(config: Any) -> Heads:
        """From a Hugging Face config."""
        query = config.num_attention_heads
        counts = (getattr(config, name, None) for name in ("num_kv_heads", "num_key_value_heads"))
        return Heads(query, next(filter(None, counts), query))

    def parts(self, rows: int) -> list[Rows]:
        """Where queries, keys and values are in that many rows of all three."""
        size = rows // (self.query + 2 * self.key)
        cuts = size * np.array([self.query, self.query + self.key])
        return np.split(np.arange(rows), cuts)


Order = Callable[[Heads, int], Rows]
"""For heads and a number of rows, the stored row of each row of the model."""


def _halves(rows: int, heads: int) -> Rows:
    """Rows of each head are stored in the order 0, D/2, 1, D/2 + 1, ...: row t * D/2 + i is stored as 2 * i + t."""
    size = rows // heads
    head, row = np.divmod(np.arange(rows), size)
    half, index = np.divmod(row, size // 2)
    return np.asarray(head * size + 2 * index + half)


def _grouped(heads: Heads, rows: int) -> Rows:
    """Stored are all queries, then all keys, all values; the model has for each key its queries, itself, its value."""
    total = heads.query + 2 * heads.key
    queries = np.arange(heads.query).reshape(heads.key, -1)
    keys = heads.query + np.arange(heads.key)[:, None]
    order = np.concatenate([queries, keys, keys + heads.key], axis=1).reshape(-1, 1)
    return np.asarray((order * (rows // total) + np.arange(rows // total)).reshape(-1))


LLAMA_ORDER: Mapping[str, Order] = {
    "q_proj": lambda heads, rows: _halves(rows, heads.query),
    "k_proj": lambda heads, rows: _halves(rows, heads.key),
}
FUSED_ORDER: Mapping[str, Order] = {"query_key_value": _grouped}


@dataclass(frozen=True)
class Architecture:
    """One GGUF architecture. `names` maps a tensor's name without `blk.N.` and suffix to its module in the model."""

    model_type: str
    config: Callable[[Metadata], Config]
    names: Mapping[str, str]
    order: Mapping[str, Order] = field(default_factory=dict)
    """By module."""
    norm_offset: bool = False
    """Norm weights are stored plus 1."""
    transposed: tuple[str, ...] = ()
    """Modules whose weight the model has as [in, out]."""
    by_head: str = ""
    """Last part of the name of modules that have a vector for each head, which is a row in the file: `norms.I`."""
    parts: tuple[str, ...] = ()
    """Modules that the file has as one: rows of Q, K and V, one behind the other, under the name of the first."""

    def place(self, name: str) -> str | None:
        """The model's name of a tensor, or None if it is no parameter. A tensor of several modules has the first's."""
        match = re.fullmatch(r"(?:blk\.(\d+)\.)?(.+)\.(weight|bias)", name)
        if match is None or match[2] not in self.names:
            return None
        module = self.names[match[2]]
        return f"{module.format(match[1])}.{match[3]}" if ("{}" in module) == (match[1] is not None) else None


# --- names ------------------------------------------------------------------------------------------------------------

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
_GATE_UP = {"ffn_up": _LAYER + "mlp.gate_up_proj", "ffn_down": _LAYER + "mlp.down_proj"}
_PHI3 = {
    **_OUTER,
    **_PRE_NORM,
    **_GATE_UP,
    "attn_qkv": _LAYER + "self_attn.qkv_proj",
    "attn_output": _LAYER + "self_attn.o_proj",
}
_PHI2 = {
    **_OUTER,
    **_ATTENTION,
    "output_norm": "model.final_layernorm",
    "attn_norm": _LAYER + "input_layernorm",
    "attn_output": _LAYER + "self_attn.dense",
    "ffn_up": _LAYER + "mlp.fc1",
    "ffn_down": _LAYER + "mlp.fc2",
}
_STABLELM = {
    **_LLAMA,
    "attn_q_norm": _LAYER + "self_attn.q_layernorm.norms",
    "attn_k_norm": _LAYER + "self_attn.k_layernorm.norms",
}
_STARCODER2 = {**_LLAMA, "ffn_up": _LAYER + "mlp.c_fc", "ffn_down": _LAYER + "mlp.c_proj"}
_HUNYUAN = {
    **_LLAMA,
    "attn_q_norm": _LAYER + "self_attn.query_layernorm",
    "attn_k_norm": _LAYER + "self_attn.key_layernorm",
}
_GLM4_NORM = {
    "post_attention_norm": _LAYER + "post_self_attn_layernorm",
    "post_ffw_norm": _LAYER + "post_mlp_layernorm",
}
_GLM = {**_OUTER, **_ATTENTION, **_GATE_UP, **_PRE_NORM}
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
_NEOX_LAYER = "gpt_neox.layers.{}."
_GPT_NEOX = {
    "token_embd": "gpt_neox.embed_in",
    "output_norm": "gpt_neox.final_layer_norm",
    "output": "lm_head",
    "attn_norm": _NEOX_LAYER + "input_layernorm",
    "ffn_norm": _NEOX_LAYER + "post_attention_layernorm",
    "attn_qkv": _NEOX_LAYER + "attention.query_key_value",
    "attn_output": _NEOX_LAYER + "attention.dense",
    "ffn_up": _NEOX_LAYER + "mlp.dense_h_to_4h",
    "ffn_down": _NEOX_LAYER + "mlp.dense_4h_to_h",
}
_FALCON = {
    "token_embd": "transformer.word_embeddings",
    "output_norm": "transformer.ln_f",
    "output": "lm_head",
    "attn_norm": _BLOCK + "input_layernorm",
    "attn_qkv": _BLOCK + "self_attention.query_key_value",
    "attn_output": _BLOCK + "self_attention.dense",
    "ffn_up": _BLOCK + "mlp.dense_h_to_4h",
    "ffn_down": _BLOCK + "mlp.dense_4h_to_h",
}
_FALCON_TWO_NORMS = {**_FALCON, "attn_norm": _BLOCK + "ln_mlp", "attn_norm_2": _BLOCK + "ln_attn"}

# --- the table --------------------------------------------------------------------------------------------------------

_LLAMA_LIKE = Architecture("llama", configs.biased, _LLAMA, LLAMA_ORDER)
_OLMO2_NAMES = {**_OUTER, **_ATTENTION, **_QK_NORM, **_MLP, **_POST_NORM}
ARCHITECTURES: dict[str, Architecture] = {
    "llama": _LLAMA_LIKE,
    "internlm2": _LLAMA_LIKE,
    "exaone": Architecture("llama", configs.biased, _LLAMA),
    "mistral3": Architecture("ministral3", configs.ministral3, _LLAMA, LLAMA_ORDER),
    "smollm3": Architecture("smollm3", configs.biased, _LLAMA, LLAMA_ORDER),
    "arcee": Architecture("arcee", configs.biased, _LLAMA, LLAMA_ORDER),
    "granite": Architecture("granite", configs.granite, _LLAMA, LLAMA_ORDER),
    "minicpm": Architecture("granite", configs.granite, _LLAMA, LLAMA_ORDER),
    "olmo": Architecture("olmo", configs.olmo, _LLAMA, LLAMA_ORDER),
    "olmo2": Architecture("olmo2", configs.decoder, _OLMO2_NAMES),
    "olmo3": Architecture("olmo3", configs.windowed, _OLMO2_NAMES),
    "qwen2": Architecture("qwen2", configs.decoder, _LLAMA),
    "qwen3": Architecture("qwen3", configs.decoder, {**_LLAMA, **_QK_NORM}),
    "exaone4": Architecture("exaone4", configs.windowed, _OLMO2_NAMES),
    "seed_oss": Architecture(
        "seed_oss",
        configs.seed_oss,
        {**_LLAMA, "post_attention_norm": _LAYER + "post_attention_layernorm"},
    ),
    "hunyuan-dense": Architecture("hunyuan_v1_dense", configs.biased, _HUNYUAN),
    "ernie4_5": Architecture("ernie4_5", configs.ernie, _LLAMA),
    "glm4": Architecture("glm4", configs.glm, {**_GLM, **_GLM4_NORM}),
    "chatglm": Architecture(
        "glm",
        configs.glm,
        {**_GLM, "attn_qkv": _LAYER + "self_attn.q_proj"},
        parts=("q_proj", "k_proj", "v_proj"),
    ),
    "command-r": Architecture("cohere", configs.cohere, {**_LLAMA, **_QK_NORM}),
    "cohere2": Architecture("cohere2", configs.cohere2, _LLAMA),
    "stablelm": Architecture("stablelm", configs.stablelm, _STABLELM, by_head="norms"),
    "starcoder2": Architecture("starcoder2", configs.starcoder2, _STARCODER2),
    "nemotron": Architecture("nemotron", configs.nemotron, _LLAMA, norm_offset=True),
    "jais2": Architecture("jais2", configs.layer_norm, _LLAMA),
    "phi2": Architecture(
        "phi",
        configs.phi2,
        {**_PHI2, "attn_qkv": _LAYER + "self_attn.q_proj"},
        parts=("q_proj", "k_proj", "v_proj"),
    ),
    "phi3": Architecture("phi3", configs.phi3, _PHI3),
    "gemma": Architecture("gemma", configs.decoder, _LLAMA, norm_offset=True),
    "gemma2": Architecture(
        "gemma2",
        partial(configs.gemma, large=46),
        {**_OUTER, **_ATTENTION, **_MLP, **_GEMMA_NORM},
        norm_offset=True,
    ),
    "gemma3": Architecture(
        "gemma3_text", configs.gemma3, {**_OUTER, **_ATTENTION, **_QK_NORM, **_MLP, **_GEMMA_NORM}, norm_offset=True
    ),
    "gpt2": Architecture("gpt2", configs.gpt2, _GPT2, transposed=("c_attn", "c_proj", "c_fc")),
    "starcoder": Architecture("gpt_bigcode", configs.starcoder, _GPT2),
    "gptneox": Architecture("gpt_neox", configs.gpt_neox, _GPT_NEOX, FUSED_ORDER),
    "falcon": Architecture("falcon", configs.falcon, _FALCON, FUSED_ORDER),
    "falcon with two norms": Architecture("falcon", configs.falcon, _FALCON_TWO_NORMS, FUSED_ORDER),
}
"""By `general.architecture`. Mistral files are of architecture llama, and OLMo 3 files of olmo2."""


def architecture(file: GGUFFile) -> Architecture:
    """The architecture of a file. Raises UserError for one that is not supported."""
    name = file.metadata.get("general.architecture")
    if name == "olmo2" and "olmo2.attention.sliding_window" in file.metadata:
        name = "olmo3"
    if name == "falcon" and "blk.0.attn_norm_2.weight" in file.tensors:
        name = "falcon with two norms"
    if name not in ARCHITECTURES:
        known = ", ".join(name for name in ARCHITECTURES if " " not in name)
        raise UserError(
            f"{file.path.name} is of architecture {shown(name)}; GGUF files of {known} can be compiled, for others "
            "give the Hugging Face directory."
        )
    return ARCHITECTURES[name]


def config_values(file: GGUFFile) -> Config:
    """The keyword arguments of the model's Hugging Face config."""
    meta = Metadata(file)
    ids = {f"{name}_token_id": meta.token(key) for name, key in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"))}
    return architecture(file).config(meta) | ids
