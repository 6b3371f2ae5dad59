"""Tokens that are allowed, and sequences that are not."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from unit.runtime.engine_harness import alone, make_engine, make_request, run

from toolkit.runtime.errors import UserError
from toolkit.runtime.request import SamplingParams
from toolkit.runtime.token_rules import TokenRules

SIZE = 50
TOKEN = st.integers(0, SIZE - 1)


def allowed_by(rules: TokenRules, guess: Sequence[int] = ()) -> list[set[int]]:
    """After each token of the guess."""
    words = np.full((1 + len(guess), -(-SIZE // 32)), 0xABCD, np.uint32)
    rules.write(words, guess)
    bits = np.unpackbits(words.view(np.uint8), axis=1, bitorder="little")
    assert not bits[:, SIZE:].any()
    return [set(np.flatnonzero(row).tolist()) for row in bits]


@given(
    st.none() | st.lists(TOKEN, min_size=1, max_size=20),
    st.lists(st.lists(st.integers(0, 4), min_size=1, max_size=4), max_size=6),
    st.lists(st.integers(0, 4), max_size=30),
)
def test_no_forbidden_sequence_can_end(
    allowed: list[int] | None, forbidden: list[list[int]], output: list[int]
) -> None:
    rules = TokenRules(SIZE, allowed=allowed, forbidden=forbidden)
    expected = []
    for end in range(len(output) + 1):
        tokens = set(range(SIZE) if allowed is None else allowed)
        expected.append(tokens - {each[-1] for each in forbidden if [*output[:end], each[-1]][-len(each) :] == each})
    for end in range(len(output) + 1):
        rest = output[end:]
        right = [token in tokens for token, tokens in zip(rest, expected[end:], strict=False)]
        usable = (*right, False).index(False)
        assert rules.usable(rest) == usable
        guess = rest[: min(usable, 3)]
        assert allowed_by(rules, guess) == expected[end : end + 1 + len(guess)]
        if rest:
            rules.push(rest[:1])


@pytest.mark.parametrize("depth", [1, 2])
def test_outputs_keep_to_the_rules_beside_others(depth: int) -> None:
    rules: list[dict[str, Any]] = [
        {"allowed_token_ids": (7, 9, 11)},
        {"bad_token_ids": ((5,), (6, 7), (8, 9, 10))},
        {},
        {"allowed_token_ids": (5, 6, 7), "bad_token_ids": ((5, 5), (6, 6))},
    ]
    requests = [
        make_request(str(index), [5, 6 + index], max_tokens=30, temperature=2.0, seed=index, ignore_eos=True, **each)
        for index, each in enumerate(rules)
    ]
    outputs = run(make_engine(depth=depth, pages=9), requests)
    for request, each in zip(requests, rules, strict=True):
        tokens = outputs[request.request].tokens
        assert len(tokens) == 30
        assert tokens == alone(request).tokens
        assert set(tokens) <= set(each.get("allowed_token_ids", tokens))
        for bad in each.get("bad_token_ids", ()):
            assert bad not in {tuple(tokens[at : at + len(bad)]) for at in range(len(tokens))}


def test_wrong_rules_are_refused() -> None:
    for wrong in ({"allowed_token_ids": ()}, {"bad_words": ("",)}, {"bad_token_ids": ((),)}):
        with pytest.raises(UserError, match="must not be empty"):
            SamplingParams(**wrong)
    (output,) = run(make_engine(), [make_request("a", [5], bad_token_ids=((5, 64),))]).values()
    assert output.error is not None
    assert output.error.user_fault
