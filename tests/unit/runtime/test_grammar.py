"""Structured output: what grammars allow token by token, in random outputs."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

import llguidance
import msgspec
import numpy as np
import pytest
from unit.runtime.engine_harness import Output, alone, depth, make_engine, make_request, run
from unit.runtime.fake_device import EOS, fake_plan
from unit.runtime.sample_plan import sample_plan

from toolkit.runtime import grammar
from toolkit.runtime.errors import InternalError, UserError
from toolkit.runtime.grammar import matcher_of, vocabulary_of
from toolkit.runtime.options import SpeculativeConfig
from toolkit.runtime.request import Add, Event
from toolkit.runtime.token_rules import TokenRules

SIZE, EOT = 300, 256
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


def allowed_by(rules: TokenRules, guess: Sequence[int] = ()) -> list[list[int]]:
    """The tokens after each of the guess."""
    words = np.zeros((1 + len(guess), -(-SIZE // 32)), np.uint32)
    rules.write(words, guess)
    return [np.flatnonzero(row[:SIZE]).tolist() for row in np.unpackbits(words.view(np.uint8), 1, bitorder="little")]


def write_tokens(vocabulary: llguidance.LLTokenizer, text: str, seed: int) -> list[int]:
    """A random output of a grammar; empty if it is too long."""
    random = np.random.default_rng(seed)
    output: list[int] = []
    rules = TokenRules(SIZE, matcher=matcher_of(vocabulary, text))
    for _ in range(400):
        (allowed,) = allowed_by(rules)
        token = EOT if EOT in allowed and random.random() < 0.3 else int(random.choice(allowed))
        if token == EOT:
            return output
        output.append(token)
        rules.push([token])
    return []


def write(vocabulary: llguidance.LLTokenizer, text: str, seed: int) -> str:
    """The text of such an output."""
    return b"".join(map(Words().token_bytes, write_tokens(vocabulary, text, seed))).decode()


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
    """As `Grammars`, with the fake model's vocabulary; compiled when `release` says."""

    def __init__(self, *, wait: bool = False) -> None:
        letters: Any = Letters()
        self.vocabulary, self.wait = vocabulary_of(letters, fake_plan()), wait
        self.asked: list[tuple[str, Future[llguidance.LLMatcher]]] = []

    def compile(self, text: str) -> Future[llguidance.LLMatcher]:
        self.asked.append((text, Future()))
        if not self.wait:
            self.release()
        return self.asked[-1][1]

    def release(self) -> None:
        for text, future in self.asked:
            if not future.done():
                try:
                    future.set_result(matcher_of(self.vocabulary, text))
                except UserError as error:
                    future.set_exception(error)

    def close(self) -> None: ...


PATTERNS = {"a": "[a-c]{3,9}", "b": "(xy){8,9}Z", "c": "[A-Z]{20}"}


def letters_of(tokens: Sequence[int]) -> str:
    return "".join(chr(60 + token) for token in tokens)


def bound_requests(**params: Any) -> list[Add]:
    """A request for each pattern, the first one drawn at random."""
    return [
        make_request(
            name,
            range(5 + index, 20),
            temperature=0.0 if index else 1.0,
            seed=7,
            grammar=grammar.of_regex(pattern),
            **({"max_tokens": 30} | params),
        )
        for index, (name, pattern) in enumerate(PATTERNS.items())
    ]


def check_bound(outputs: dict[str, Output]) -> None:
    for name, pattern in PATTERNS.items():
        output = outputs[name]
        assert output.finished is not None
        assert (output.finished.reason, output.finished.stop_token) == ("stop", EOS)
        assert re.fullmatch(pattern, letters_of(output.tokens[:-1]))


@pytest.mark.parametrize("pages", [14, 100])
def test_the_engine_keeps_to_grammars_beside_others_and_under_pressure(depth: int, pages: int) -> None:
    engine = make_engine(pages=pages, grammars=LetterGrammars())
    plain = make_request("plain", range(3, 12), max_tokens=20)
    outputs = run(engine, [*bound_requests(logprobs=2), plain])
    check_bound(outputs)
    assert outputs["plain"].result == alone(plain).result
    assert (engine.scheduler.preemptions > 0) == (pages == 14)
    for name in PATTERNS:
        assert [each.token for each in outputs[name].logprobs] == outputs[name].tokens


@pytest.mark.usefixtures("depth")
def test_guesses_are_checked_against_grammars() -> None:
    """Outputs are those without guesses, and some were right."""
    pattern = grammar.of_regex("(abcdefgh|lmnop[a-d])*")
    requests = [
        make_request(str(at), range(5 + at, 20), temperature=t, seed=at, grammar=pattern, max_tokens=40, logprobs=1)
        for at, t in enumerate((0.0, 1.0, 1.0, 0.0))
    ]
    expected = run(make_engine(grammars=LetterGrammars()), requests)
    for speculative in (
        SpeculativeConfig(method="ngram", num_speculative_tokens=4, prompt_lookup_max=2, adaptive=False),
        SpeculativeConfig(method="suffix", num_speculative_tokens=4, adaptive=False),
    ):
        engine = make_engine(grammars=LetterGrammars(), options={"speculative_config": speculative})
        outputs = run(engine, requests)
        assert {name: each.result for name, each in outputs.items()} == {n: e.result for n, e in expected.items()}
        assert engine.stats().spec_accepted_tokens > 5


def test_others_go_on_while_a_grammar_is_compiled(depth: int) -> None:
    grammars = LetterGrammars(wait=True)
    engine = make_engine(grammars=grammars)
    requests = bound_requests()
    for request in requests:
        engine.add(request)
    wrong = make_request("wrong", [5], grammar=grammar.of_regex("(("))
    engine.add(wrong)
    engine.add(make_request("gone", [5], grammar=grammar.of_regex("x")))
    with pytest.raises(InternalError, match="in use"):
        engine.add(wrong)
    plain = make_request("plain", range(3, 12), max_tokens=20)
    outputs = {request.request: Output() for request in [*requests, wrong, plain]}

    def take(events: list[Event]) -> None:
        for event in events:
            outputs.setdefault(getattr(event, "request", ""), Output()).take(event)

    engine.add(plain)
    while outputs["plain"].finished is None:
        take(engine.step())
    assert outputs["plain"].result == alone(plain).result
    engine.abort("gone")
    grammars.release()
    while engine.has_work:
        take(engine.step())
    check_bound(outputs)
    assert outputs["gone"].finished is not None
    assert outputs["gone"].finished.reason == "abort"
    error = outputs["wrong"].error
    assert error is not None
    assert error.user_fault


def test_a_grammar_that_is_complete_ends_before_min_tokens() -> None:
    engine = make_engine(grammars=LetterGrammars())
    request = make_request("x", [9, 8], min_tokens=10, max_tokens=20, grammar=grammar.of_regex("abc|[x-z]{3}"))
    output = run(engine, [request])["x"]
    assert output.finished is not None
    assert (len(output.tokens), output.finished.reason) == (4, "stop")
    longer = make_request("x", [9, 8], min_tokens=10, max_tokens=20, grammar=grammar.of_regex("[abc]*"))
    assert len(run(engine, [longer])["x"].tokens) > 10


def test_nothing_but_the_end_follows_the_end(vocabulary: llguidance.LLTokenizer) -> None:
    rules = TokenRules(SIZE, matcher=matcher_of(vocabulary, grammar.of_regex("a*")))
    for tokens in ([97, 97], [EOT], [EOT, EOT]):
        rules.push(tokens)
    assert allowed_by(rules) == [[EOT]]
    assert rules.problem == ""
    rules.push([98])
    assert allowed_by(rules) == [[]]
    assert "can't be followed" in rules.problem


@pytest.mark.parametrize("seed", range(3))
def test_masks_after_guesses_are_those_after_tokens(vocabulary: llguidance.LLTokenizer, seed: int) -> None:
    text = grammar.of_schema(SCHEMA)
    output = write_tokens(vocabulary, text, seed)
    plain, guessing = (TokenRules(SIZE, matcher=matcher_of(vocabulary, text)) for _ in range(2))
    masks = []
    for token in output:
        masks += allowed_by(plain)
        plain.push([token])
    masks += allowed_by(plain)
    at, random = 0, np.random.default_rng(seed)
    while at < len(output):
        guess = output[at : at + int(random.integers(5))]
        assert guessing.usable(guess) == len(guess)
        assert guessing.usable([*guess, 3]) == len(guess)
        assert allowed_by(guessing, guess) == masks[at : at + len(guess) + 1]
        guessing.push(taken := guess or output[at : at + 1])
        at += len(taken)
