"""The tokenizer in a GGUF file's metadata, rebuilt as the `tokenizers` pipeline that the original model has.

The file holds vocabulary, merges or scores, and the *name* of the pre-tokenizer; the rules behind each name are the
tables below. Two families exist: byte-level BPE (`gpt2`) and SentencePiece BPE with byte fallback (`llama`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE

from ..runtime.errors import UserError, brief, shown

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
"""Values of `tokenizer.ggml.token_type`."""

_SPACE = "▁"
_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_TAIL = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CAMEL = (rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+", rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*")
_WORDS = rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}%s| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_TAIL}"
_LLAMA3 = _WORDS % "{1,3}"
_QWEN2 = _WORDS % ""
_TEKKEN = rf"{_CAMEL[0]}|{_CAMEL[1]}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_TAIL}"
_GPT4O = rf"{_CAMEL[0]}{_CONTRACTION}?|{_CAMEL[1]}{_CONTRACTION}?|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_TAIL}"


@dataclass(frozen=True)
class Split:
    """Rules of a byte-level tokenizer. The default is GPT-2's."""

    pattern: str = ""
    """Each match is a word; "" is GPT-2's own pattern."""
    single_digits: bool = False
    """Every digit is a word of its own."""
    nfc: bool = False
    ignore_merges: bool = False
    """A word that is in the vocabulary is one token, whatever its merges."""
    add_bos: bool = False
    """Whether bos comes first, where the file doesn't say."""

    def pre_tokenizer(self) -> pre_tokenizers.PreTokenizer:
        byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not self.pattern)
        steps: list[pre_tokenizers.PreTokenizer] = [byte_level]
        if self.pattern:
            steps.insert(0, pre_tokenizers.Split(Regex(self.pattern), behavior="isolated"))
        if self.single_digits:
            steps.insert(0, pre_tokenizers.Digits(individual_digits=True))
        return steps[0] if len(steps) == 1 else pre_tokenizers.Sequence(steps)


_SPLITS: dict[tuple[str, ...], Split] = {
    ("gpt-2", "olmo", "mpt", "jina-es", "jina-de"): Split(),
    ("smollm", "starcoder", "refact", "command-r", "codeshell"): Split(single_digits=True),
    ("llama-bpe", "llama3", "llama-v3", "falcon3"): Split(_LLAMA3, ignore_merges=True, add_bos=True),
    ("dbrx", "smaug-bpe"): Split(_LLAMA3),
    ("qwen2", "deepseek-r1-qwen", "megrez"): Split(_QWEN2, nfc=True),
    ("tekken",): Split(_TEKKEN, ignore_merges=True, add_bos=True),
    ("gpt-4o",): Split(_GPT4O),
}
SPLITS: dict[str, Split] = {name: split for names, split in _SPLITS.items() for name in names}
"""By `tokenizer.ggml.pre`."""


def build_tokenizer(metadata: Mapping[str, Any]) -> Tokenizer:
    """The tokenizer that GGUF metadata describes. Raises UserError for a kind that is not known."""
    family = metadata.get("tokenizer.ggml.model")
    if family not in ("gpt2", "llama"):
        raise UserError(f"The file's tokenizer is of kind {shown(family)}; gpt2 and llama can be converted.")
    tokenizer, add_bos = (_byte_level if family == "gpt2" else _sentencepiece)(metadata)
    _add_tokens(tokenizer, metadata)
    _set_post_processor(tokenizer, metadata, add_bos)
    return tokenizer


def token_text(metadata: Mapping[str, Any], name: str) -> str | None:
    """The text of a special token, `bos` say, or None."""
    id_, tokens = metadata.get(f"tokenizer.ggml.{name}_token_id"), metadata["tokenizer.ggml.tokens"]
    return tokens[id_] if isinstance(id_, int) and id_ < len(tokens) else None


def _byte_level(metadata: Mapping[str, Any]) -> tuple[Tokenizer, bool]:
    default = "gpt-2" if metadata.get("general.architecture") == "gpt2" else "default"
    name = metadata.get("tokenizer.ggml.pre", default)
    if name not in SPLITS:
        raise UserError(f"The file's pre-tokenizer is {shown(name)}; known are {', '.join(SPLITS)}.")
    split = SPLITS[name]
    merges = [_pair(merge) for merge in metadata.get("tokenizer.ggml.merges", [])]
    tokenizer = Tokenizer(_bpe(_vocabulary(metadata), merges, ignore_merges=split.ignore_merges))
    if split.nfc:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = split.pre_tokenizer()
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer, split.add_bos


def _sentencepiece(metadata: Mapping[str, Any]) -> tuple[Tokenizer, bool]:
    vocabulary = _vocabulary(metadata)
    unknown = token_text(metadata, "unknown")
    merges = list(_merges(metadata, vocabulary))
    tokenizer = Tokenizer(_bpe(vocabulary, merges, byte_fallback=True, fuse_unk=True, unk_token=unknown))
    steps: list[decoders.Decoder] = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    replace = normalizers.Replace(" ", _SPACE)
    if metadata.get("tokenizer.ggml.add_space_prefix", True):
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), replace])
        steps.append(decoders.Strip(content=" ", left=1, right=0))
    else:
        tokenizer.normalizer = replace
    tokenizer.decoder = decoders.Sequence(steps)
    return tokenizer, True


def _pair(merge: str) -> tuple[str, str]:
    left, _, right = merge.partition(" ")
    return left, right


def _bpe(vocabulary: dict[str, int], merges: list[tuple[str, str]], **options: Any) -> BPE:
    try:
        return BPE(vocab=vocabulary, merges=merges, **options)
    except Exception as error:  # the library raises plain Exception for a merge that is not in the vocabulary
        raise UserError(f"The file's tokenizer is damaged: {brief(error)}.") from None


def _types(metadata: Mapping[str, Any]) -> list[int]:
    tokens, types = metadata["tokenizer.ggml.tokens"], metadata.get("tokenizer.ggml.token_type")
    if types is None:
        return [NORMAL] * len(tokens)
    if len(types) != len(tokens):
        raise UserError(f"The file's tokenizer is damaged: {len(tokens)} tokens but {len(types)} token types.")
    return [int(kind) for kind in types]


def _tokens(metadata: Mapping[str, Any]) -> Iterator[tuple[int, str, int]]:
    """Id, text as the vocabulary spells it, and type. Fillers up to the embedding's size, `[PAD7]`, are left out."""
    spaced = metadata["tokenizer.ggml.model"] == "llama"
    for id_, (token, kind) in enumerate(zip(metadata["tokenizer.ggml.tokens"], _types(metadata), strict=True)):
        if not (kind == UNUSED and re.fullmatch(r"\[PAD\d+\]", token)):
            yield id_, token.replace(" ", _SPACE) if spaced and kind == USER_DEFINED else token, kind


def _vocabulary(metadata: Mapping[str, Any]) -> dict[str, int]:
    return {token: id_ for id_, token, _ in _tokens(metadata)}


def _merges(metadata: Mapping[str, Any], vocabulary: Mapping[str, int]) -> Iterator[tuple[str, str]]:
    """All pairs that make a piece: user-defined pieces first, then by score; of a piece the longer left part first."""
    scores = metadata.get("tokenizer.ggml.scores")
    if scores is None or len(scores) != len(metadata["tokenizer.ggml.tokens"]):
        raise UserError("The file's tokenizer is damaged: it should have one score a token.")
    ranked = [
        (kind != USER_DEFINED, -scores[id_] if kind != USER_DEFINED else 0.0, id_, token)
        for id_, token, kind in _tokens(metadata)
        if kind in (NORMAL, USER_DEFINED, UNUSED)
    ]
    for *_, token in sorted(ranked):
        for cut in range(len(token) - 1, 0, -1):
            if token[:cut] in vocabulary and token[cut:] in vocabulary:
                yield token[:cut], token[cut:]


_STRICT_PHI3 = ("<unk>", "<s>", "<|endoftext|>")
"""Phi-3's special tokens swallow the white space after them, but for these."""


def _add_tokens(tokenizer: Tokenizer, metadata: Mapping[str, Any]) -> None:
    """Tokens that are found whole in the text before anything else is done to it."""
    swallow = metadata.get("general.architecture") == "phi3" and metadata["tokenizer.ggml.model"] == "llama"
    for special, kinds in ((True, (UNKNOWN, CONTROL)), (False, (USER_DEFINED,))):
        added = [
            AddedToken(token, special=special, normalized=False, rstrip=swallow and token not in _STRICT_PHI3)
            for _, token, kind in _tokens(metadata)
            if kind in kinds
        ]
        (tokenizer.add_special_tokens if special else tokenizer.add_tokens)(added)


def _set_post_processor(tokenizer: Tokenizer, metadata: Mapping[str, Any], add_bos: bool) -> None:
    ends = {"bos": add_bos, "eos": False}
    used = {name: token_text(metadata, name) for name, default in ends.items() if _flag(metadata, name, default)}
    texts = {name: text for name, text in used.items() if text is not None}
    if texts:
        parts = [texts.get("bos"), "$A", texts.get("eos")]
        special = [(text, tokenizer.token_to_id(text)) for text in dict.fromkeys(texts.values())]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=[part for part in parts if part], special_tokens=special
        )


def _flag(metadata: Mapping[str, Any], name: str, default: bool) -> bool:
    return bool(metadata.get(f"tokenizer.ggml.add_{name}_token", default))
