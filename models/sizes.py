"""Sizes in a model's configuration that can't be right."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..runtime.errors import UserError, shown

LARGEST = {
    **dict.fromkeys(("num_hidden_layers", "num_layers", "n_layer", "n_layers"), 10_000),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx"), 1 << 30),
    "vocab_size": 1 << 26,
    **dict.fromkeys(("hidden_size", "n_embd"), 1 << 20),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "ffn_hidden_size", "n_inner"), 1 << 24),
    **dict.fromkeys(("num_attention_heads", "num_key_value_heads", "n_head", "head_dim"), 1 << 16),
    **dict.fromkeys(("partial_rotary_factor", "rotary_pct"), 1),
}
"""Far beyond any model, but small enough that one can be described without weights."""


def check_sizes(values: Mapping[str, Any], origin: str) -> None:
    """Refuse numbers of a configuration, and of those inside it, with which transformers would not come to an end."""
    pending = [values]
    while pending:
        for name, value in pending.pop().items():
            if isinstance(value, Mapping):
                pending.append(value)
            elif isinstance(value, int | float) and name in LARGEST and not 0 <= value <= LARGEST[name]:
                raise UserError(f"{origin} says that {name} is {shown(value)}, which no model has; correct it.")
