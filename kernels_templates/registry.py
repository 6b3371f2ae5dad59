"""All kernel families by name."""

from __future__ import annotations

from .catalog import Family
from .cpu import dense, linear

FAMILIES: dict[str, Family] = {family.name: family for family in (*dense.FAMILIES, *linear.FAMILIES)}
