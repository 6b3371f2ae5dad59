"""Answers of the OpenAI API as JSON bytes, whole and as server-sent events.

What is equal in all chunks of a stream is encoded once, so that a token costs one small encoding and a join.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
from starlette.responses import Response

from ..output import Delta, TokenTexts
from ..request import RequestMetrics, TokenLogprob

DONE = b"data: [DONE]\n\n"
_LOWEST = -9999.0  # JSON has no infinity
_encode = msgspec.json.encode


def json_response(data: Any, status: int = 200) -> Response:
    """JSON data as a response."""
    return Response(_encode(data), status, media_type="application/json")


def event(data: Any) -> bytes:
    """One server-sent event."""
    return b"data: " + _encode(data) + b"\n\n"


def typed_event(data: dict[str, Any]) -> bytes:
    """One server-sent event with its `type` as the event's name, as Anthropic's and the Responses API have them."""
    kind: str = data["type"]
    return b"event: " + kind.encode() + b"\n" + event(data)


class Usage:
    """Counts the tokens of an answer."""

    def __init__(self, prompt_tokens: int) -> None:
        self.prompt_tokens = prompt_tokens
        self.completion_tokens = 0
        self._cached: int | None = None

    def add(self, delta: Delta) -> None:
        self.completion_tokens += len(delta.token_ids)
        if delta.metrics is not None:
            self.cached(delta.metrics)

    def cached(self, metrics: RequestMetrics) -> None:
        """Prompt tokens found in the cache; choices of one prompt share it, so the first choice's count holds."""
        if self._cached is None:
            self._cached = metrics.cached_tokens

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens found in the cache, as far as is known."""
        return self._cached or 0

    def data(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": None if self._cached is None else {"cached_tokens": self._cached},
        }


# --- log-probabilities ------------------------------------------------------------------------------------------------


def chat_logprobs(entries: Sequence[TokenLogprob], texts: TokenTexts) -> dict[str, Any]:
    """The `logprobs` of a chat choice."""

    def named(token: int, logprob: float) -> dict[str, Any]:
        return {"token": texts(token), "logprob": max(logprob, _LOWEST), "bytes": texts.bytes(token)}

    return {
        "content": [
            {**named(entry.token, entry.logprob), "top_logprobs": [named(*alternative) for alternative in entry.top]}
            for entry in entries
        ],
        "refusal": None,
    }


class CompletionLogprobs:
    """The `logprobs` of a completion's pieces; remembers where the next token's text starts."""

    def __init__(self, texts: TokenTexts) -> None:
        self._texts = texts
        self._offset = 0

    def piece(self, tokens: Sequence[int], entries: Sequence[TokenLogprob | None]) -> dict[str, Any]:
        """The log-probabilities of these tokens; the first token of a prompt has none."""
        names = [self._texts(token) for token in tokens]
        offsets = []
        for name in names:
            offsets.append(self._offset)
            self._offset += len(name)
        return {
            "text_offset": offsets,
            "token_logprobs": [None if entry is None else max(entry.logprob, _LOWEST) for entry in entries],
            "tokens": names,
            "top_logprobs": [None if entry is None else self._top(entry) for entry in entries],
        }

    def _top(self, entry: TokenLogprob) -> dict[str, float]:
        top: dict[str, float] = {}
        for token, logprob in (*entry.top, (entry.token, entry.logprob)):
            top.setdefault(self._texts(token), max(logprob, _LOWEST))
        return top


def prompt_logprobs(entries: Sequence[TokenLogprob | None], texts: TokenTexts) -> list[dict[str, Any] | None]:
    """vLLM's `prompt_logprobs`: a position each, by token id."""

    def position(entry: TokenLogprob) -> dict[str, Any]:
        ranked = [(token, logprob, rank) for rank, (token, logprob) in enumerate(entry.top, 1)]
        return {
            str(token): {"logprob": max(logprob, _LOWEST), "rank": rank, "decoded_token": texts(token)}
            for token, logprob, rank in [(entry.token, entry.logprob, entry.rank), *ranked]
        }

    return [None if entry is None else position(entry) for entry in entries]


# --- streams ----------------------------------------------------------------------------------------------------------


class Chunks:
    """The chunks of one stream. `kind` is the object's name; usage is in every chunk, null, or left out."""

    def __init__(self, head: dict[str, Any], *, with_usage: bool, usage: Usage | None = None) -> None:
        self._head = head
        self._start = b"data: " + _encode(head)[:-1] + b',"choices":[{"index":'
        self._end = b'}],"usage":null}\n\n' if with_usage else b"}]}\n\n"
        self._usage = usage

    def chunk(
        self,
        index: int,
        content: bytes,
        logprobs: bytes,
        delta: Delta,
        extra: bytes = b"",
        *,
        reason: str | None = None,
    ) -> bytes:
        """One chunk; `content` is the field that holds the text, encoded."""
        ending = b"null"
        if delta.finish_reason is not None:
            ending = _encode(reason or delta.finish_reason) + b',"stop_reason":' + _encode(delta.stop_reason)
        parts = (self._start, b"%d," % index, content, b',"logprobs":', logprobs, b',"finish_reason":', ending, extra)
        return b"".join((*parts, self._tail()))

    def first(self, index: int, content: bytes, extra: bytes = b"") -> bytes:
        """A chunk before any token."""
        parts = (self._start, b"%d," % index, content, b',"logprobs":null,"finish_reason":null', extra)
        return b"".join((*parts, self._tail()))

    def usage(self, usage: Usage) -> bytes:
        """The last chunk of a stream with usage."""
        return event({**self._head, "choices": [], "usage": usage.data()})

    def _tail(self) -> bytes:
        if self._usage is None:
            return self._end
        return b'}],"usage":' + _encode(self._usage.data()) + b"}\n\n"


def text_field(text: str) -> bytes:
    """Where completions have their text."""
    return b'"text":' + _encode(text)


def delta_field(delta: dict[str, Any]) -> bytes:
    """Where chat has what a chunk adds."""
    return b'"delta":' + _encode(delta)


ROLE_FIELD = b'"delta":{"role":"assistant","content":""}'


def ids_field(name: str, ids: Iterable[int]) -> bytes:
    """An extra field with token ids."""
    return b',"' + name.encode() + b'":' + _encode(list(ids))
