"""CPU kernel families other than matrix products: norms, rotary embedding, attention, pointwise work and sampling."""

from __future__ import annotations

from ..catalog import Family

FAMILIES: tuple[Family, ...] = ()
