"""The runtime tokenizer: ids and text as the library has them, and streams that equal the whole output."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend
from tokenizers.models import BPE, Unigram, WordLevel, WordPiece
from unit.runtime.sample_plan import sample_plan

from toolkit.runtime.errors import UserError
from toolkit.runtime.plan import Plan, Text
from toolkit.runtime.tokenizer import Tokenizer

BYTES = {f"<0x{byte:02X}>": 3 + byte for byte in range(256)}
EXAMPLES = settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def byte_level() -> Backend:
    """Every byte, some pairs of bytes that cut characters apart, and added tokens."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    source = random.Random(0)
    pairs = sorted({source.choice(letters) + source.choice(letters) for _ in range(200)})
    spelled = [piece for piece, _ in pre_tokenizers.ByteLevel(add_prefix_space=False).pre_tokenize_str("中文🙂é")]
    pairs += ["".join(spelled)[i : i + 2] for i in range(8)]
    tokens = [*letters, *dict.fromkeys(pairs)]
    merges = [(pair[0], pair[1]) for pair in tokens[256:]]
    backend = Backend(BPE({token: id_ for id_, token in enumerate(tokens)}, merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("<|end|>", special=True)])
    backend.add_tokens([AddedToken("<a b>"), AddedToken("été🙂")])
    return backend


def sentencepiece(prefix: bool) -> Backend:
    """Byte fallback; with `prefix` a space is added in front and taken off again."""
    words = ["▁", "a", "b", "▁a", "▁▁", "ab", "é", "中", "▁the"]
    vocabulary = {"<unk>": 0, "<s>": 1, "</s>": 2, **BYTES, **{word: 259 + i for i, word in enumerate(words)}}
    merges = [("▁", "a"), ("▁", "▁"), ("a", "b")]
    backend = Backend(BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    steps: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    replace = normalizers.Replace(" ", "▁")
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), replace]) if prefix else replace
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefix else steps)
    backend.add_special_tokens([AddedToken("<s>"), AddedToken("</s>")])
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return backend


def word_piece() -> Backend:
    backend = Backend(WordPiece({"[UNK]": 0, "a": 1, "##b": 2, "c": 3, ".": 4}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.decoder = decoders.WordPiece(cleanup=False)
    return backend


def metaspace() -> Backend:
    backend = Backend(BPE({"▁": 0, "a": 1, "▁a": 2, "b": 3}, [("▁", "a")]))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    return backend


def plain_words() -> Backend:
    backend = Backend(WordLevel({"[UNK]": 0, "a": 1, "bc": 2}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    return backend


BACKENDS = {
    "byte level": byte_level(),
    "sentencepiece": sentencepiece(prefix=False),
    "sentencepiece with prefix": sentencepiece(prefix=True),
    "word piece": word_piece(),
    "metaspace": metaspace(),
    "no decoder": plain_words(),
}


def joined(tokenizer: Tokenizer, pieces: Sequence[Sequence[int]], skip: bool) -> str:
    """The text of a stream, each piece of it checked to end at a whole character."""
    decoder = tokenizer.incremental(skip)
    texts = [decoder.push(piece) for piece in pieces]
    for text in texts:
        text.encode()  # no half of a surrogate pair
    return "".join(texts) + decoder.flush()


def cut(ids: list[int], places: list[int]) -> list[list[int]]:
    edges = sorted({0, len(ids), *(place % (len(ids) + 1) for place in places)})
    return [ids[start:stop] for start, stop in pairwise(edges)]


@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize("name", BACKENDS)
@EXAMPLES
@given(data=st.data())
def test_a_stream_of_any_ids_equals_the_whole(name: str, skip: bool, data: st.DataObject) -> None:
    backend = BACKENDS[name]
    tokenizer = Tokenizer(backend, 10_000)
    ids = data.draw(st.lists(st.integers(0, backend.get_vocab_size() + 2), max_size=40))
    pieces = cut(ids, data.draw(st.lists(st.integers(0, 60), max_size=40)))
    whole = backend.decode(ids, skip_special_tokens=skip)
    assert tokenizer.decode(ids, skip) == whole
    assert joined(tokenizer, pieces, skip) == whole
    assert joined(tokenizer, [[id_] for id_ in ids], skip) == whole


@pytest.mark.parametrize("name", ["byte level", "sentencepiece"])
@EXAMPLES
@given(text=st.text(max_size=30))
def test_a_stream_never_shows_half_a_character(name: str, text: str) -> None:
    tokenizer = Tokenizer(BACKENDS[name], 10_000)
    decoder = tokenizer.incremental()
    ids = tokenizer.encode(text, add_special_tokens=False)
    expected = text if name == "byte level" else text.replace("▁", " ")
    shown = ""
    for id_ in ids:
        shown += decoder.push([id_])
        assert expected.startswith(shown)
    if name == "byte level":
        assert shown == text
    assert shown + decoder.flush() == expected


@pytest.mark.parametrize("name", ["byte level", "sentencepiece"])
def test_a_stream_of_one_broken_byte_stays_fast(name: str) -> None:
    tokenizer = Tokenizer(BACKENDS[name], 10_000)
    (byte,) = (id_ for id_ in range(300) if tokenizer.token_bytes(id_) == b"\x80")
    ids = [byte] * 20_000
    assert joined(tokenizer, [[id_] for id_ in ids], True) == "\ufffd" * 20_000


@EXAMPLES
@given(text=st.text(max_size=30))
def test_token_bytes_join_to_the_text(text: str) -> None:
    for name in ("byte level", "sentencepiece"):
        tokenizer = Tokenizer(BACKENDS[name], 10_000)
        ids = tokenizer.encode(text, add_special_tokens=False)
        expected = text if name == "byte level" else text.replace("▁", " ")
        assert b"".join(map(tokenizer.token_bytes, ids)).decode() == expected


def test_special_tokens_are_added_only_when_wanted() -> None:
    tokenizer = Tokenizer(BACKENDS["sentencepiece"], 10_000)
    assert tokenizer.encode("ab") == [1, *tokenizer.encode("ab", add_special_tokens=False)]
    assert tokenizer.decode([1, 264, 2]) == "ab"
    assert tokenizer.decode([1, 264, 2], skip_special_tokens=False) == "<s>ab</s>"
    assert tokenizer.token_bytes(1) == b"<s>"
    assert tokenizer.token_bytes(99_999) == b""


def test_text_that_is_no_unicode_is_refused() -> None:
    with pytest.raises(UserError, match="half a surrogate pair"):
        Tokenizer(BACKENDS["byte level"], 10_000).encode("a\ud800")


def test_a_token_without_an_embedding_is_refused() -> None:
    backend = BACKENDS["byte level"]
    tokenizer = Tokenizer(backend, backend.get_vocab_size() - 1)
    assert tokenizer.encode("hello")
    with pytest.raises(UserError, match="holds the token 'été🙂', which this model doesn't know"):
        tokenizer.encode("x été🙂")


def plan(text: Text | None) -> Plan:
    sample = sample_plan(b"", b"", b"")
    return msgspec.structs.replace(sample, text=text, model=msgspec.structs.replace(sample.model, vocab_size=10_000))


def test_open(tmp_path: Path) -> None:
    BACKENDS["byte level"].save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer.open(tmp_path, plan(Text({})))
    assert tokenizer.decode(tokenizer.encode("Grüße 🙂")) == "Grüße 🙂"


def test_open_refuses_a_plan_without_text(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"token-in, token-out plan, so give token ids"):
        Tokenizer.open(tmp_path, plan(None))
    with pytest.raises(UserError, match=r"has no tokenizer\.json"):
        Tokenizer.open(tmp_path, plan(Text({})))


@pytest.mark.parametrize("content", ["", "{", json.dumps({"version": "1.0"}), "[" * 100_000])
def test_open_refuses_a_damaged_file(tmp_path: Path, content: str) -> None:
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(UserError, match=r"tokenizer\.json is damaged"):
        Tokenizer.open(tmp_path, plan(Text({})))


FAULTY = {
    "no unknown token": Backend(Unigram([("a", 0.0)], None, False)),
    "an unknown token that is none": Backend(WordLevel({"a": 0}, unk_token="[UNK]")),
    "a template without its tokens": Backend.from_str(
        BACKENDS["sentencepiece"].to_str().replace('"special_tokens":{"<s>":{', '"special_tokens":{"x":{')
    ),
}


@pytest.mark.parametrize("name", FAULTY)
def test_a_tokenizer_that_fails_on_a_text_is_refused(name: str) -> None:
    with pytest.raises(UserError, match=r"tokenizer\.json can't encode this prompt \(.*\): correct it"):
        Tokenizer(FAULTY[name], 10_000).encode("Hello")


def test_a_decoder_that_fails_on_an_output_is_refused() -> None:
    backend = plain_words()
    backend.decoder = decoders.Strip("a", 2, 2)
    tokenizer = Tokenizer(backend, 10_000)
    assert tokenizer.decode([2]) == "bc"
    for decode in (tokenizer.decode, tokenizer.incremental().push):
        with pytest.raises(UserError, match=r"tokenizer\.json can't decode this output \(.*\): correct it"):
            decode([1])


@pytest.mark.parametrize("model", ["smollm2", "gemma3"])
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_streams_of_the_real_models(model: str, data: st.DataObject, real: dict[str, Backend]) -> None:
    backend = real[model]
    tokenizer = Tokenizer(backend, 300_000)
    low = st.integers(0, 500)  # where the byte tokens and special tokens are
    ids = data.draw(st.lists(low | st.integers(0, backend.get_vocab_size() - 1), max_size=30))
    ids += tokenizer.encode(data.draw(st.text(max_size=10)))
    pieces = cut(ids, data.draw(st.lists(st.integers(0, 60), max_size=40)))
    for skip in (True, False):
        assert joined(tokenizer, pieces, skip) == backend.decode(ids, skip_special_tokens=skip)


@pytest.fixture(scope="module")
def real(smollm2: Path, gemma3: Path) -> dict[str, Backend]:
    from toolkit.models.gguf_file import read_gguf
    from toolkit.models.gguf_tokenizer import build_tokenizer

    files = {"smollm2": smollm2, "gemma3": gemma3}
    return {name: build_tokenizer(read_gguf(path).metadata) for name, path in files.items()}
