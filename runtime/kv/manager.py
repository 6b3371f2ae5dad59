"""The K/V manager: gives running sequences pages in every cache group, and shares pages between equal prefixes.

The scheduler thinks in tokens, this module in pages. Each running sequence has a *lane*, a row in the page tables that
the device reads.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from ..errors import InternalError
from ..plan import CacheResource
from ..step import Int32
from .blocks import TRASH, PagePool
from .events import EventRecorder
from .prefix import first_page, longest_prefix


@dataclass(slots=True, eq=False)
class PageTable:
    """The pages of one running sequence."""

    lane: int
    pages: list[list[int]]
    """A cache group each: page ids in order of position; `TRASH` where they were freed behind the window."""
    first: list[int]
    """A cache group each: index of the first page that is still held."""
    room: int = 0
    """Tokens that fit into the pages held."""
    settled: int = 0
    """Full pages that were published."""


@dataclass(frozen=True, slots=True)
class Prefix:
    """What the cache holds of a sequence."""

    tokens: int
    keys: Sequence[bytes] = field(repr=False)


class KVManager:
    """Pages of all cache groups. Methods marked *(state)* change who holds what; the others only read."""

    def __init__(
        self,
        resources: Sequence[CacheResource],
        pages: Sequence[int],
        *,
        lanes: int,
        max_context: int,
        prefix_cache: bool = True,
        medium: str = "",
    ) -> None:
        """`pages` counts each group's pages with the trash page; with a `medium`, "CPU" or "GPU", what happens to the
        prefix cache is recorded in `events`. Raises InternalError if page sizes differ."""
        sizes = {resource.page_tokens for resource in resources} or {max_context}
        if len(sizes) > 1:
            raise InternalError(f"cache groups must have one page size, found {sorted(sizes)}")
        (self.page_tokens,) = sizes
        self.windows = [resource.window for resource in resources]
        self.prefix_cache = prefix_cache and bool(resources)
        self.events = EventRecorder(self.windows, self.page_tokens, medium) if medium else None
        self._page_counts = tuple(pages)
        width = self._pages(max_context)
        self.changes = 0
        """Grows whenever the tables change."""
        self.tables: list[Int32] = [np.zeros((lanes, width), np.int32) for _ in resources]
        self.reset()

    def reset(self) -> None:
        """Forget everything: all pages are free *(state)*."""
        removed = self.events.removed if self.events is not None else None
        self.pools = [
            PagePool(count, partial(removed, group) if removed is not None else None)
            for group, count in enumerate(self._page_counts)
        ]
        if self.events is not None:
            self.events.cleared()
        self._live: dict[int, PageTable] = {}
        self._copies: list[tuple[int, int, int]] = []
        self.releases = 0
        self.changes += 1
        for table in self.tables:
            table.fill(TRASH)

    @property
    def capacity(self) -> int:
        """The most tokens that one sequence alone can have in the cache."""
        return min((self._group_capacity(group) for group in range(len(self.pools))), default=2**31 - 1)

    def _group_capacity(self, group: int) -> int:
        usable, window = self._page_counts[group] - 1, self.windows[group]
        if window and usable > self._pages(window - 1):
            return 2**31 - 1
        return usable * self.page_tokens

    @property
    def usage(self) -> float:
        """Used share of the pages in the fullest group, 0 to 1."""
        return max((1 - pool.available / max(1, pool.pages - 1) for pool in self.pools), default=0.0)

    @property
    def available(self) -> int:
        """Pages that every group could give."""
        return min((pool.available for pool in self.pools), default=2**31 - 1)

    # --- admission ----------------------------------------------------------------------------------------------------

    def find_prefix(self, keys: Sequence[bytes], limit: int) -> Prefix:
        """The longest prefix, of at most `limit` tokens, that can be reused."""
        if not self.prefix_cache or limit <= 0:
            return Prefix(0, ())
        return Prefix(longest_prefix(keys, self.pools, self.windows, self.page_tokens, limit), keys)

    def fits(self, prefix: Prefix, tokens: int, chunk: int, spare: int) -> bool:
        """Whether a sequence of `tokens` tokens, computed at most `chunk` at a time, could be admitted with `spare`
        pages left over in every group."""
        for pool, window in zip(self.pools, self.windows, strict=True):
            first = first_page(prefix.tokens, window, self.page_tokens)
            need = self._pages(tokens) - first
            if window:
                need = min(need, self._pages(window + chunk) + 1)
            shared = prefix.tokens // self.page_tokens - first
            read = prefix.keys[first : self._pages(prefix.tokens)]
            revived = sum(not pool.is_used(self._page_of(pool, key)) for key in read)
            if need - shared + revived + spare > pool.available:
                return False
        return True

    def admit(self, lane: int, prefix: Prefix) -> PageTable:
        """Give a sequence a lane and the pages of its prefix *(state)*.

        A page that the prefix uses in part is copied, since the sequence will write to it: see `take_copies`.
        """
        if lane in self._live:
            raise InternalError(f"lane {lane} was given to two sequences")
        groups = range(len(self.pools))
        table = self._live[lane] = PageTable(lane, [[] for _ in groups], [0 for _ in groups])
        whole = prefix.tokens // self.page_tokens
        for group, pool in enumerate(self.pools):
            first = table.first[group] = first_page(prefix.tokens, self.windows[group], self.page_tokens)
            shared = [self._page_of(pool, key) for key in prefix.keys[first:whole]]
            for page in shared:
                pool.retain(page)
            table.pages[group] = [TRASH] * first + shared
            if prefix.tokens > whole * self.page_tokens:
                table.pages[group].append(self._copy(group, self._page_of(pool, prefix.keys[whole])))
            self.tables[group][lane, : len(table.pages[group])] = table.pages[group]
        self.changes += 1
        table.settled = whole
        table.room = self._pages(prefix.tokens) * self.page_tokens
        return table

    def _copy(self, group: int, source: int) -> int:
        pool = self.pools[group]
        pool.retain(source)
        page = pool.take()
        pool.release(source)
        self._copies.append((group, source, page))
        return page

    def take_copies(self) -> list[tuple[int, int, int]]:
        """Page copies (group, source, destination) that must be done, in order, before the next step *(state)*."""
        copies, self._copies = self._copies, []
        return copies

    # --- running ------------------------------------------------------------------------------------------------------

    def grow(self, table: PageTable, tokens: int) -> int:
        """Make room for `tokens` tokens, or as many as there are pages for; how many fit *(state)*."""
        if tokens <= table.room:
            return tokens
        held = table.room // self.page_tokens
        more = min([self._pages(tokens) - held, *(pool.available for pool in self.pools)])
        for group, pool in enumerate(self.pools):
            taken = [pool.take() for _ in range(more)]
            table.pages[group] += taken
            self.tables[group][table.lane, held : held + more] = taken
        table.room += more * self.page_tokens
        self.changes += 1
        return min(tokens, table.room)

    def settle(
        self, table: PageTable, keys: Sequence[bytes], tokens: int, text: Int32 | None = None, salt: str = ""
    ) -> None:
        """Account for `tokens` computed tokens: publish full pages, free those behind windows *(state)*.

        `keys` are those of the full pages, or none to keep the pages unknown; `text` and `salt` are the sequence's
        tokens and what its keys begin with, for events.
        """
        full = tokens // self.page_tokens
        for group, pool in enumerate(self.pools):
            pages, window = table.pages[group], self.windows[group]
            if self.prefix_cache:
                new = [
                    index
                    for index in range(table.settled, min(full, len(keys)))
                    if pool.publish(pages[index], keys[index])
                ]
                if self.events is not None and text is not None:
                    for run in _runs(new):
                        self.events.stored(group, run, keys, text, salt)
            if window:
                self._free_behind(table, group, first_page(tokens, window, self.page_tokens))
        table.settled = full

    def _free_behind(self, table: PageTable, group: int, first: int) -> None:
        pages, start = table.pages[group], table.first[group]
        if first <= start:
            return
        for index in range(start, first):
            self.pools[group].release(pages[index])
            pages[index] = TRASH
        self.tables[group][table.lane, start:first] = TRASH
        table.first[group] = first
        self.releases += 1
        self.changes += 1

    def release(self, table: PageTable, *, forget: Sequence[bytes] = ()) -> None:
        """Take back a sequence's lane and pages; content with the keys in `forget` can't be found again *(state)*."""
        for group, pool in enumerate(self.pools):
            for key in forget:
                pool.forget(key)
            # The end of a sequence is less likely to be of use again than its start: it is to be evicted first.
            for page in reversed(table.pages[group][table.first[group] :]):
                pool.release(page)
            self.tables[group][table.lane, : len(table.pages[group])] = TRASH
        del self._live[table.lane]
        self.releases += 1
        self.changes += 1

    def forget_unused(self) -> None:
        """Forget every cached prefix that no sequence uses *(state)*."""
        for pool in self.pools:
            pool.forget_unused()
        if self.events is not None and not self._live:
            self.events.cleared()

    def check(self) -> None:
        """Audit: pages held by live sequences, reference counts, free lists, indices and device tables must agree.

        Raises InternalError naming the first mismatch.
        """
        for group, pool in enumerate(self.pools):
            mirror = np.zeros_like(self.tables[group])
            holders: Counter[int] = Counter()
            for table in self._live.values():
                pages = table.pages[group]
                if table.room != len(pages) * self.page_tokens or any(pages[: table.first[group]]):
                    raise InternalError(f"the page table of lane {table.lane} has a wrong length or keeps freed pages")
                holders.update(pages[table.first[group] :])
                mirror[table.lane, : len(pages)] = pages
            pool.check(holders)
            if not np.array_equal(mirror, self.tables[group]):
                raise InternalError(f"the device's page table of cache group {group} differs from the pages held")

    def _pages(self, tokens: int) -> int:
        return -(-tokens // self.page_tokens)

    @staticmethod
    def _page_of(pool: PagePool, key: bytes) -> int:
        page = pool.find(key)
        if page is None:
            raise InternalError("a prefix was admitted after its pages were evicted")
        return page


def _runs(numbers: Sequence[int]) -> Iterator[range]:
    """Ascending numbers as ranges without gaps."""
    start = 0
    for at in range(1, len(numbers) + 1):
        if at == len(numbers) or numbers[at] != numbers[at - 1] + 1:
            yield range(numbers[start], numbers[at - 1] + 1)
            start = at
