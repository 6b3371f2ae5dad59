"""What a user can choose when a plan is run."""

from __future__ import annotations

import msgspec


class EngineOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Engine options; zero means "as the plan and the machine allow"."""

    memory: float = 0.9
    """Up to 1: the share of available memory this process may use in all; above 1: bytes."""
    max_num_seqs: int = 0
    """Most requests running at once; at most the plan's `max_batch`."""
    max_batched_tokens: int = 0
    """Token budget of a step; at most the largest bucket's."""
    threads: int = 0
    """Kernel threads; 0 is one a core that this process may use, cgroup limits included."""
    prefix_cache: bool = True
    verify: bool = True
    """Hash weight files and libraries when loading."""
