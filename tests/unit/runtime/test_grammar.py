"""Structured output: what grammars allow token by token, in random outputs."""

from __future__ import annotations

import json
import re
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import llguidance
import msgspec
import numpy as np
import pytest
from unit.runtime.engine_harness import alone, depth, make_engine, make_request, run
from unit.runtime.fake_device import EOS, fake_plan
from unit.runtime.sample_plan import sample_plan

from toolkit.runtime import grammar
from toolkit.runtime.errors import UserError
from toolkit.runtime.grammar import Mask, vocabulary_of

SIZE = 300
__all__ = ["depth"]


class Words:
    """Bytes, then some words of several."""

    special = frozenset({256})
    words = ('{"', '":', "true", "an apple", " ", "}", "é")

    def token_bytes(self, token: int) -> bytes:
        if token < 256:
            return bytes([token])
        return self.words[token - 260].encode() if 260 <= token < 267 else b""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return list(text.encode())


@pytest.fixture(scope="module")
def vocabulary() -> llguidance.LLTokenizer:
    plan = sample_plan(b"library", b"weights", b"{}")
    model = msgspec.structs.replace(plan.model, vocab_size=SIZE)
    words: Any = Words()
    return vocabulary_of(words, msgspec.structs.replace(plan, model=model, eos_token_ids=(256,)))


def write(vocabulary: llguidance.LLTokenizer, text: str, seed: int) -> str:
    """A random output of a grammar."""
    random, output = np.random.default_rng(seed), b""
    with ThreadPoolExecutor(1) as pool:
        mask = Mask(llguidance.LLMatcher(vocabulary, text), SIZE, pool)
        for _ in range(400):
            mask.wait()
            allowed = np.flatnonzero(np.unpackbits(mask.words.view(np.uint8), bitorder="little")[:SIZE])
            token = 256 if 256 in allowed and random.random() < 0.3 else int(random.choice(allowed))
            if token == 256:
                return output.decode()
            output += Words().token_bytes(token)
            mask.push(token)
    return ""


SCHEMA = {
    "type": "object",
    "properties": {"a": {"enum": ["x", "yé"]}, "b": {"type": "array", "items": {"type": "boolean"}, "maxItems": 3}},
    "required": ["a", "b"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("seed", range(5))
def test_random_outputs_are_what_the_grammar_says(vocabulary: llguidance.LLTokenizer, seed: int) -> None:
    data = json.loads(write(vocabulary, grammar.of_schema(SCHEMA), seed))
    assert data.keys() == {"a", "b"}
    assert data["a"] in {"x", "yé"}
    assert len(data["b"]) <= 3
    assert all(type(item) is bool for item in data["b"])
    assert re.fullmatch("[ab]{2,5}c?", write(vocabulary, grammar.of_regex("[ab]{2,5}c?"), seed))
    choices = ["a b", "a.b*", "(x)", "é\n-"]
    assert write(vocabulary, grammar.of_choice(choices), seed) in choices
    lark = 'start: "f(" NUMBER ("," NUMBER)* ")"\nNUMBER: /[0-9]{1,2}/'
    assert re.fullmatch(r"f\(\d{1,2}(,\d{1,2})*\)", write(vocabulary, grammar.of_lark(lark), seed))


@pytest.mark.parametrize(
    "text", [grammar.of_regex("(("), grammar.of_schema({"type": "foo"}), grammar.of_lark("start: x")]
)
def test_wrong_grammars_are_named(text: str) -> None:
    assert grammar.check(text)


def test_right_grammars_pass() -> None:
    assert grammar.check(grammar.of_schema(SCHEMA)) == ""
    with pytest.raises(UserError, match="not empty"):
        grammar.of_choice(["a", ""])


class Letters:
    """The fake model's vocabulary as printable characters."""

    special = frozenset({EOS})

    def token_bytes(self, token: int) -> bytes:
        return bytes([60 + token])

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [byte - 60 for byte in text.encode()]


class LetterGrammars:
    """As `Grammars`, with the fake model's vocabulary."""

    def __init__(self, pool: ThreadPoolExecutor) -> None:
        letters: Any = Letters()
        self.vocabulary, self.pool = vocabulary_of(letters, fake_plan()), pool

    def start(self, text: str) -> Mask:
        return Mask(llguidance.LLMatcher(self.vocabulary, text), 64, self.pool)


@pytest.mark.parametrize("pages", [14, 100])
def test_the_engine_keeps_to_grammars_beside_others_and_under_pressure(depth: int, pages: int) -> None:
    with ThreadPoolExecutor(1) as pool:
        engine = make_engine(pages=pages, grammars=LetterGrammars(pool))
        patterns = {"a": "[a-c]{3,9}", "b": "(xy){8,9}Z", "c": "[A-Z]{20}"}
        requests = [
            make_request(
                name,
                range(5 + index, 20),
                temperature=0.0 if index else 1.0,
                seed=7,
                grammar=grammar.of_regex(pattern),
                max_tokens=30,
            )
            for index, (name, pattern) in enumerate(patterns.items())
        ]
        plain = make_request("plain", range(3, 12), max_tokens=20)
        outputs = run(engine, [*requests, plain])
    for name, pattern in patterns.items():
        output = outputs[name]
        assert output.finished is not None
        assert (output.finished.reason, output.finished.stop_token) == ("stop", EOS)
        assert re.fullmatch(pattern, "".join(chr(60 + token) for token in output.tokens[:-1]))
    assert outputs["plain"].result == alone(plain).result
    assert (engine.scheduler.preemptions > 0) == (pages == 14)
