"""What a user can choose when a plan is run."""

from __future__ import annotations

import re
from typing import Literal

import msgspec

from .errors import UserError

_UNITS = {"KB": 1e3, "MB": 1e6, "GB": 1e9, "KiB": 2.0**10, "MiB": 2.0**20, "GiB": 2.0**30}


class SpeculativeConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How tokens are guessed that a step then verifies; names and defaults are vLLM's."""

    method: Literal["ngram", "suffix"]
    num_speculative_tokens: int | None = None
    """Most guessed tokens of a sequence in a step; `suffix` may leave it out for the depth of its tree."""
    prompt_lookup_max: int | None = None
    """Tokens of the longest n-gram that is looked up, and of the shortest; one alone stands for both, else it is 5."""
    prompt_lookup_min: int | None = None
    suffix_decoding_max_tree_depth: int = 24
    """Tokens of the longest match that is told from longer ones."""
    suffix_decoding_max_cached_requests: int = 10_000
    """Requests whose outputs are remembered for others."""
    suffix_decoding_max_spec_factor: float = 1.0
    """Most guessed tokens for each matching one."""
    suffix_decoding_min_token_prob: float = 0.1
    """Share of the places with the longest match that a guess must follow."""
    adaptive: bool = True
    """Verify only as many tokens as pay, by measurement; else always as many as there are."""

    def __post_init__(self) -> None:
        checks = (
            (self.method == "suffix" or self.num_speculative_tokens is not None, "num_speculative_tokens is required"),
            (1 <= self.most <= 64, f"num_speculative_tokens must be 1 to 64, not {self.most}"),
            (
                1 <= self.shortest <= self.longest <= 64,
                f"prompt_lookup_min and prompt_lookup_max must be 1 to 64, in this order, not {self.shortest} and "
                f"{self.longest}"
                if self.method == "ngram"
                else f"suffix_decoding_max_tree_depth must be 1 to 64, not {self.longest}",
            ),
            (
                0 <= self.suffix_decoding_min_token_prob <= 1,
                f"suffix_decoding_min_token_prob must be 0 to 1, not {self.suffix_decoding_min_token_prob}",
            ),
            (
                self.suffix_decoding_max_spec_factor > 0,
                f"suffix_decoding_max_spec_factor must be above 0, not {self.suffix_decoding_max_spec_factor}",
            ),
            (
                self.suffix_decoding_max_cached_requests >= 0,
                f"suffix_decoding_max_cached_requests must be 0 or more, not "
                f"{self.suffix_decoding_max_cached_requests}",
            ),
        )
        for good, message in checks:
            if not good:
                raise UserError(message)

    @property
    def most(self) -> int:
        """Guessed tokens."""
        return self.num_speculative_tokens or self.suffix_decoding_max_tree_depth

    @property
    def shortest(self) -> int:
        """Tokens that must match."""
        if self.method == "suffix":
            return 1
        return self.prompt_lookup_min or self.prompt_lookup_max or 5

    @property
    def longest(self) -> int:
        """Tokens by which matches are compared."""
        if self.method == "suffix":
            return self.suffix_decoding_max_tree_depth
        return self.prompt_lookup_max or self.prompt_lookup_min or 5


class KVEventsConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where changes of the prefix cache are told; names and defaults are vLLM's."""

    enable_kv_cache_events: bool = False
    publisher: Literal["null", "zmq"] = "zmq"
    endpoint: str = "tcp://*:5557"
    """Where batches are published: bound if it has a `*` or is of this machine alone, else connected to."""
    replay_endpoint: str | None = None
    """Where batches that were missed can be asked for."""
    buffer_steps: int = 10_000
    """Batches that can still be asked for."""
    hwm: int = 100_000
    """Batches that are kept for a slow subscriber; later ones are dropped for it."""
    max_queue_size: int = 100_000
    """Batches on their way out of the engine."""
    topic: str = ""

    @property
    def enabled(self) -> bool:
        """Whether anything is told."""
        return self.enable_kv_cache_events and self.publisher == "zmq"


class TextOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What stands in for the plan's own where text is read and written."""

    tool_parser: str | None = None
    """Name of the parser of tool calls."""
    reasoning_parser: str | None = None
    chat_template: str | None = None
    """In Jinja."""


class EngineOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Engine options; zero means "as the plan and the machine allow"."""

    memory: float = 0.9
    """Up to 1: a share of available memory; above 1: bytes."""
    whole_process: bool = False
    """`memory` bounds all that this process holds on a CPU, the interpreter too: set in an engine process. Else it is
    what the plan takes besides."""
    max_num_seqs: int = 0
    """Most requests running at once; at most the plan's `max_batch`."""
    max_batched_tokens: int = 0
    """Token budget of a step; at most the largest bucket's."""
    threads: int = 0
    """Kernel threads; 0 is one a physical core that this process may use, within the CPU quota of its cgroups."""
    prefix_cache: bool = True
    verify: bool = True
    """Hash weight files and libraries when loading."""
    speculative_config: SpeculativeConfig | None = None
    """Guess tokens and verify several in one step."""
    kv_events_config: KVEventsConfig | None = None
    """Tell routers what the prefix cache holds."""


def parse_memory(text: str) -> float:
    """`EngineOptions.memory` as users write it: a share such as `0.9`, or an amount such as `8GiB` or `500MB`.

    Raises UserError if it is neither.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?) ?([KMG]i?B)?", text.strip())
    amount = float(match[1]) * _UNITS[match[2]] if match and match[2] else float(match[1]) if match else 0.0
    if match and ((match[2] and amount >= 1) or 0 < amount <= 1):
        return amount
    raise UserError(f"memory must be a share of it up to 1, such as 0.9, or an amount such as 8GiB, not {text!r}")
