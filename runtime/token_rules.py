"""Which tokens an output may have: those allowed, none that would end a forbidden sequence, and what a grammar says."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from .errors import UserError, brief

if TYPE_CHECKING:
    import llguidance

Words = npt.NDArray[np.uint32]
"""[..., V/32] a bit a token, 1 allowed."""


class TokenRules:
    """The tokens that may come next in one output."""

    def __init__(
        self,
        vocabulary: int,
        *,
        allowed: Sequence[int] | None = None,
        forbidden: Sequence[Sequence[int]] = (),
        matcher: llguidance.LLMatcher | None = None,
    ) -> None:
        """`forbidden` sequences may not occur in the output. Raises UserError for a token that there is not."""
        for token in (*(allowed or ()), *(token for each in forbidden for token in each)):
            if not 0 <= token < vocabulary:
                raise UserError(f"token ids must be 0 to {vocabulary - 1}, found {token}")
        single = [each[0] for each in forbidden if len(each) == 1]
        restricted = matcher is None or allowed is not None or single
        self._fixed = _words(vocabulary, allowed, single) if restricted else None
        self._forbidden = [tuple(each) for each in forbidden if len(each) > 1]
        self._longest = max(map(len, self._forbidden), default=1)
        self._recent: list[int] = []
        self._matcher = matcher

    def push(self, tokens: Sequence[int]) -> None:
        """These tokens came."""
        self._recent = [*self._recent, *tokens][1 - self._longest :] if self._longest > 1 else []
        if self._matcher is not None:
            for token in tokens:  # at once it would be an error if the grammar had ended before
                self._matcher.consume_token(token)

    def usable(self, guess: Sequence[int]) -> int:
        """How many of these tokens may come, one after the other."""
        count = len(guess) if self._matcher is None else self._matcher.validate_tokens(list(guess))
        for index, token in enumerate(guess[:count]):
            if self._fixed is not None and not self._fixed[token // 32] >> token % 32 & 1:
                return index
            if any(each[-1] == token and self._ends(each, guess[:index]) for each in self._forbidden):
                return index
        return count

    def write(self, words: Words, guess: Sequence[int] = ()) -> None:
        """Fill `words` [1 + guess, V/32] with what may come next, and after each token of a `guess` that is usable."""
        if self._matcher is not None:
            self._match(self._matcher, words, guess)
        if self._fixed is not None:
            words[:] = self._fixed if self._matcher is None else words & self._fixed
        for index in range(len(guess) + 1):
            for each in self._forbidden:
                if self._ends(each, guess[:index]):
                    words[index, each[-1] // 32] &= ~np.uint32(1 << each[-1] % 32)

    @staticmethod
    def _match(matcher: llguidance.LLMatcher, words: Words, guess: Sequence[int]) -> None:
        address, stride = words.ctypes.data, words.strides[0]
        for index in range(len(guess) + 1):
            matcher.unsafe_compute_mask_ptr(address + index * stride, stride)
            if matcher.is_error():
                words[index:] = 0
                return
            if index < len(guess):
                matcher.consume_token(guess[index])
        if guess:
            matcher.rollback(len(guess))

    def _ends(self, forbidden: tuple[int, ...], guess: Sequence[int]) -> bool:
        """Whether all of a forbidden sequence but its last token has come, after these tokens too."""
        return tuple([*self._recent, *guess][1 - len(forbidden) :]) == forbidden[:-1]

    @property
    def ended(self) -> bool:
        """Whether the grammar leaves nothing but the end."""
        return self._matcher is not None and self._matcher.is_stopped()

    @property
    def problem(self) -> str:
        """Why the grammar can't be followed any further; "" if it can."""
        if self._matcher is None or not self._matcher.is_error():
            return ""
        return f"the grammar can't be followed any further: {brief(self._matcher.get_error())}"


def _words(vocabulary: int, allowed: Sequence[int] | None, forbidden: Sequence[int]) -> Words:
    bits = np.zeros(-(-vocabulary // 32) * 32, np.bool_)
    bits[list(range(vocabulary)) if allowed is None else list(allowed)] = True
    bits[list(forbidden)] = False
    return np.packbits(bits, bitorder="little").view(np.uint32)
