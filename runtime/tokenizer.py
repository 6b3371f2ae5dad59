"""Text to token ids and back, with the plan's own tokenizer.json and the `tokenizers` library alone.

Streams are decoded exactly: whatever pieces the ids arrive in, the texts joined equal the whole output's text, and no
piece ends inside a character.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from .errors import UserError, foreign_errors
from .plan import Plan

if TYPE_CHECKING:
    import tokenizers

FILE = "tokenizer.json"


class IncrementalDecoder(Protocol):
    """Decodes one output as its ids arrive."""

    def push(self, ids: Sequence[int]) -> str:
        """The text that these ids complete."""

    def flush(self) -> str:
        """What was kept back, at the end of the output."""


class Tokenizer:
    """A plan's tokenizer; safe to share between threads."""

    def __init__(self, backend: tokenizers.Tokenizer, vocab_size: int) -> None:
        self._backend = backend
        self._limit = vocab_size if backend.get_vocab_size(with_added_tokens=True) > vocab_size else None
        added = backend.get_added_tokens_decoder()
        self.special = {id_ for id_, token in added.items() if token.special}
        self.special_texts = tuple(sorted({added[id_].content for id_ in self.special} - {""}, key=len, reverse=True))
        """What special tokens are written as, the longest first."""
        self._byte_level = _is_byte_level(backend)
        self._bytes: dict[int, bytes] = {}

    @classmethod
    def open(cls, directory: Path, plan: Plan) -> Tokenizer:
        """The tokenizer of a plan. Raises UserError if it has none or it is damaged."""
        import tokenizers

        path = directory / FILE
        if plan.text is None or not path.is_file():
            raise UserError(f"{directory} has no {FILE}: it is a token-in, token-out plan, so give token ids")
        with foreign_errors(f"{path} is damaged ({{}}): compile the plan again"):
            backend = tokenizers.Tokenizer.from_file(str(path))
        return cls(backend, plan.model.vocab_size)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text; with `add_special_tokens` those that the model wants around a plain prompt are added.

        Raises UserError for a text that is no valid Unicode or holds a token that the model has no embedding for, and
        for a tokenizer that fails on it.
        """
        with foreign_errors("the plan's tokenizer.json can't encode this prompt ({}): correct it and compile again"):
            try:
                ids: list[int] = self._backend.encode(text, add_special_tokens=add_special_tokens).ids
            except (UnicodeEncodeError, TypeError):
                raise UserError("the prompt holds half a surrogate pair: send valid Unicode text") from None
        if self._limit is not None and ids and max(ids) >= self._limit:
            token = self._backend.id_to_token(max(ids))
            raise UserError(f"the prompt holds the token {token!r}, which this model doesn't know: remove it")
        return ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of a whole output. Bytes that are no UTF-8 become U+FFFD.

        Raises UserError for a tokenizer that fails on it.
        """
        return _decode(self._backend, ids, skip_special_tokens)

    def incremental(self, skip_special_tokens: bool = True) -> IncrementalDecoder:
        """A decoder for one output."""
        skipped = frozenset(self.special if skip_special_tokens else ())
        if self._byte_level:
            return _ByteDecoder(self.token_bytes, skipped)
        return _WindowDecoder(self._backend, skipped)

    def token_bytes(self, token: int) -> bytes:
        """The bytes that one token stands for; empty for an id that no token has."""
        known = self._bytes.get(token)
        if known is None:
            known = self._bytes[token] = self._spell(self._backend.id_to_token(token) or "")
        return known

    def _spell(self, token: str) -> bytes:
        if self._byte_level:
            # A token with a character outside the alphabet, such as a space, stands for its own text.
            return bytes(map(_ALPHABET.__getitem__, token)) if _ALPHABET.keys() >= set(token) else token.encode()
        match = _BYTE_TOKEN.fullmatch(token)
        return bytes([int(match[1], 16)]) if match else token.replace("▁", " ").encode()


def _decode(backend: tokenizers.Tokenizer, ids: Sequence[int], skip_special_tokens: bool) -> str:
    with foreign_errors("the plan's tokenizer.json can't decode this output ({}): correct it and compile again"):
        text: str = backend.decode(list(ids), skip_special_tokens=skip_special_tokens)
    return text


_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")


def _alphabet() -> dict[str, int]:
    """The characters by which byte-level vocabularies spell bytes: themselves where printable, else from U+0100 on."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + index): byte for index, byte in enumerate(others)}


_ALPHABET = _alphabet()


def _is_byte_level(backend: tokenizers.Tokenizer) -> bool:
    decoder: Any = backend.decoder
    steps = json.loads(decoder.__getstate__()) if decoder is not None else {}
    return [step["type"] for step in steps.get("decoders", [steps] if steps else [])] == ["ByteLevel"]


class _ByteDecoder:
    """Byte-level vocabularies: the output is a stream of UTF-8 bytes."""

    def __init__(self, spell: Callable[[int], bytes], skipped: frozenset[int]) -> None:
        self._spell, self._skipped = spell, skipped
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, ids: Sequence[int]) -> str:
        return self._utf8.decode(b"".join(self._spell(id_) for id_ in ids if id_ not in self._skipped))

    def flush(self) -> str:
        return self._utf8.decode(b"", final=True)


class _WindowDecoder:
    """All other vocabularies: new ids are decoded after the last one shown, which gives them their context.

    A run of byte tokens (`<0xE2>`) is decoded as a whole: if it is not valid, every byte of it becomes U+FFFD. So a run
    is kept back until it ends.
    """

    def __init__(self, backend: tokenizers.Tokenizer, skipped: frozenset[int]) -> None:
        self._backend, self._skipped = backend, skipped
        self._context: list[int] = []
        self._run: list[int] = []

    def push(self, ids: Sequence[int]) -> str:
        tokens = {id_: token for id_ in ids if (token := self._backend.id_to_token(id_)) is not None}
        shown = [id_ for id_ in ids if id_ in tokens and id_ not in self._skipped]
        end = len(shown)
        while end and _BYTE_TOKEN.fullmatch(tokens[shown[end - 1]]):
            end -= 1
        if end == 0:
            self._run += shown
            return ""
        text = self._after_context(self._run + shown[:end])
        self._context, self._run = shown[end - 1 : end], shown[end:]
        return text

    def flush(self) -> str:
        text = self._after_context(self._run)
        self._run = []
        return text

    def _after_context(self, ids: list[int]) -> str:
        before, text = (_decode(self._backend, part, False) for part in (self._context, self._context + ids))
        return text[len(before) :]
