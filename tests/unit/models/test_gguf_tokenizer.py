"""Tokenizers rebuilt from GGUF metadata give the ids of the original: SentencePiece's own, or those of plain BPE."""

from __future__ import annotations

import io
import random
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sentencepiece
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, pre_tokenizers

from toolkit.models.gguf_file import read_gguf
from toolkit.models.gguf_splits import SPLITS
from toolkit.models.gguf_tokenizer import build_tokenizer
from toolkit.runtime.errors import UserError

proto: Any = import_module("sentencepiece.sentencepiece_model_pb2")
regex: Any = import_module("regex")

# Pieces that tokenizers disagree on most easily: runs of spaces, newlines and digits, contractions, marks, emoji.
PARTS = [
    "Hello",
    " world",
    "  ",
    "   ",
    "\n",
    "\n\n",
    "\t",
    "1234",
    "3.14",
    "it's",
    "WE'LL",
    "é",
    "e\u0301",
    "ß",
    "中文",
    "🙂",
]
PARTS += [
    "👩‍👩‍👧",
    "\u200b",
    "\xa0",
    "<b>",
    "</div>",
    "don't",
    "x=1;",
    "CamelCase",
    "नमस्ते",
    "مرحبا",
    "\r\n",
    "...",
    "__",
    "▁",
]
# Engines have tables of different Unicode versions: characters that some don't know prove nothing.
KNOWN = st.characters(exclude_categories=["Cs", "Cn", "Co"])
TEXT = st.lists(st.sampled_from(PARTS) | st.text(KNOWN, max_size=4), max_size=12).map("".join)
settings.register_profile("ids", deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
IDS = settings(settings.get_profile("ids"), max_examples=150)
CUTS = settings(settings.get_profile("ids"), max_examples=40)
ASSIGNED = st.lists(
    st.sampled_from(PARTS)
    | st.text(st.characters(max_codepoint=0xFFFF, exclude_categories=["Cs", "Cn", "Co"]), max_size=4),
    max_size=12,
).map("".join)


# --- byte-level BPE ---------------------------------------------------------------------------------------------------


class PlainBPE:
    """Byte-level BPE with nothing but dictionaries: the reference."""

    GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"

    def __init__(self, metadata: Any) -> None:
        self.ids = {token: id_ for id_, token in enumerate(metadata["tokenizer.ggml.tokens"])}
        self.ranks = {tuple(merge.split(" ")): rank for rank, merge in enumerate(metadata["tokenizer.ggml.merges"])}
        visible = [*range(33, 127), *range(161, 173), *range(174, 256)]
        hidden = [byte for byte in range(256) if byte not in visible]
        self.letters = {byte: chr(byte) for byte in visible} | {byte: chr(256 + n) for n, byte in enumerate(hidden)}

    def encode(self, text: str, single_digits: bool) -> list[int]:
        segments = regex.split(r"(\p{N})", text) if single_digits else [text]
        words = [word for segment in segments for word in regex.findall(self.GPT2, segment)]
        return [self.ids[piece] for word in words for piece in self.merge(self.known(word))]

    def known(self, word: str) -> list[str]:
        """A word's bytes that the vocabulary has: as in the original, others are gone before anything merges."""
        return [self.letters[byte] for byte in word.encode() if self.letters[byte] in self.ids]

    def merge(self, parts: list[str]) -> list[str]:
        while len(parts) > 1:
            rank, at = min((self.ranks.get(pair, 1 << 60), i) for i, pair in enumerate(pairwise(parts)))
            if rank == 1 << 60:
                break
            pair, merged, index = tuple(parts[at : at + 2]), [], 0
            while index < len(parts):
                found = tuple(parts[index : index + 2]) == pair
                merged.append("".join(pair) if found else parts[index])
                index += 2 if found else 1
            parts = merged
        return parts


@pytest.fixture(scope="module")
def smol(smollm2: Path) -> Any:
    return dict(read_gguf(smollm2).metadata)


@pytest.fixture(scope="module")
def smol_pair(smol: Any) -> tuple[PlainBPE, Tokenizer]:
    return PlainBPE(smol), build_tokenizer(smol)


@IDS
@given(text=TEXT)
@example(text="12345 and 3.14159, in 2024")
@example(text="/\x16/")  # SmolLM2 has no such byte
def test_smollm2_splits_digits_then_words(text: str, smol_pair: tuple[PlainBPE, Tokenizer]) -> None:
    reference, tokenizer = smol_pair
    assert tokenizer.encode(text).ids == reference.encode(text, single_digits=True)
    if all(reference.letters[byte] in reference.ids for byte in text.encode()):  # SmolLM2 lacks some bytes
        assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_smollm2_special_tokens_are_whole_and_none_is_added(smol_pair: tuple[PlainBPE, Tokenizer]) -> None:
    ids = smol_pair[1].encode("<|im_start|>user\nhi<|im_end|>\n<|endoftext|>").ids
    assert [ids[0], ids[-3], ids[-1]] == [1, 2, 0]
    assert smol_pair[1].decode(ids) == "user\nhi\n"
    assert smol_pair[1].decode(ids, skip_special_tokens=False).startswith("<|im_start|>user\nhi<|im_end|>")


@pytest.fixture(scope="module")
def gpt2_pair(smol: Any) -> tuple[PlainBPE, Tokenizer]:
    return PlainBPE(smol), build_tokenizer({**smol, "tokenizer.ggml.pre": "gpt-2"})


@IDS
@given(text=TEXT)
def test_gpt2_rules(text: str, gpt2_pair: tuple[PlainBPE, Tokenizer]) -> None:
    assert gpt2_pair[1].encode(text).ids == gpt2_pair[0].encode(text, single_digits=False)


@pytest.fixture(scope="module")
def qwen2_pair(smol: Any) -> tuple[Any, Tokenizer]:
    from transformers import Qwen2Tokenizer

    factory: Any = Qwen2Tokenizer
    vocabulary = {token: id_ for id_, token in enumerate(smol["tokenizer.ggml.tokens"])}
    merges = [tuple(merge.split(" ")) for merge in smol["tokenizer.ggml.merges"]]
    return factory(vocab=vocabulary, merges=merges), build_tokenizer({**smol, "tokenizer.ggml.pre": "qwen2"})


@IDS
@given(text=TEXT)
def test_qwen2_rules(text: str, qwen2_pair: tuple[Any, Tokenizer]) -> None:
    assert qwen2_pair[1].encode(text).ids == qwen2_pair[0].encode(text, add_special_tokens=False)


@CUTS
@given(text=ASSIGNED)
@pytest.mark.parametrize("name", ["llama-bpe", "dbrx", "tekken", "gpt-4o", "qwen2", "deepseek-r1-qwen", "qwen35"])
def test_patterns_split_as_those_of_transformers(name: str, text: str) -> None:
    module = pytest.importorskip("transformers.integrations.gguf.gguf_tokenizer_mapping")
    steps: list[Any] = [
        pre_tokenizers.Split(Regex(module.GGUF_PRE_TOKENIZER_SPLITS[name]), behavior="isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ]
    expected = pre_tokenizers.Sequence(steps).pre_tokenize_str(text)
    assert SPLITS[name].pre_tokenizer().pre_tokenize_str(text) == expected


def test_transformers_knows_no_name_that_is_missing() -> None:
    module = pytest.importorskip("transformers.integrations.gguf.gguf_tokenizer_mapping")
    assert set(module.GGUF_PRE_TOKENIZER_SPLITS) <= set(SPLITS)


@CUTS
@given(text=ASSIGNED)
@pytest.mark.parametrize("name", sorted({id(split): name for name, split in SPLITS.items()}.values()))
def test_patterns_cut_as_another_engine_does(name: str, text: str) -> None:
    """Each pattern isolates what it matches in the words of the one before, by the `regex` package."""
    split = SPLITS[name]
    patterns = [pattern.replace(r"(?i:[sdmt]|ll|ve|re)", r"(?i:s|d|m|t|ll|ve|re)") for pattern in split.patterns]
    words = [text] if text else []
    for pattern in [*patterns, *([PlainBPE.GPT2] if split.gpt2 else [])]:
        words = [part for word in words for part in isolated(pattern, word)]
    if split.afterwards:
        return  # these see bytes, not characters
    alphabet = PlainBPE({"tokenizer.ggml.tokens": [], "tokenizer.ggml.merges": []}).letters
    expected = ["".join(alphabet[byte] for byte in word.encode()) for word in words]
    assert [word for word, _ in split.pre_tokenizer().pre_tokenize_str(text)] == expected


def isolated(pattern: str, word: str) -> list[str]:
    """The matches and what lies between them."""
    cuts = sorted({0, len(word), *(edge for match in regex.finditer(pattern, word) for edge in match.span())})
    return [word[start:stop] for start, stop in pairwise(cuts)]


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("deepseek-v3", "abc12345 你好world", "abc|123|45|Ġ|ä½łå¥½|world"),
        ("deepseek-v3", "x.y_z 1,000", "x|.y|_z|Ġ|1|,|000"),
        ("deepseek-coder", "if(a)\n  b=12", "if|(|a|)|Ċ|Ġ|Ġb|=|1|2"),
        ("deepseek-llm", "The cat\nsat, 42", "The|Ġcat|Ċ|sat|,|Ġ|4|2"),
        ("falcon", "it's $1234567.", "it|'|s|Ġ|$|123|456|7|."),
        ("gpt-4o", "CamelCase HTTPServer", "Camel|Case|ĠHTTPServer"),
        ("tekken", "Hello 123", "Hello|Ġ|1|2|3"),
        ("bloom", "Hello, world!", "Hello|,|Ġworld|!"),
        ("viking", "in 2024.", "in|Ġ|2|0|2|4|."),
        ("superbpe", "1234567 ab", "1|234|567|Ġab"),
        ("jais-2", "a     b", "a|ĠĠĠĠ|Ġb"),
        ("seed-coder", "a  =1\r\n", "a|Ġ|Ġ=|1|čĊ"),
        ("smollm", "x 12", "x|Ġ|1|2"),
    ],
)
def test_words_of_known_texts(name: str, text: str, words: str) -> None:
    assert [word for word, _ in SPLITS[name].pre_tokenizer().pre_tokenize_str(text)] == words.split("|")


UNKNOWN = "tokenizer.ggml.unknown_token_id"
SMALL: dict[str, Any] = {
    "general.architecture": "llama",
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "gpt-2",
    "tokenizer.ggml.tokens": ["<s>", "</s>", "a", "b", "ab", "<think>", "[PAD6]", "<odd one>"],
    "tokenizer.ggml.token_type": np.array([3, 3, 1, 1, 1, 4, 5, 4]),
    "tokenizer.ggml.merges": ["a b"],
    "tokenizer.ggml.bos_token_id": 0,
    "tokenizer.ggml.eos_token_id": 1,
}


@pytest.mark.parametrize(
    ("flags", "pre", "ids"),
    [
        ({}, "gpt-2", [4]),
        ({}, "llama-bpe", [0, 4]),
        ({"tokenizer.ggml.add_bos_token": False}, "llama-bpe", [4]),
        ({"tokenizer.ggml.add_bos_token": True}, "gpt-2", [0, 4]),
        ({"tokenizer.ggml.add_bos_token": True, "tokenizer.ggml.add_eos_token": True}, "gpt-2", [0, 4, 1]),
        ({"tokenizer.ggml.add_eos_token": True}, "gpt-2", [4, 1]),
    ],
)
def test_begin_and_end_tokens(flags: dict[str, bool], pre: str, ids: list[int]) -> None:
    tokenizer = build_tokenizer({**SMALL, **flags, "tokenizer.ggml.pre": pre})
    assert tokenizer.encode("ab").ids == ids
    assert tokenizer.encode("ab", add_special_tokens=False).ids == [4]


def test_user_defined_tokens_are_whole_but_not_special() -> None:
    tokenizer = build_tokenizer(SMALL)
    ids = tokenizer.encode("a<think>b<odd one>").ids
    assert ids == [2, 5, 3, 7]
    assert tokenizer.decode(ids) == "a<think>b<odd one>"
    assert tokenizer.token_to_id("[PAD6]") is None


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"tokenizer.ggml.pre": "mystery"}, r"pre-tokenizer is 'mystery'; known are gpt-2, .*smollm"),
        ({"tokenizer.ggml.pre": "default"}, "pre-tokenizer is 'default'"),
        ({"tokenizer.ggml.model": "rwkv"}, "of kind 'rwkv'; gpt2, llama, t5"),
        ({"tokenizer.ggml.merges": ["a zz"]}, "tokenizer is damaged"),
        ({"tokenizer.ggml.token_type": np.array([1])}, "8 tokens but 1 token types"),
        ({"tokenizer.ggml.model": "llama", "tokenizer.ggml.merges": []}, "one score a token"),
        ({"tokenizer.ggml.model": "t5"}, "one score a token"),
        ({"tokenizer.ggml.model": "t5", "tokenizer.ggml.scores": [0.0] * 8, UNKNOWN: 99}, "tokenizer is damaged"),
        (
            {"tokenizer.ggml.tokens": ["<s:", *SMALL["tokenizer.ggml.tokens"][1:]], "tokenizer.ggml.pre": "llama-bpe"},
            "tokenizer is damaged .*Cannot build Piece",
        ),
    ],
)
def test_what_is_refused(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(UserError, match=reason):
        build_tokenizer({**SMALL, **changes})


def test_a_file_of_gpt2_itself_needs_no_pre_tokenizer_name() -> None:
    metadata = {key: value for key, value in SMALL.items() if key != "tokenizer.ggml.pre"}
    assert build_tokenizer({**metadata, "general.architecture": "gpt2"}).encode("ab").ids == [4]
    with pytest.raises(UserError, match="pre-tokenizer is 'default'"):
        build_tokenizer(metadata)


# --- SentencePiece ----------------------------------------------------------------------------------------------------


def pieces(model: Any) -> dict[str, Any]:
    """The metadata that a SentencePiece model has in a GGUF file."""
    return {
        "general.architecture": "llama",
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [piece.piece for piece in model.pieces],
        "tokenizer.ggml.scores": np.array([piece.score for piece in model.pieces], np.float32),
        "tokenizer.ggml.token_type": np.array([piece.type for piece in model.pieces]),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }


@pytest.fixture(scope="module", params=[True, False], ids=["prefix space", "no prefix space"])
def trained(request: pytest.FixtureRequest) -> tuple[Any, Tokenizer]:
    """A SentencePiece BPE model trained on words of random letters, and its conversion."""
    source = random.Random(0)
    words = ["".join(source.choices("etaoinshrdlu-.,é1 2", k=source.randint(1, 8))) for _ in range(300)]
    sentences = (" ".join(source.choices(words, k=12)) for _ in range(500))
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=sentences,
        model_writer=model,
        model_type="bpe",
        vocab_size=600,
        byte_fallback=True,
        add_dummy_prefix=request.param,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        # With a prefix space, Hugging Face adds one after each such symbol too; SentencePiece does not.
        user_defined_symbols=[] if request.param else ["<think>", "\n\n"],
        minloglevel=2,
    )
    reference: Any = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
    metadata = pieces(proto.ModelProto.FromString(model.getvalue()))
    tokenizer = build_tokenizer({**metadata, "tokenizer.ggml.add_space_prefix": request.param})
    return reference, tokenizer


LETTERS = st.lists(st.sampled_from([*"etaoinshrdlu-.,é1 2  ", "中", "🙂", "then ", "▁"]), max_size=40).map("".join)


@IDS
@given(text=(LETTERS | TEXT).filter(lambda text: regex.search(r"<(s|/s|unk)>", text) is None))
def test_ids_are_those_of_sentencepiece(text: str, trained: tuple[Any, Tokenizer]) -> None:
    reference, tokenizer = trained
    expected = reference.encode(text)
    assert tokenizer.encode(text, add_special_tokens=False).ids == expected
    assert tokenizer.encode(text).ids == [1, *expected]
    assert tokenizer.decode(expected) == text.replace("▁", " ")


# --- unigram ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=["t5", "bare", "bytes"])
def unigram(request: pytest.FixtureRequest) -> tuple[Any, Tokenizer]:
    """A unigram model as T5 has it, one that leaves the text as it is, and one with byte fallback; and conversions."""
    source = random.Random(1)
    words = ["".join(source.choices("etaoinshrdlu-.,é1 2", k=source.randint(1, 8))) for _ in range(300)]
    model = io.BytesIO()
    like_t5 = request.param == "t5"
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=(" ".join(source.choices(words, k=12)) for _ in range(500)),
        model_writer=model,
        model_type="unigram",
        vocab_size=220 + 256 * (request.param == "bytes"),
        byte_fallback=request.param == "bytes",
        add_dummy_prefix=like_t5,
        normalization_rule_name="nmt_nfkc" if like_t5 else "identity",
        remove_extra_whitespaces=like_t5,
        minloglevel=2,
    )
    reference: Any = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
    parsed = proto.ModelProto.FromString(model.getvalue())
    rules = parsed.normalizer_spec
    metadata = pieces(parsed) | {
        "tokenizer.ggml.model": "t5",
        "tokenizer.ggml.add_space_prefix": rules.add_dummy_prefix,
        "tokenizer.ggml.remove_extra_whitespaces": rules.remove_extra_whitespaces,
        "tokenizer.ggml.precompiled_charsmap": np.frombuffer(rules.precompiled_charsmap, np.int8),
    }
    return reference, build_tokenizer(metadata)


@IDS
@given(text=(LETTERS | ASSIGNED).filter(lambda text: regex.search(r"<(s|/s|unk|0x..)>", text) is None))
@example(text="  é  e\u0301 ①ﬁ\t中")
@example(text="\x85")
def test_unigram_ids_are_those_of_sentencepiece(text: str, unigram: tuple[Any, Tokenizer]) -> None:
    reference, tokenizer = unigram
    expected = reference.encode(text)
    found = tokenizer.encode(text, add_special_tokens=False).ids
    # Two orders of the same pieces are as likely, as `..` + `.` and `.` + `..`: then either is right.
    assert found == expected or sorted(found) == sorted(expected)
    assert tokenizer.encode(text).ids == [*found, 2]
    if reference.unk_id() not in expected:
        assert tokenizer.decode(expected) == reference.decode(expected)


@pytest.fixture(scope="module")
def gemma_pair(gemma3: Path) -> tuple[Any, Tokenizer]:
    """gemma-3's vocabulary as SentencePiece itself reads it, and its conversion."""
    metadata = read_gguf(gemma3).metadata
    model = proto.ModelProto()
    columns = ("tokens", "scores", "token_type")
    for token, score, kind in zip(*(metadata[f"tokenizer.ggml.{name}"] for name in columns), strict=True):
        text = token.replace(" ", "▁") if kind == 4 else token
        model.pieces.add(piece=text, score=float(score), type=int(kind) if token != "<unk>" else 2)
    model.trainer_spec.model_type = proto.TrainerSpec.BPE
    model.trainer_spec.byte_fallback = True
    model.trainer_spec.unk_id, model.trainer_spec.bos_id = 3, 2
    model.trainer_spec.eos_id, model.trainer_spec.pad_id = 1, 0
    model.trainer_spec.unk_piece, model.trainer_spec.pad_piece = "<unk>", "<pad>"
    model.trainer_spec.bos_piece, model.trainer_spec.eos_piece = "<bos>", "<eos>"
    model.normalizer_spec.add_dummy_prefix = False
    model.normalizer_spec.remove_extra_whitespaces = False
    reference: Any = sentencepiece.SentencePieceProcessor(model_proto=model.SerializeToString())
    return reference, build_tokenizer(metadata)


@IDS
@given(text=TEXT)
@example(text="def f(x):\n    return  x + 1234\n\n\n<table>")
@example(text="  ▁▁")
@example(text="▁ <b>▁  ▁a ▁\n▁\n")
def test_gemma3_ids_are_those_of_sentencepiece(text: str, gemma_pair: tuple[Any, Tokenizer]) -> None:
    reference, tokenizer = gemma_pair
    assert tokenizer.encode(text).ids == [2, *reference.encode(text)]
    assert tokenizer.decode(tokenizer.encode(text).ids) == text.replace("▁", " ")


def test_phi3_special_tokens_swallow_white_space() -> None:
    tokens = ["<unk>", "<s>", "</s>", "▁", "a", "▁a", "<|end|>"]
    metadata = {
        "general.architecture": "phi3",
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": np.array([0, 0, 0, -2, -3, -1, 0], np.float32),
        "tokenizer.ggml.token_type": np.array([2, 3, 3, 1, 1, 1, 3]),
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.add_bos_token": False,
    }
    assert build_tokenizer(metadata).encode("a<|end|> \n a").ids == [5, 6, 5]
    assert build_tokenizer(metadata).encode("<s> a").ids == [1, 3, 5]


def test_the_same_metadata_gives_the_same_bytes(smollm2: Path) -> None:
    """The library keeps tokens and merges in hash maps, each with another seed."""
    metadata = read_gguf(smollm2).metadata
    assert build_tokenizer(metadata).to_str() == build_tokenizer(metadata).to_str()
