"""Prefix keys and the longest prefix, against definitions."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from toolkit.runtime.kv.blocks import PagePool
from toolkit.runtime.kv.prefix import PageKeys, first_page, longest_prefix


@given(
    first=st.lists(st.integers(0, 2), min_size=12, max_size=12),
    second=st.lists(st.integers(0, 2), min_size=12, max_size=12),
    salts=st.tuples(st.sampled_from(["", "a"]), st.sampled_from(["", "a"])),
    page_tokens=st.sampled_from([1, 2, 3, 4]),
)
def test_keys_are_equal_exactly_for_equal_prefixes_of_equal_salt(
    first: list[int], second: list[int], salts: tuple[str, str], page_tokens: int
) -> None:
    pages = 12 // page_tokens
    keys = [
        PageKeys(salt, page_tokens)(np.array(tokens, np.int32), pages)
        for salt, tokens in zip(salts, (first, second), strict=True)
    ]
    for page in range(pages):
        end = (page + 1) * page_tokens
        assert (keys[0][page] == keys[1][page]) == (salts[0] == salts[1] and first[:end] == second[:end])


def test_keys_grow_with_the_sequence() -> None:
    tokens = np.arange(12, dtype=np.int32)
    keys = PageKeys("", 4)
    assert len(keys(tokens, 1)) == 1
    assert keys(tokens, 3) == PageKeys("", 4)(tokens, 3)
    assert len(keys(tokens, 2)) == 3


def can_use(tokens: int, held: list[bool], window: int, page_tokens: int) -> bool:
    """Whether each position that the next token, number `tokens`, reads before itself is in a page that is held."""
    positions = range(max(0, tokens - window + 1) if window else 0, tokens)
    return all(held[position // page_tokens] for position in positions)


@given(
    held=st.integers(1, 3).flatmap(
        lambda groups: st.lists(st.lists(st.booleans(), min_size=6, max_size=6), min_size=groups, max_size=groups)
    ),
    windows=st.lists(st.sampled_from([0, 1, 2, 5, 7, 100]), min_size=3, max_size=3),
    limit=st.integers(1, 30),
    page_tokens=st.sampled_from([1, 3, 4]),
)
def test_longest_prefix_is_the_longest_that_every_group_can_use(
    held: list[list[bool]], windows: list[int], limit: int, page_tokens: int
) -> None:
    keys = [str(page).encode() for page in range(6)]
    pools = []
    for group in held:
        pool = PagePool(10)
        for key, there in zip(keys, group, strict=True):
            if there:
                pool.publish(pool.take(), key)
        pools.append(pool)
    candidates = {count * page_tokens for count in range(7)} | ({limit} if limit <= 6 * page_tokens else set())
    groups = list(zip(held, windows, strict=False))
    expected = max(
        tokens
        for tokens in candidates
        if tokens <= limit
        and all(can_use(tokens, group, window, page_tokens) for group, window in groups)
        # The page that is used in part must be held, for it is copied.
        and (tokens % page_tokens == 0 or all(group[tokens // page_tokens] for group, _ in groups))
    )
    assert longest_prefix(keys, pools, windows[: len(pools)], page_tokens, limit) == expected


def test_first_page() -> None:
    assert [first_page(tokens, 0, 4) for tokens in (0, 5, 100)] == [0, 0, 0]
    # With window 5 the token after 9 others, position 9, reads positions 5 to 9.
    assert first_page(9, 5, 4) == 1
    assert first_page(11, 5, 4) == 1
    assert first_page(12, 5, 4) == 2
    assert first_page(3, 1, 4) == 0
    assert first_page(4, 1, 4) == 1
