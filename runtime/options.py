"""What a user can choose when a plan is run."""

from __future__ import annotations

import re

import msgspec

from .errors import UserError

_UNITS = {"KB": 1e3, "MB": 1e6, "GB": 1e9, "KiB": 2.0**10, "MiB": 2.0**20, "GiB": 2.0**30}


class EngineOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Engine options; zero means "as the plan and the machine allow"."""

    memory: float = 0.9
    """Up to 1: the share of available memory this process may use in all; above 1: bytes."""
    max_num_seqs: int = 0
    """Most requests running at once; at most the plan's `max_batch`."""
    max_batched_tokens: int = 0
    """Token budget of a step; at most the largest bucket's."""
    threads: int = 0
    """Kernel threads; 0 is one a physical core that this process may use, within the CPU quota of its cgroups."""
    prefix_cache: bool = True
    verify: bool = True
    """Hash weight files and libraries when loading."""


def parse_memory(text: str) -> float:
    """`EngineOptions.memory` as users write it: a share such as `0.9`, or an amount such as `8GiB` or `500MB`.

    Raises UserError if it is neither.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?) ?([KMG]i?B)?", text.strip())
    amount = float(match[1]) * _UNITS[match[2]] if match and match[2] else float(match[1]) if match else 0.0
    if match and ((match[2] and amount >= 1) or 0 < amount <= 1):
        return amount
    raise UserError(f"memory must be a share of it up to 1, such as 0.9, or an amount such as 8GiB, not {text!r}")
