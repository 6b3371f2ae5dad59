"""The scheduler: decides which sequences compute how many tokens in the next step.

Sequences are served in order of priority, then arrival. Those that decode get their token in every step; the rest of
the token budget goes to prompts, in chunks. When pages run out, the last in order gives its own back and starts again
later. So the first in order always advances, and nothing waits forever behind what came after it.

A step can be scheduled ahead, when results of the one before it are still to come. Nothing is preempted then: what
would need it waits for these results.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass
from operator import attrgetter

from .errors import InternalError
from .kv.manager import KVManager, PageTable, Prefix
from .sequence import Chunk, Sequence

_order = attrgetter("order")


class _TooEarly(Exception):
    """What to do next depends on results that are still to come."""


@dataclass(frozen=True)
class Limits:
    """The most that a step can hold."""

    tokens: int
    sequences: int
    rows: int


class Scheduler:
    """Waiting and running sequences, both in order."""

    def __init__(self, kv: KVManager, limits: Limits) -> None:
        """Each running sequence needs a token and a row: raises InternalError if a step has fewer than sequences."""
        if min(limits.tokens, limits.rows) < limits.sequences:
            raise InternalError(f"a step of {limits} can't hold a token and a row for each of its sequences")
        self.kv = kv
        self.limits = limits
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.preemptions = 0
        self.prefix_queries = 0
        self.prefix_hits = 0
        self._lanes = list(range(limits.sequences - 1, -1, -1))
        self._blocked: tuple[tuple[int, int], int] | None = None
        self._ahead = False

    def add(self, sequence: Sequence) -> None:
        """Let a sequence wait for its turn."""
        insort(self.waiting, sequence, key=_order)

    def remove(self, sequence: Sequence, *, forget: bool = False) -> None:
        """Drop a sequence, running or waiting; with `forget`, what it computed can't be reused."""
        if sequence.table is None:
            del self.waiting[bisect_left(self.waiting, sequence.order, key=_order)]
            return
        del self.running[bisect_left(self.running, sequence.order, key=_order)]
        self._take_back(sequence, sequence.table, forget=forget)

    def restart(self, sequence: Sequence) -> None:
        """Take a running sequence's pages, so that it is computed again from its first token on."""
        self.remove(sequence)
        sequence.computed = sequence.drafts = 0
        self.add(sequence)

    def clear_running(self) -> None:
        """Drop all running sequences and every page's content."""
        for sequence in self.running:
            sequence.table = None
        self.running.clear()
        self.kv.reset()
        self._lanes = list(range(self.limits.sequences - 1, -1, -1))
        self._blocked = None

    def schedule(self, *, ahead: bool = False) -> list[Chunk]:
        """The chunks of the next step, each of another sequence; their sequences count them as computed.

        Empty if there is nothing to do, or, `ahead` of results, nothing that can be done before these are known.
        """
        try:
            chunks = self._choose(ahead)
        except _TooEarly:
            return []
        for chunk in chunks:
            sequence = chunk.sequence
            drafts = chunk.samples - 1 if chunk.samples > 1 else 0
            sequence.computed = chunk.start + chunk.count - drafts
            sequence.length += chunk.samples - drafts
            sequence.drafts = 0
        return chunks

    def _choose(self, ahead: bool) -> list[Chunk]:
        self._ahead = ahead
        self._yield_to_priority()
        active = [sequence for sequence in self.running if sequence.ready]
        decoding = [1 + sequence.drafts for sequence in active if sequence.length - sequence.computed == 1]
        budget = self.limits.tokens - sum(decoding)
        rows = self.limits.rows - len(self.running) - (sum(decoding) - len(decoding))
        preemptions = self.preemptions
        chunks: list[Chunk] = []
        for sequence in active:
            remaining, table = sequence.length - sequence.computed, sequence.table
            if remaining == 1 and table is not None and table.room > sequence.computed and not sequence.drafts:
                chunks.append(Chunk(sequence, table, sequence.computed, 1, 1))  # as `_advance` would, for less
                continue
            wanted = 1 + sequence.drafts if remaining == 1 else min(remaining, budget)
            chunk = self._advance(sequence, wanted, rows + 1 + sequence.drafts) if wanted else None
            if chunk is None:
                continue
            chunks.append(chunk)
            if remaining > 1:
                budget -= chunk.count
                rows -= max(0, chunk.scores + chunk.samples - 1)
        if preemptions == self.preemptions:
            self._admit_waiting(chunks, budget, rows)
        return chunks

    # --- running ------------------------------------------------------------------------------------------------------

    def _advance(self, sequence: Sequence, count: int, rows: int) -> Chunk | None:
        """The sequence's next chunk of at most `count` tokens and `rows` rows. If there is no page for it, sequences
        are preempted from the last one on; None if it was this one's turn."""
        while (table := sequence.table) is not None:
            fit = self.kv.grow(table, sequence.computed + count) - sequence.computed
            if fit > 0:
                return _chunk(sequence, table, fit, rows)
            if self._ahead:
                raise _TooEarly
            if len(self.running) == 1:
                raise InternalError(f"{sequence.length} tokens of a sequence alone do not fit into the cache")
            self._preempt(self.running[-1])
        return None

    def _preempt(self, sequence: Sequence) -> None:
        self.preemptions += 1
        sequence.preemptions += 1
        self.restart(sequence)

    def _take_back(self, sequence: Sequence, table: PageTable, *, forget: bool) -> None:
        keys = sequence.keys(sequence.tokens, table.settled)[: table.settled] if forget else ()
        self.kv.release(table, forget=keys)
        self._lanes.append(table.lane)
        sequence.table = None

    # --- admission ----------------------------------------------------------------------------------------------------

    def _yield_to_priority(self) -> None:
        """Preempt sequences that keep one of a better priority waiting."""
        while (
            self.waiting
            and self.running
            and self.waiting[0].order[0] < self.running[-1].order[0]
            and (not self._lanes or self._fitting_prefix(self.waiting[0]) is None)
        ):
            if self._ahead:
                raise _TooEarly
            self._preempt(self.running[-1])

    def _admit_waiting(self, chunks: list[Chunk], budget: int, rows: int) -> None:
        while self.waiting and self._lanes and budget > 0 and rows > 0:
            sequence = self.waiting[0]
            if self.running and self._blocked == (sequence.order, self.kv.releases):
                return
            prefix = self._fitting_prefix(sequence)
            if prefix is None:
                self._blocked = (sequence.order, self.kv.releases)
                return
            if self._computed_soon(sequence, prefix):
                return
            table = self._admit(sequence, prefix)
            count = self.kv.grow(table, min(sequence.length, prefix.tokens + budget)) - prefix.tokens
            chunk = _chunk(sequence, table, count, rows)
            chunks.append(chunk)
            budget -= chunk.count
            rows -= max(1, chunk.scores + chunk.samples)

    def _fitting_prefix(self, sequence: Sequence) -> Prefix | None:
        """The reusable prefix with which a waiting sequence can start, if there are pages for all its known tokens.

        Each running sequence may soon need one more page, so as many are left over. Alone it can always start.
        """
        kv = self.kv
        keys = sequence.keys(sequence.tokens, sequence.length // kv.page_tokens) if kv.prefix_cache else ()
        prefix = kv.find_prefix(keys, sequence.reusable)
        if kv.fits(prefix, sequence.length, self.limits.tokens, len(self.running)):
            return prefix
        return None if self.running else Prefix(0, ())

    def _computed_soon(self, sequence: Sequence, prefix: Prefix) -> bool:
        """Whether a running sequence is about to compute the page after the prefix, which is then worth waiting for."""
        page = prefix.tokens // self.kv.page_tokens
        if page >= len(prefix.keys) or prefix.tokens >= sequence.reusable:
            return False
        return any(
            other.settled <= page < other.known // self.kv.page_tokens
            and other.keys(other.tokens, page + 1)[page] == prefix.keys[page]
            for other in self.running
        )

    def _admit(self, sequence: Sequence, prefix: Prefix) -> PageTable:
        del self.waiting[0]
        insort(self.running, sequence, key=_order)
        table = sequence.table = self.kv.admit(self._lanes.pop(), prefix)
        sequence.computed = prefix.tokens
        if self.kv.prefix_cache and sequence.preemptions == 0:
            self.prefix_queries += sequence.length
            self.prefix_hits += prefix.tokens
            sequence.cached_tokens = prefix.tokens
        return table


def _chunk(sequence: Sequence, table: PageTable, count: int, rows: int) -> Chunk:
    """The next `count` tokens of a sequence, or fewer so that they need at most `rows` rows."""
    start, end = sequence.computed, sequence.computed + count
    samples = max(0, end - sequence.length + 1)
    if sequence.sampling.prompt_logprobs is None:
        return Chunk(sequence, table, start, count, samples)
    first, prompt_end = max(start, sequence.scored), sequence.prompt_length - 1
    scores = max(0, min(end, prompt_end) - first)
    if scores + samples > rows:
        scores, end, samples = rows, first + rows, 0
    return Chunk(sequence, table, start, end - start, samples, first, scores)
