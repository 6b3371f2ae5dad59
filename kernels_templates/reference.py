"""The numpy meaning of kernels that are no IR op: the paged cache, attention over it, and sampling.

A *page* of one layer holds `page_tokens` tokens, a multiple of 16, in the layout "kv-head-major":

    keys    [kv_heads][page_tokens / 16][key_dim][16]     a panel of 16 tokens, column by column
    values  [kv_heads][page_tokens][value_dim]

Keys lie column by column so that 16 scores are computed together, without sums across a vector. Token t of a page is
lane t % 16 of panel t / 16. A slot is `page * page_tokens + t`; page 0 is the trash page, which is never read.
"""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
KvDType = Literal["float32", "float16", "bfloat16"]

PANEL = 16
"""Tokens of a panel of keys."""

_STORAGE: dict[KvDType, np.dtype[Any]] = {
    "float32": np.dtype(np.float32),
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(np.uint16),
}


def page_bytes(heads: int, key_dim: int, value_dim: int, page_tokens: int, dtype: KvDType) -> int:
    """Bytes of a page of one layer. Raises ValueError unless `page_tokens` is a multiple of 16."""
    if page_tokens <= 0 or page_tokens % PANEL:
        raise ValueError(f"page_tokens must be a multiple of {PANEL}, found {page_tokens}")
    return heads * page_tokens * (key_dim + value_dim) * _STORAGE[dtype].itemsize
