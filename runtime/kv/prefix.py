"""Prefix reuse: the chained hash that names a page's content, and the longest prefix that all groups still hold."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b

from ..step import Int32
from .blocks import PagePool

_KEY_BYTES = 16


class PageKeys:
    """Keys of a sequence's full pages, in order.

    A key hashes the page's tokens and the key before it, and the first one the salt: equal keys mean equal tokens from
    the start of the sequence, so equal K/V, and only requests of one salt can meet, and only those of one `rope_class`,
    whose tokens are rotated alike.
    """

    def __init__(self, salt: str, page_tokens: int, rope_class: int = 0) -> None:
        self.salt, self._page_tokens = salt, page_tokens
        self._root = blake2b(f"{rope_class} {salt}".encode(), digest_size=_KEY_BYTES).digest()
        self._keys: list[bytes] = []

    def of_class(self, rope_class: int) -> PageKeys:
        """Keys of the same salt for another `rope_class`."""
        return PageKeys(self.salt, self._page_tokens, rope_class)

    def __call__(self, tokens: Int32, pages: int) -> list[bytes]:
        """The keys of at least the first `pages` pages of the sequence `tokens`."""
        keys, size = self._keys, self._page_tokens
        last = keys[-1] if keys else self._root
        for page in range(len(keys), pages):
            last = blake2b(last + tokens[page * size : (page + 1) * size].tobytes(), digest_size=_KEY_BYTES).digest()
            keys.append(last)
        return keys


def first_page(tokens: int, window: int, page_tokens: int) -> int:
    """Index of the first page that the token after `tokens` others can read; `window` 0 looks back without limit."""
    return max(0, tokens - window + 1) // page_tokens if window else 0


def longest_prefix(
    keys: Sequence[bytes], pools: Sequence[PagePool], windows: Sequence[int], page_tokens: int, limit: int
) -> int:
    """The most tokens, at most `limit`, whose K/V every group still holds as far as the next token reads it.

    It is a number of whole pages, or `limit`: then the last page is used in part.
    """
    runs = [0] * len(pools)
    best = 0
    for count, key in enumerate(keys, 1):
        tokens = min(count * page_tokens, limit)
        complete = True
        for group, pool in enumerate(pools):
            runs[group] = runs[group] + 1 if pool.find(key) is not None else 0
            complete = complete and runs[group] >= count - first_page(tokens, windows[group], page_tokens)
            if runs[group] < count and not windows[group]:
                return best
        if complete:
            best = tokens
        if tokens == limit:
            break
    return best
