"""Structured output: grammars compiled by llguidance, which say for each next token whether it is allowed.

A grammar is text of llguidance's own: JSON with a schema, a regular expression or a Lark grammar. The front end checks
it; the engine compiles it once for all requests that have it, in a thread, while other requests go on.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .errors import UserError, brief, foreign_errors
from .plan import Plan

if TYPE_CHECKING:
    import llguidance

    from .tokenizer import Tokenizer

CACHED = 64
"""Compiled grammars that are kept."""
_WHITESPACE = r"[ \n]{0,8}"
"""Between the tokens of JSON, bounded so that a model can't write white space forever."""


# --- grammars as text -------------------------------------------------------------------------------------------------


def of_schema(schema: Any) -> str:
    """JSON text that a JSON schema allows."""
    import llguidance

    if not isinstance(schema, dict | str):
        raise UserError("a JSON schema must be an object")
    try:
        return llguidance.LLMatcher.grammar_from_json_schema(schema, overrides={"whitespace_pattern": _WHITESPACE})
    except (ValueError, RecursionError) as error:
        raise UserError(f"the JSON schema can't be used: {brief(error)}") from None


def of_regex(pattern: str) -> str:
    """Text that a regular expression, in Rust's notation, matches as a whole."""
    import llguidance

    return llguidance.LLMatcher.grammar_from_regex(pattern)


def of_choice(choices: Sequence[str]) -> str:
    """One of these texts."""
    if not choices or not all(choices):
        raise UserError("a choice needs one or more texts that are not empty")
    return of_regex("|".join(map(re.escape, choices)))


def of_lark(grammar: str) -> str:
    """Text of a Lark grammar."""
    import llguidance

    return llguidance.LLMatcher.grammar_from_lark(grammar)


@lru_cache(CACHED)
def check(grammar: str) -> str:
    """What is wrong with a grammar; "" if nothing is."""
    import llguidance

    with foreign_errors("it can't be read: {}"):
        failed, messages = llguidance.LLMatcher.validate_grammar_with_warnings(grammar)
    return brief(messages[0]) if failed else ""


# --- grammars of a plan -----------------------------------------------------------------------------------------------


class Grammars:
    """A plan's grammars, compiled in a thread. The vocabulary is read when the first is asked for."""

    def __init__(self, directory: Path, plan: Plan) -> None:
        self._directory, self._plan = directory, plan
        self._pool = ThreadPoolExecutor(1, "grammar")
        self._tokenizer: llguidance.LLTokenizer | None = None
        self._compiled: OrderedDict[str, Future[llguidance.LLMatcher]] = OrderedDict()

    def compile(self, grammar: str) -> Future[llguidance.LLMatcher]:
        """A matcher to copy for each output: UserError if the grammar is wrong or the plan has no tokenizer."""
        if grammar not in self._compiled:
            self._compiled[grammar] = self._pool.submit(self._compile, grammar)
        self._compiled.move_to_end(grammar)
        while len(self._compiled) > CACHED:
            self._compiled.popitem(last=False)
        return self._compiled[grammar]

    def _compile(self, grammar: str) -> llguidance.LLMatcher:
        if self._tokenizer is None:
            from .tokenizer import Tokenizer

            self._tokenizer = vocabulary_of(Tokenizer.open(self._directory, self._plan), self._plan)
        return matcher_of(self._tokenizer, grammar)

    def close(self) -> None:
        """End the thread."""
        self._pool.shutdown(cancel_futures=True)


def matcher_of(tokenizer: llguidance.LLTokenizer, grammar: str) -> llguidance.LLMatcher:
    """What says which tokens a grammar allows. Raises UserError if the grammar is wrong."""
    import llguidance

    with foreign_errors("the grammar can't be used: {}"):
        matcher = llguidance.LLMatcher(tokenizer, grammar, log_level=0)
    if matcher.is_error():
        raise UserError(f"the grammar can't be used: {brief(matcher.get_error())}")
    return matcher


class _Vocabulary:
    """What llguidance wants to know of a tokenizer."""

    def __init__(self, tokenizer: Tokenizer, plan: Plan) -> None:
        special = tokenizer.special | set(plan.eos_token_ids)
        size = plan.model.vocab_size
        self.eos_token_id = plan.eos_token_ids[0]
        self.bos_token_id = None
        self.special_token_ids = sorted(token for token in special if token < size)
        # Special tokens are no text: a byte that UTF-8 has not sets them apart.
        self.tokens = [
            b"\xff" * (token in special) + (tokenizer.token_bytes(token) or b"\xff[%d]" % token)
            for token in range(size)
        ]
        self._tokenizer = tokenizer

    def __call__(self, text: str) -> list[int]:
        if not isinstance(text, str):
            raise TypeError("text only")
        return self._tokenizer.encode(text, False)


def vocabulary_of(tokenizer: Tokenizer, plan: Plan) -> llguidance.LLTokenizer:
    """The plan's vocabulary in llguidance's terms. Raises UserError if no token ends an output."""
    import llguidance

    if not plan.eos_token_ids:
        raise UserError("this plan has no token that ends an output, so structured output can't end: send stop instead")
    wrapper = llguidance.TokenizerWrapper(_Vocabulary(tokenizer, plan))
    return llguidance.LLTokenizer(wrapper, eos_token=list(plan.eos_token_ids))
