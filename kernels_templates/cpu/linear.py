"""CPU kernel families that read packed weights: linear layers, embeddings and activation quantization."""

from __future__ import annotations

from ..catalog import Family

FAMILIES: tuple[Family, ...] = ()
