"""Guesses of what a sequence says next, looked up in what was said before.

A text is indexed by its n-grams: the places where the last tokens occurred are found at once, newest first, and what
followed there is the guess. Adding a token costs the same whatever the text's length. Two methods share the index:

- n-gram, or prompt lookup (Saxena 2023): the longest match within the sequence itself.
- suffix (Oliaro et al. 2024, "SuffixDecoding"): also within outputs that other requests had, for as long as most of
  the places agree, and no longer than the match gives reason for.
"""

from __future__ import annotations

from collections.abc import Sequence

from .options import EngineOptions, SpeculativeConfig
from .plan import Plan

CANDIDATES = 8
"""Most places that are looked at, so that a lookup takes a bounded time."""
TEXT_TOKENS = 1 << 17
"""Tokens of other requests' outputs after which a new collection of them is begun."""
EXTEND_TOKENS = 4096
"""Most tokens that are indexed at a time: a long prompt must not hold up the step."""
TOKEN_BYTES = 150
"""Bytes that a token takes in an index."""
_BOUNDARY = -1
"""Lies between outputs, so that no match crosses."""
_MEMORY = 0.9
"""What an earlier trial counts, compared with the one after it."""


class NgramIndex:
    """A growing text, and where its n-grams of `least` tokens have occurred."""

    def __init__(self, least: int) -> None:
        self.tokens: list[int] = []
        self._least = least
        self._mask = (1 << 32 * least) - 1
        self._key = 0
        self._newest: dict[int, int] = {}
        self._older: list[int] = []

    def extend(self, tokens: Sequence[int]) -> None:
        """Add tokens to the text."""
        text, newest, older, mask, key = self.tokens, self._newest, self._older, self._mask, self._key
        for token in tokens:
            place = len(text)
            older.append(newest.get(key, 0))
            newest[key] = place
            text.append(token)
            key = (key << 32 | token + 1) & mask
        self._key = key

    def places(self, context: list[int], depth: int) -> list[tuple[int, int]]:
        """Where in the text the last tokens of `context` occurred, as (matching tokens up to `depth`, index of the
        token that followed): the newest places that match in at least `least` tokens."""
        least, text = self._least, self.tokens
        if len(context) < least:
            return []
        key = 0
        for token in context[-least:]:
            key = key << 32 | token + 1
        found: list[tuple[int, int]] = []
        place, length = self._newest.get(key, 0), len(context)
        while place >= least and len(found) < CANDIDATES:
            most = min(depth, place, length)
            match = least
            while match < most and text[place - 1 - match] == context[length - 1 - match]:
                match += 1
            found.append((match, place))
            place = self._older[place]
        return found


class SharedOutputs:
    """Outputs of requests that ended; the oldest are forgotten."""

    def __init__(self, config: SpeculativeConfig) -> None:
        self._least = config.shortest + 1  # that others said one token as well means little
        self._most = max(1, config.suffix_decoding_max_cached_requests // 2)
        self._outputs = 0
        self.texts = [NgramIndex(self._least)]
        """The newest last."""

    def add(self, tokens: Sequence[int]) -> None:
        """Remember an output."""
        if self._outputs >= self._most or len(self.texts[-1].tokens) > TEXT_TOKENS:
            self.texts = [self.texts[-1], NgramIndex(self._least)]
            self._outputs = 0
        self._outputs += 1
        self.texts[-1].extend([_BOUNDARY, *tokens])


class Drafter:
    """Guesses for one sequence, and how good they are.

    Every guess is compared with what was drawn, whether or not a step tried it: what a guess is worth is known
    without paying for it.
    """

    def __init__(self, config: SpeculativeConfig, shared: SharedOutputs | None = None) -> None:
        self.guess: list[int] = []
        """The tokens that may come next."""
        self._config, self._shared = config, shared
        self._index = NgramIndex(config.shortest)
        self._unread: list[int] = []
        self._source, self._place, self._match = self._index, 0, 0
        self._hits, self._trials = 0.5, 1.0

    @property
    def chance(self) -> float:
        """That the next token of a guess is right, if those before are."""
        return self._hits / self._trials

    def take(self, tokens: list[int]) -> int:
        """Add tokens that are known now and guess what follows; how many of them the last guess had right."""
        right = 0
        for token, guessed in zip(tokens, self.guess, strict=False):
            hit = token == guessed
            self._hits, self._trials = self._hits * _MEMORY + hit, self._trials * _MEMORY + 1
            if not hit:
                break
            right += 1
        self._unread += tokens
        self._index.extend(self._unread[:EXTEND_TOKENS])
        del self._unread[:EXTEND_TOKENS]
        if self._unread:
            self.guess = []
        elif self.guess and right == len(tokens) and self._config.method == "ngram":
            self._place += right
            self.guess = self._copy(self._index.tokens, self._place, self._config.most)
        else:
            self.guess = self._search()
        return right

    def _search(self) -> list[int]:
        config, own = self._config, self._index.tokens
        texts = [self._index, *reversed(self._shared.texts if self._shared else [])]
        best, found = 0, list[tuple[NgramIndex, int]]()
        for text in texts:
            for match, place in text.places(own, config.longest):
                if match > best:
                    best, found = match, []
                if match == best:
                    found.append((text, place))
        if not found:
            return []
        if config.method == "ngram":
            self._place = found[0][1]
            return self._copy(own, self._place, config.most)
        most = min(config.most, int(best * config.suffix_decoding_max_spec_factor))
        return _majority(found, most, config.suffix_decoding_min_token_prob)

    @staticmethod
    def _copy(text: list[int], place: int, most: int) -> list[int]:
        """What followed at a place; where the text ends, it goes on with what it is a copy of."""
        guess = text[place : place + most]
        period = len(text) - place
        while len(guess) < most:
            guess.append(guess[len(guess) - period])
        return guess


def _majority(places: list[tuple[NgramIndex, int]], most: int, least_chance: float) -> list[int]:
    """The tokens that most of the places continue with, while the share of the places that went along suffices."""
    guess: list[int] = []
    total = len(places)
    while len(guess) < most:
        votes: dict[int, list[tuple[NgramIndex, int]]] = {}
        for text, place in places:
            if place < len(text.tokens) and (token := text.tokens[place]) != _BOUNDARY:
                votes.setdefault(token, []).append((text, place + 1))
        if not votes:
            break
        token, places = max(votes.items(), key=lambda vote: len(vote[1]))
        if len(places) < least_chance * total:
            break
        guess.append(token)
    return guess


def index_bytes(plan: Plan, options: EngineOptions) -> int:
    """The most that the indices of an engine take."""
    config = options.speculative_config
    if config is None:
        return 0
    tokens = (options.max_num_seqs or plan.max_batch) * plan.model.max_context
    return TOKEN_BYTES * (tokens + 2 * TEXT_TOKENS * (config.method == "suffix"))
