"""The architectures that are proved to compute what their Hugging Face implementations do.

Capture knows no architecture: whatever is made of known parts is captured. The table is data, `tested.json`, written by
the tests from what they find.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

TESTED_FILE = Path(__file__).with_name("tested.json")
PROOFS = ("packed", "chunked", "stepwise", "bfloat16", "onnx")
"""What can be proved of a configuration: that its plan equals Hugging Face for several prompts in a step, for a prompt
in pieces, and token by token; that in bfloat16 it does too; and that its ONNX twin does."""


@dataclass(frozen=True)
class Architecture:
    """A model type, and what is proved of it by one of its tested configurations and refuted by none."""

    model_type: str
    """As in config.json."""
    names: str
    """Models that have it."""
    proved: tuple[str, ...]
    rope: tuple[str, ...]
    """Kinds of RoPE scaling, by the names of transformers."""
    features: tuple[str, ...]
    """What one configuration or another has beyond the plain decoder."""


def architectures() -> tuple[Architecture, ...]:
    """Every tested model type."""
    return tuple(
        Architecture(
            kind,
            row["names"],
            tuple(proof for proof in _union(row["cases"], "proved") if proof not in _union(row["cases"], "failed")),
            _union(row["cases"], "rope"),
            _union(row["cases"], "features"),
        )
        for kind, row in json.loads(TESTED_FILE.read_text()).items()
    )


def _union(cases: Mapping[str, Mapping[str, Sequence[str]]], column: str) -> tuple[str, ...]:
    """Each item of a column once, in order of first appearance."""
    return tuple(dict.fromkeys(item for case in cases.values() for item in case[column]))
