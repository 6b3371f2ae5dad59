"""Tokens to text: incremental detokenization, stop strings across token boundaries, and log-probabilities by token.

A request's events pass through one `OutputStream`, which yields a `Delta` each: what became visible. Streamed deltas
joined are equal to the whole output, wherever the events were cut.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Protocol

import msgspec

from .errors import InternalError, UserError
from .request import Add, Error, Event, Finished, FinishReason, RequestMetrics, TokenLogprob, Tokens


class IncrementalDecoder(Protocol):
    """Turns ids into text piece by piece, keeping back what is not yet a whole character."""

    def push(self, ids: Sequence[int]) -> str:
        """The text that these ids complete."""

    def flush(self) -> str:
        """What was kept back."""


class Detokenizer(Protocol):
    """The half of a tokenizer that outputs need."""

    def incremental(self, skip_special_tokens: bool = True) -> IncrementalDecoder:
        """A decoder for one output."""

    def token_bytes(self, token: int) -> bytes:
        """The bytes that one token stands for."""


# --- stop strings -----------------------------------------------------------------------------------------------------


class StopStrings:
    """Finds the stop string that is complete first in a text that arrives in pieces.

    Only text that may be the start of a stop string is kept back. Each stop string is matched by its own
    Knuth-Morris-Pratt automaton, so that a character costs a few operations whatever the strings are, and the result
    does not depend on how the text is cut. Of several strings complete at one character the longest counts.
    """

    def __init__(self, stops: Sequence[str], *, include: bool = False) -> None:
        self.matched: str | None = None
        self._stops = sorted(set(stops), key=len, reverse=True)
        self._failures = [_failures(stop) for stop in self._stops]
        self._lengths = [0] * len(self._stops)  # characters of each stop string matched at the end of the text
        self._held = ""
        self._include = include

    def push(self, text: str) -> str:
        """The text that is now certain to be output. After a match there is none."""
        if self.matched is not None:
            return ""
        text = self._held + text
        for end in range(len(self._held) + 1, len(text) + 1):
            matched = self._advance(text[end - 1])
            if matched is not None:
                self.matched, self._held = matched, ""
                return text[: end if self._include else end - len(matched)]
        certain = len(text) - max(self._lengths, default=0)
        self._held = text[certain:]
        return text[:certain]

    def flush(self) -> str:
        """The text kept back, at the end of the output."""
        text, self._held = self._held, ""
        return text

    def _advance(self, char: str) -> str | None:
        complete = None
        for index, stop in enumerate(self._stops):
            length, failures = self._lengths[index], self._failures[index]
            while length and stop[length] != char:
                length = failures[length - 1]
            length += stop[length] == char
            self._lengths[index] = length
            if length == len(stop) and complete is None:
                complete = stop
        return complete


def _failures(pattern: str) -> list[int]:
    """For each prefix of the pattern, the length of its longest proper suffix that is also a prefix."""
    table = [0] * len(pattern)
    length = 0
    for index in range(1, len(pattern)):
        while length and pattern[length] != pattern[index]:
            length = table[length - 1]
        length += pattern[length] == pattern[index]
        table[index] = length
    return table


# --- one output -------------------------------------------------------------------------------------------------------


class Delta(msgspec.Struct):
    """What one engine event adds to an output. `finish_reason` is set on the last one."""

    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprob] | None = None
    """As many as `token_ids`, if asked for."""
    prompt_logprobs: list[TokenLogprob | None] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    """The stop string, or the id of the stop token other than the model's own end, that ended the output."""
    metrics: RequestMetrics | None = None
    """On the first delta with tokens, as of then, and on the last one that the engine ended."""


class OutputStream:
    """Turns the events of one request into deltas.

    The token that ends an output (end of text or a stop id) is among the ids but not in the text, except with
    `include_stop_str_in_output`. Stop strings count once `min_tokens` tokens are there.
    """

    def __init__(self, command: Add, tokenizer: Detokenizer | None) -> None:
        params = command.params
        if tokenizer is None and params.stop:
            raise UserError("this plan has no tokenizer, so it can't look for stop strings: use stop_token_ids")
        self._decoder = tokenizer.incremental(params.skip_special_tokens) if tokenizer else None
        self._stops = StopStrings(params.stop, include=params.include_stop_str_in_output) if params.stop else None
        self._stop_ids = frozenset(params.stop_token_ids)
        self._hidden = self._stop_ids | frozenset(command.eos) if not params.include_stop_str_in_output else frozenset()
        self._pending: list[int] = []  # a token that may have ended the output: shown once it is known that it didn't
        self._min_tokens = params.min_tokens
        self._count = 0

    def push(self, event: Event) -> Delta:
        """What the event adds.

        Raises:
            UserError: the engine refused the request.
            InternalError: the engine failed.
        """
        if isinstance(event, Tokens):
            return self._tokens(event)
        if isinstance(event, Finished):
            return self._finish(event)
        if isinstance(event, Error):
            raise (UserError if event.user_fault else InternalError)(event.message)
        raise InternalError(f"event {type(event).__name__} is not one of a request")

    def _tokens(self, event: Tokens) -> Delta:
        tokens, logprobs = event.tokens, event.logprobs
        text = self._show(self._pending)[0]
        self._pending = tokens[-1:] if tokens and tokens[-1] in self._hidden else []
        shown, used = self._show(tokens[: len(tokens) - len(self._pending)])
        delta = Delta(text + shown, tokens, logprobs, event.prompt_logprobs, metrics=event.metrics)
        if self._stops is not None and self._stops.matched is not None:
            # The ids end with the one that completes the stop string.
            delta.token_ids = tokens[:used]
            delta.logprobs = logprobs[:used] if logprobs is not None else None
            delta.finish_reason, delta.stop_reason = "stop", self._stops.matched
        return delta

    def _show(self, tokens: list[int]) -> tuple[str, int]:
        """The text that these tokens make visible, and how many of them came until a stop string was complete."""
        if self._decoder is None:
            return "", len(tokens)
        if self._stops is None:
            return (self._decoder.push(tokens) if tokens else ""), len(tokens)
        pieces: list[str] = []
        for used, token in enumerate(tokens):
            if self._stops.matched is not None:
                return "".join(pieces), used
            self._count += 1
            pieces.append(self._until_stop(self._decoder.push([token])))
        return "".join(pieces), len(tokens)

    def _until_stop(self, text: str) -> str:
        assert self._stops is not None
        return self._stops.push(text) if self._count >= self._min_tokens else text

    def _finish(self, event: Finished) -> Delta:
        ended = event.stop_token is not None and self._pending == [event.stop_token]
        text = "" if ended else self._show(self._pending)[0]
        text += self._flush()
        if self._stops is not None and self._stops.matched is not None:
            return Delta(text, [], None, None, "stop", self._stops.matched, event.metrics)
        stop_reason = event.stop_token if event.stop_token in self._stop_ids else None
        return Delta(text, [], None, None, event.reason, stop_reason, event.metrics)

    def _flush(self) -> str:
        text = self._decoder.flush() if self._decoder else ""
        return self._until_stop(text) + self._stops.flush() if self._stops is not None else text


class Output:
    """Collects the deltas of one output."""

    def __init__(self) -> None:
        self._pieces: list[str] = []
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprob] = []
        self.prompt_logprobs: list[TokenLogprob | None] | None = None
        self.finish_reason: FinishReason | None = None
        self.stop_reason: str | int | None = None
        self.metrics: RequestMetrics | None = None

    def add(self, delta: Delta) -> None:
        self._pieces.append(delta.text)
        self.token_ids += delta.token_ids
        self.logprobs += delta.logprobs or []
        if delta.prompt_logprobs is not None:
            self.prompt_logprobs = delta.prompt_logprobs
        self.metrics = delta.metrics or self.metrics
        if delta.finish_reason is not None:
            self.finish_reason, self.stop_reason = delta.finish_reason, delta.stop_reason

    @property
    def text(self) -> str:
        return "".join(self._pieces)

    @property
    def mean_logprob(self) -> float:
        """Log-probability a token, by which outputs of different length compare."""
        return sum(entry.logprob for entry in self.logprobs) / max(1, len(self.logprobs))


# --- log-probabilities ------------------------------------------------------------------------------------------------


def logprob_table(entry: TokenLogprob) -> dict[int, float]:
    """A position's log-probabilities by token id: the token itself first, then the alternatives from the likeliest;
    or the whole vocabulary's in order of id."""
    if entry.row:
        return dict(enumerate(struct.unpack(f"<{len(entry.row) // 4}f", entry.row)))
    return {entry.token: entry.logprob} | dict(entry.top)


class TokenTexts:
    """The text and bytes of single tokens, as log-probabilities name them; remembered, for they repeat."""

    def __init__(self, tokenizer: Detokenizer | None) -> None:
        self._tokenizer = tokenizer
        self._known: dict[int, tuple[str, list[int] | None]] = {}

    def __call__(self, token: int) -> str:
        """The token's text; bytes that are not UTF-8 alone become U+FFFD."""
        return self._entry(token)[0]

    def bytes(self, token: int) -> list[int] | None:
        """The token's bytes, by which pieces of a character can be joined; None without a tokenizer."""
        return self._entry(token)[1]

    def _entry(self, token: int) -> tuple[str, list[int] | None]:
        entry = self._known.get(token)
        if entry is None:
            entry = self._known[token] = self._look_up(token)
        return entry

    def _look_up(self, token: int) -> tuple[str, list[int] | None]:
        if self._tokenizer is None:
            return f"token_id:{token}", None
        data = self._tokenizer.token_bytes(token)
        return data.decode("utf-8", "replace"), list(data)
