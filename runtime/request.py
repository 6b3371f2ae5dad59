"""Requests and engine events. The same structs cross the process boundary, the offline API and the tests.

Tokens are ids here; text exists only in the front end.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from .errors import UserError

FinishReason = Literal["stop", "length", "abort", "error"]


SleepTag = Literal["weights", "kv_cache"]
"""What sleeps and can be woken by itself; vLLM's names."""
SLEEP_TAGS: tuple[SleepTag, ...] = ("weights", "kv_cache")


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How to choose tokens. Names, meanings and defaults are vLLM's and OpenAI's."""

    n: int = 1
    max_tokens: int | None = 16
    """None: until the context is full."""
    min_tokens: int = 0
    temperature: float = 1.0
    """0 is greedy."""
    top_p: float = 1.0
    top_k: int = 0
    """0 or -1: off."""
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    """Strings that end the output; handled where text is."""
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    logit_bias: dict[int, float] = {}
    logprobs: int | None = None
    """Alternatives to report for each output token, at most 20; 0 reports the chosen token only."""
    prompt_logprobs: int | None = None
    """The same for each prompt token; -1 is the whole vocabulary."""
    skip_special_tokens: bool = True
    grammar: str = ""
    """What the output must be, see `grammar`; empty: anything."""
    allowed_token_ids: tuple[int, ...] | None = None
    """None: all."""
    bad_words: tuple[str, ...] = ()
    """Texts that the output must not have; they become `bad_token_ids` where text is."""
    bad_token_ids: tuple[tuple[int, ...], ...] = ()
    """Token ids, in a row, that the output must not have."""

    def __post_init__(self) -> None:
        checks: tuple[tuple[bool, str], ...] = (
            (1 <= self.n <= 128, f"n must be 1 to 128, not {self.n}"),
            (self.max_tokens is None or self.max_tokens >= 1, f"max_tokens must be at least 1, not {self.max_tokens}"),
            (0 <= self.min_tokens < 2**63, f"min_tokens must be 0 to 2**63 - 1, not {self.min_tokens}"),
            (
                self.max_tokens is None or self.min_tokens <= self.max_tokens,
                f"min_tokens must be at most max_tokens, not {self.min_tokens} > {self.max_tokens}",
            ),
            (0.0 <= self.temperature <= 100.0, f"temperature must be 0 to 100, not {self.temperature}"),
            (0.0 < self.top_p <= 1.0, f"top_p must be above 0 and at most 1, not {self.top_p}"),
            (-1 <= self.top_k < 2**63, f"top_k must be -1 or 0 to 2**63 - 1, not {self.top_k}"),
            (0.0 <= self.min_p <= 1.0, f"min_p must be 0 to 1, not {self.min_p}"),
            (
                0.0 < self.repetition_penalty <= 10.0,
                f"repetition_penalty must be above 0 and at most 10, not {self.repetition_penalty}",
            ),
            (-2.0 <= self.frequency_penalty <= 2.0, f"frequency_penalty must be -2 to 2, not {self.frequency_penalty}"),
            (-2.0 <= self.presence_penalty <= 2.0, f"presence_penalty must be -2 to 2, not {self.presence_penalty}"),
            (self.logprobs is None or 0 <= self.logprobs <= 20, f"logprobs must be 0 to 20, not {self.logprobs}"),
            (
                self.prompt_logprobs is None or -1 <= self.prompt_logprobs <= 20,
                f"prompt_logprobs must be -1 to 20, not {self.prompt_logprobs}",
            ),
            (self.seed is None or -(2**63) <= self.seed < 2**64, f"seed must fit in 64 bits, not {self.seed}"),
            (all(self.stop), "stop strings must not be empty"),
            (all(self.bad_words), "bad_words must not be empty"),
            (all(self.bad_token_ids), "bad_token_ids must not be empty"),
            (self.allowed_token_ids is None or bool(self.allowed_token_ids), "allowed_token_ids must not be empty"),
            (
                not (self.grammar and self.ignore_eos),
                "ignore_eos can't be combined with structured output, which ends by itself",
            ),
        )
        for good, message in checks:
            if not good:
                raise UserError(message)


# --- into the engine --------------------------------------------------------------------------------------------------


class Add(msgspec.Struct, frozen=True, tag="add"):
    """Start a request. `n` > 1 is expanded by the front end into requests of their own."""

    request: str
    prompt: list[int]
    params: SamplingParams
    eos: tuple[int, ...] = ()
    """Token ids that end the output, besides `params.stop_token_ids`."""
    priority: int = 0
    """Lower is served earlier."""
    cache_salt: str = ""
    """Requests share prefix pages only with requests of the same salt."""
    arrival: float = 0.0
    """`time.monotonic()` at the front end."""

    def __post_init__(self) -> None:
        if not -(2**63) <= self.priority < 2**63:  # messages hold no more
            raise UserError(f"priority must fit in 64 bits, not {self.priority}")


class Abort(msgspec.Struct, frozen=True, tag="abort"):
    """End a request and free its pages; answered by `Finished(reason="abort")`."""

    request: str


class Ping(msgspec.Struct, frozen=True, tag="ping"):
    """Ask for `Stats`."""

    number: int


class ResetPrefixCache(msgspec.Struct, frozen=True, tag="reset_prefix_cache"):
    """Forget every cached prefix that no running request uses."""


class Sleep(msgspec.Struct, frozen=True, tag="sleep"):
    """End all requests and give back the memory of weights and caches. Later requests wait."""


class WakeUp(msgspec.Struct, frozen=True, tag="wake_up"):
    """Take the memory of all, or of the parts named, back; requests run once all parts are there."""

    tags: tuple[SleepTag, ...] = SLEEP_TAGS


MAX_PROFILE_STEPS = 1000


class Profile(msgspec.Struct, frozen=True, tag="profile"):
    """Record the next `steps` steps, or with 0 end the recording; answered by `Profiled`."""

    number: int
    steps: int
    """At most `MAX_PROFILE_STEPS`."""


class Shutdown(msgspec.Struct, frozen=True, tag="shutdown"):
    """Stop; with `drain`, finish the running requests first."""

    drain: bool = False


Command = Add | Abort | Ping | Profile | ResetPrefixCache | Sleep | WakeUp | Shutdown


# --- out of the engine ------------------------------------------------------------------------------------------------


class TokenLogprob(msgspec.Struct, frozen=True, array_like=True):
    """A token with its raw log-probability and rank, and the most likely alternatives as (token, log-probability)."""

    token: int
    logprob: float
    rank: int
    top: list[tuple[int, float]]
    row: bytes = b""
    """With `prompt_logprobs` -1, the whole vocabulary's log-probabilities by token id, little-endian float32; `top` is
    then empty."""


class Tokens(msgspec.Struct, frozen=True, tag="tokens"):
    """New tokens of a request."""

    request: str
    tokens: list[int]
    logprobs: list[TokenLogprob] | None = None
    """As many as `tokens`, if asked for."""
    prompt_logprobs: list[TokenLogprob | None] | None = None
    """Sent once, with the first tokens: one a prompt token, None for the first."""
    metrics: RequestMetrics | None = None
    """Sent once, with the first tokens: as of then. A request may end without `Finished` being read."""


class RequestMetrics(msgspec.Struct, frozen=True):
    """Times in seconds since the request's arrival, and counts."""

    queue: float
    first_token: float
    total: float
    cached_tokens: int
    """Prompt tokens that came from the prefix cache."""
    preemptions: int = 0


class Finished(msgspec.Struct, frozen=True, tag="finished"):
    """The last event of a request that was accepted."""

    request: str
    reason: FinishReason
    stop_token: int | None = None
    """The token that ended the output, if one did; it is among the tokens sent."""
    metrics: RequestMetrics | None = None


class Error(msgspec.Struct, frozen=True, tag="error"):
    """The last event of a request that was refused or failed. `request` is "" for a failure of the engine itself."""

    request: str
    message: str
    user_fault: bool


STEP_TOKENS = (1, *(2**power for power in range(3, 15)))
"""Bounds of `Stats.step_tokens`."""


class Stats(msgspec.Struct, frozen=True, tag="stats"):
    """The engine's state; also the proof that it is alive: `last_step` is the age in seconds of its last loop turn."""

    number: int
    running: int
    waiting: int
    kv_usage: float
    """Used share of the pages, 0 to 1; cached but unused pages count as free."""
    prefix_queries: int
    prefix_hits: int
    """Tokens looked up and found."""
    preemptions: int
    prompt_tokens: int
    generation_tokens: int
    steps: int
    last_step: float
    memory: dict[str, int] = {}
    prefix_cache: bool = True
    kv_pages: tuple[int, ...] = ()
    """Pages of each cache group that sequences can use."""
    page_tokens: int = 0
    step_tokens: tuple[int, ...] = ()
    """Steps by the tokens that they computed of prompts and generated: counts of a histogram over `STEP_TOKENS`."""
    step_tokens_sum: int = 0
    spec_drafts: int = 0
    """Speculative decoding: sequences' turns in which tokens were proposed for them."""
    spec_draft_tokens: int = 0
    spec_accepted_tokens: int = 0
    spec_accepted_per_position: tuple[int, ...] = ()
    """Of a draft's first token, second, …: how often it was accepted."""
    asleep: tuple[SleepTag, ...] = ()
    """What of the engine sleeps."""


class Profiled(msgspec.Struct, frozen=True, tag="profiled"):
    """The answer to `Profile`."""

    number: int
    trace: bytes = b""
    """JSON for Chrome or Perfetto, see `profiler`."""
    error: str = ""
    """Why it can't be done."""


Event = Tokens | Finished | Error | Stats | Profiled
