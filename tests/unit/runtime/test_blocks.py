"""The page pool against a model of it."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from toolkit.runtime.errors import InternalError
from toolkit.runtime.kv.blocks import TRASH, PagePool

PAGES = 6


class PoolMachine(RuleBasedStateMachine):
    """Holders of pages as a counter, known content as a dict, and the order in which unused content was left."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = PagePool(PAGES)
        self.held: Counter[int] = Counter()
        self.content: dict[bytes, int] = {}
        self.unused: list[bytes] = []
        self.serial = 0

    @precondition(lambda self: sum(1 for count in self.held.values() if count) < PAGES - 1)
    @rule()
    def take(self) -> None:
        known = set(self.content.values())
        free = PAGES - 1 - len([page for page, count in self.held.items() if count]) - len(self.unused)
        page = self.pool.take()
        assert page != TRASH
        assert self.held[page] == 0
        if free:
            assert page not in known
        else:
            oldest = self.unused.pop(0)
            assert page == self.content.pop(oldest)
        self.held[page] = 1

    @precondition(lambda self: any(self.held.values()))
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        page = data.draw(st.sampled_from(sorted(page for page, count in self.held.items() if count)))
        self.pool.release(page)
        self.held[page] -= 1
        if not self.held[page]:
            self.unused += [key for key, owner in self.content.items() if owner == page]

    @precondition(lambda self: any(self.held.values()))
    @rule(data=st.data())
    def publish(self, data: st.DataObject) -> None:
        page = data.draw(st.sampled_from(sorted(page for page, count in self.held.items() if count)))
        self.serial += 1
        key = str(self.serial).encode()
        self.pool.publish(page, key)
        if page not in self.content.values():
            self.content[key] = page

    @precondition(lambda self: self.content)
    @rule(data=st.data())
    def publish_a_copy(self, data: st.DataObject) -> None:
        """Content that is known already stays with the page it has."""
        key = data.draw(st.sampled_from(sorted(self.content)))
        used = [page for page, count in self.held.items() if count]
        if used:
            self.pool.publish(data.draw(st.sampled_from(sorted(used))), key)

    @precondition(lambda self: self.content)
    @rule(data=st.data())
    def reuse(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.content)))
        page = self.pool.find(key)
        assert page == self.content[key]
        self.pool.retain(page)
        self.held[page] += 1
        if key in self.unused:
            self.unused.remove(key)

    @precondition(lambda self: self.content)
    @rule(data=st.data())
    def forget(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.content)))
        self.pool.forget(key)
        del self.content[key]
        if key in self.unused:
            self.unused.remove(key)

    @rule()
    def forget_unused(self) -> None:
        self.pool.forget_unused()
        for key in self.unused:
            del self.content[key]
        self.unused.clear()

    @invariant()
    def audited(self) -> None:
        self.pool.check(self.held)
        used = sum(1 for count in self.held.values() if count)
        assert self.pool.available == PAGES - 1 - used
        assert all(self.pool.is_used(page) == bool(self.held[page]) for page in range(PAGES))
        assert all(self.pool.find(key) == page for key, page in self.content.items())


TestPool = PoolMachine.TestCase
TestPool.settings = settings(deadline=None, max_examples=40, stateful_step_count=30)


def test_taking_too_much_and_releasing_too_often_are_our_fault() -> None:
    pool = PagePool(2)
    page = pool.take()
    with pytest.raises(InternalError):
        pool.take()
    pool.release(page)
    with pytest.raises(InternalError):
        pool.release(page)


def test_the_audit_notices_a_lost_page_and_a_wrong_count() -> None:
    pool = PagePool(4)
    page = pool.take()
    pool.check({page: 1})
    for holders in ({}, {page: 2}, {page: 1, 3 if page != 3 else 2: 1}):
        with pytest.raises(InternalError):
            pool.check(holders)
