"""A request inside the engine: its tokens, how far they are computed, and what it holds."""

from __future__ import annotations

from dataclasses import dataclass, field

from .drafts import Drafter
from .kv.manager import PageTable
from .kv.prefix import PageKeys
from .request import TokenLogprob
from .sampling import Sampling
from .step import Float32, Int32
from .token_rules import TokenRules


@dataclass(slots=True, eq=False)
class Sequence:
    """One request from arrival to its last token.

    It has `length` tokens (prompt, then outputs), of which the first `computed` are in the cache. What remains is
    computed in chunks, and the step that computes the last token draws the next. Decoding is the case in which one
    token remains; a preempted sequence starts again with `computed` 0 and keeps its outputs.

    Both count what steps in flight will have done. The tokens that these draw are not known to the host yet: only
    `tokens[:known]` are.
    """

    request: str
    order: tuple[int, int]
    """Priority, then number of arrival: lower is served earlier and preempted later."""
    tokens: Int32
    """As long as the sequence may become; the address never changes, for records on the device point to it."""
    prompt_length: int
    sampling: Sampling
    keys: PageKeys
    arrival: float
    """`time.monotonic()`"""
    length: int
    known: int
    horizon: int
    """The length at which no further step may start before all tokens are known: the sequence ends there, or must be
    computed anew."""
    rope_length: int
    """The length for which its first so many tokens are rotated, see `StepBatch.lengths`."""
    rules: TokenRules | None = None
    """The tokens that may come next, if not all."""
    drafter: Drafter | None = None
    """What guesses its next tokens."""
    drafts: int = 0
    """Guessed tokens, `tokens[length:]`, that the next step is to verify."""
    computed: int = 0
    table: PageTable | None = None
    """The pages held, while running."""
    last: int = 0
    """The last known token."""
    row: int = 0
    """Of the step in flight that draws its last token."""
    scored: int = 0
    """The next position whose successor's log-probability is wanted, if it is before the end of the prompt."""
    prompt_logprobs: list[TokenLogprob | None] = field(default_factory=list)
    """What was scored so far, until it is sent with the first token."""
    started: float = 0.0
    first_token: float = 0.0
    cached_tokens: int = 0
    preemptions: int = 0

    @property
    def ready(self) -> bool:
        """Whether a step may advance it now: a grammar allows tokens only by what all those before are."""
        length = self.length
        return length < self.horizon and (self.rules is None or self.known == length)

    @property
    def settled(self) -> int:
        """Full pages whose content is known to be in the cache."""
        return self.table.settled if self.table is not None else 0

    @property
    def reusable(self) -> int:
        """The most tokens that may come from the prefix cache: the last one and those to be scored must be computed."""
        wanted = self.sampling.prompt_logprobs is not None and self.scored < self.prompt_length - 1
        return self.scored if wanted else self.length - 1


@dataclass(slots=True, eq=False)
class Chunk:
    """The part of a step that belongs to one sequence: `count` tokens from position `start`.

    Its rows are `scores` prompt scores, for positions from `first_score`, then `samples` drawn tokens: after the
    sequence's last token, and after each guessed one behind it.
    """

    sequence: Sequence
    table: PageTable
    start: int
    count: int
    samples: int
    first_score: int = 0
    scores: int = 0
    vocabulary_logprobs: Float32 | None = None
    """[scores, V], if the whole vocabulary was asked for."""
