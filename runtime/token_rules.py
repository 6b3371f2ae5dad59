"""Which tokens an output may have: those allowed, none that would end a forbidden sequence, and what a grammar says."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from .errors import UserError
from .grammar import Mask


class TokenRules:
    """The tokens that may come next in one output (see `grammar.Mask`)."""

    def __init__(
        self,
        vocabulary: int,
        *,
        allowed: Sequence[int] | None = None,
        forbidden: Sequence[Sequence[int]] = (),
        grammar: Mask | None = None,
    ) -> None:
        """`forbidden` sequences may not occur in the output. Raises UserError for a token that there is not."""
        for token in (*(allowed or ()), *(token for each in forbidden for token in each)):
            if not 0 <= token < vocabulary:
                raise UserError(f"token ids must be 0 to {vocabulary - 1}, found {token}")
        bits = np.zeros(-(-vocabulary // 32) * 32, np.bool_)
        bits[list(range(vocabulary)) if allowed is None else list(allowed)] = True
        bits[[each[0] for each in forbidden if len(each) == 1]] = False
        self._fixed: npt.NDArray[np.uint32] = np.packbits(bits, bitorder="little").view(np.uint32)
        self._forbidden = [tuple(each) for each in forbidden if len(each) > 1]
        self._longest = max(map(len, self._forbidden), default=1)
        self._recent: list[int] = []
        self._grammar = grammar
        self.words: npt.NDArray[np.uint32] = self._fixed.copy()
        """A bit a token. The address never changes."""

    def push(self, token: int) -> None:
        """This token came."""
        self._recent = [*self._recent, token][1 - self._longest :] if self._longest > 1 else []
        if self._grammar is not None:
            self._grammar.push(token)

    def wait(self) -> None:
        """Until `words` is right for the next token."""
        self.words[:] = self._fixed
        if self._grammar is not None:
            self._grammar.wait()
            self.words &= self._grammar.words
        for each in self._forbidden:
            if tuple(self._recent[1 - len(each) :]) == each[:-1]:
                self.words[each[-1] // 32] &= ~np.uint32(1 << each[-1] % 32)
