"""Pages of one cache group: reference counts, the free list, and the known content of full pages."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping

from ..errors import InternalError

TRASH = 0
"""The page that padding is written to. It is never read and never handed out."""


class PagePool:
    """Hands out the pages of one group.

    A page is *used* by some sequences (it has references), or *cached* (unused, but its content has a key under which
    it can be found again), or *free*. Cached pages are taken when no free one is left, least recently used first.
    """

    def __init__(self, pages: int, removed: Callable[[bytes], None] | None = None) -> None:
        """`pages` counts the trash page; `removed` is told the keys of content that is known no more."""
        self.pages = pages
        self._removed = removed
        self._references = [0] * pages
        self._free = list(range(pages - 1, TRASH, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._page_of: dict[bytes, int] = {}
        self._key_of: dict[int, bytes] = {}

    @property
    def available(self) -> int:
        """Pages that can be taken."""
        return len(self._free) + len(self._cached)

    def is_used(self, page: int) -> bool:
        """Whether some sequence holds the page."""
        return self._references[page] > 0

    def take(self) -> int:
        """A page with one reference and no known content. Raises InternalError if none is available."""
        if self._free:
            page = self._free.pop()
        elif self._cached:
            page, _ = self._cached.popitem(last=False)
            self._unlink(page)
        else:
            raise InternalError("a page was taken from a cache group that has none left")
        self._references[page] = 1
        return page

    def retain(self, page: int) -> None:
        """Add a reference to a used or cached page."""
        if self._references[page] == 0:
            del self._cached[page]
        self._references[page] += 1

    def release(self, page: int) -> None:
        """Drop a reference; the last one makes the page cached if its content is known, else free."""
        count = self._references[page] - 1
        if count < 0:
            raise InternalError(f"page {page} was released more often than it was taken")
        self._references[page] = count
        if count == 0:
            if page in self._key_of:
                self._cached[page] = None
            else:
                self._free.append(page)

    def find(self, key: bytes) -> int | None:
        """The page whose content has this key."""
        return self._page_of.get(key)

    def publish(self, page: int, key: bytes) -> bool:
        """Make a full, used page known by its content, unless another page with the same content already is; whether
        it is new."""
        if key in self._page_of or page in self._key_of:
            return False
        self._page_of[key] = page
        self._key_of[page] = key
        return True

    def forget(self, key: bytes) -> None:
        """Make the content with this key unknown."""
        page = self._page_of.get(key)
        if page is not None:
            self._unlink(page)
            if page in self._cached:
                del self._cached[page]
                self._free.append(page)

    def forget_unused(self) -> None:
        """Make the content of every page that nobody uses unknown."""
        for page in self._cached:
            self._unlink(page)
        self._free.extend(self._cached)
        self._cached.clear()

    def _unlink(self, page: int) -> None:
        key = self._key_of.pop(page)
        del self._page_of[key]
        if self._removed is not None:
            self._removed(key)

    def check(self, holders: Mapping[int, int]) -> None:
        """Audit against the number of holders of each used page. Raises InternalError naming the first mismatch."""
        for page, count in enumerate(self._references):
            if count != holders.get(page, 0):
                raise InternalError(f"page {page} has {count} references but {holders.get(page, 0)} holders")
        unused = [*self._free, *self._cached]
        used = {page for page, count in enumerate(self._references) if count}
        if len(unused) != len(set(unused)) or set(unused) | used != set(range(1, self.pages)) or used & set(unused):
            raise InternalError("the used, cached and free pages of a group are not a partition of it")
        if self._page_of != {key: page for page, key in self._key_of.items()}:
            raise InternalError("the prefix index of a group does not match its pages")
        if any(page not in self._key_of for page in self._cached) or any(page in self._key_of for page in self._free):
            raise InternalError("a page is cached without a key, or free with one")
