"""The tokenizer in a GGUF file's metadata, rebuilt as the `tokenizers` pipeline that the original model has.

The file holds vocabulary, merges or scores, and the *name* of the pre-tokenizer (`gguf_splits.py`). The families, by
`tokenizer.ggml.model`, are byte-level BPE (`gpt2`), and SentencePiece's BPE (`llama`) and unigram model (`t5`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, processors
from tokenizers.models import BPE, Unigram

from ..runtime.errors import UserError, foreign_errors, shown
from .charsmap import check_charsmap
from .gguf_splits import SPLITS

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
"""Values of `tokenizer.ggml.token_type`."""

_SPACE = "▁"
_DAMAGED = "The file's tokenizer is damaged ({})."


def build_tokenizer(metadata: Mapping[str, Any]) -> Tokenizer:
    """The tokenizer that GGUF metadata describes. Raises UserError for a kind that is not known."""
    families = {"gpt2": _byte_level, "llama": _sentencepiece, "t5": _unigram}
    family = metadata.get("tokenizer.ggml.model")
    if family not in families:
        raise UserError(f"The file's tokenizer is of kind {shown(family)}; {', '.join(families)} can be converted.")
    tokenizer, ends = families[family](metadata)
    _add_tokens(tokenizer, metadata)
    _set_post_processor(tokenizer, metadata, ends)
    return tokenizer


def token_text(metadata: Mapping[str, Any], name: str) -> str | None:
    """The text of a special token, `bos` say, or None."""
    id_, tokens = metadata.get(f"tokenizer.ggml.{name}_token_id"), metadata["tokenizer.ggml.tokens"]
    return tokens[id_] if isinstance(id_, int) and id_ < len(tokens) else None


Ends = tuple[bool, bool]
"""Whether bos and eos are added, where the file doesn't say."""


def _byte_level(metadata: Mapping[str, Any]) -> tuple[Tokenizer, Ends]:
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
    return tokenizer, (split.add_bos, False)


def _sentencepiece(metadata: Mapping[str, Any]) -> tuple[Tokenizer, Ends]:
    vocabulary = _vocabulary(metadata)
    unknown = token_text(metadata, "unknown")
    given = metadata.get("tokenizer.ggml.merges")
    merges = [_pair(merge) for merge in given] if given else list(_merges(metadata, vocabulary))
    tokenizer = Tokenizer(_bpe(vocabulary, merges, byte_fallback=True, fuse_unk=True, unk_token=unknown))
    prefix = bool(metadata.get("tokenizer.ggml.add_space_prefix", True))
    tokenizer.normalizer = normalizers.Sequence(_spaces(prefix))
    tokenizer.decoder = _space_decoder(prefix)
    return tokenizer, (True, False)


def _unigram(metadata: Mapping[str, Any]) -> tuple[Tokenizer, Ends]:
    """SentencePiece's normalization as the file has it compiled, then the likeliest pieces."""
    pieces = list(zip(metadata["tokenizer.ggml.tokens"], _scores(metadata), strict=True))
    unknown = metadata.get("tokenizer.ggml.unknown_token_id", 2)
    prefix = bool(metadata.get("tokenizer.ggml.add_space_prefix", False))
    with foreign_errors(_DAMAGED):
        tokenizer = Tokenizer(Unigram(pieces, unk_id=unknown, byte_fallback=BYTE in _types(metadata)))
        steps = [*_cleaning(metadata), *_spaces(prefix)]
    tokenizer.normalizer = normalizers.Sequence(steps)
    tokenizer.decoder = _space_decoder(prefix)
    return tokenizer, (False, True)


def _spaces(prefix: bool) -> list[normalizers.Normalizer]:
    """Spaces as the vocabulary spells them, with one before the text if `prefix`."""
    return [*([normalizers.Prepend(_SPACE)] if prefix else []), normalizers.Replace(" ", _SPACE)]


def _space_decoder(prefix: bool) -> decoders.Decoder:
    steps: list[decoders.Decoder] = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    return decoders.Sequence([*steps, *([decoders.Strip(content=" ", left=1, right=0)] if prefix else [])])


def _cleaning(metadata: Mapping[str, Any]) -> Iterator[normalizers.Normalizer]:
    charsmap = metadata.get("tokenizer.ggml.precompiled_charsmap")
    if charsmap is not None and len(charsmap):
        yield normalizers.Precompiled(check_charsmap(np.asarray(charsmap).astype(np.uint8).tobytes()))
    if metadata.get("tokenizer.ggml.remove_extra_whitespaces", False):
        yield normalizers.Replace(Regex("^ +| +$"), "")  # Strip() takes other white space too
        yield normalizers.Replace(Regex(" {2,}"), " ")


def _pair(merge: str) -> tuple[str, str]:
    left, _, right = merge.partition(" ")
    return left, right


def _bpe(vocabulary: dict[str, int], merges: list[tuple[str, str]], **options: Any) -> BPE:
    with foreign_errors(_DAMAGED):
        return BPE(vocab=vocabulary, merges=merges, **options)


def _types(metadata: Mapping[str, Any]) -> list[int]:
    tokens, types = metadata["tokenizer.ggml.tokens"], metadata.get("tokenizer.ggml.token_type")
    if types is None:
        return [NORMAL] * len(tokens)
    if len(types) != len(tokens):
        raise UserError(f"The file's tokenizer is damaged: {len(tokens)} tokens but {len(types)} token types.")
    return [int(kind) for kind in types]


def _tokens(metadata: Mapping[str, Any]) -> Iterator[tuple[int, str, int]]:
    """Id, text as the vocabulary spells it, and type. Fillers up to the embedding's size, `[PAD7]`, are left out."""
    spaced = metadata["tokenizer.ggml.model"] != "gpt2"
    for id_, (token, kind) in enumerate(zip(metadata["tokenizer.ggml.tokens"], _types(metadata), strict=True)):
        if not (kind == UNUSED and re.fullmatch(r"\[PAD\d+\]", token)):
            yield id_, token.replace(" ", _SPACE) if spaced and kind == USER_DEFINED else token, kind


def _vocabulary(metadata: Mapping[str, Any]) -> dict[str, int]:
    return {token: id_ for id_, token, _ in _tokens(metadata)}


def _scores(metadata: Mapping[str, Any]) -> list[float]:
    scores = metadata.get("tokenizer.ggml.scores")
    if scores is None or len(scores) != len(metadata["tokenizer.ggml.tokens"]):
        raise UserError("The file's tokenizer is damaged: it should have one score a token.")
    return [float(score) for score in scores]


def _merges(metadata: Mapping[str, Any], vocabulary: Mapping[str, int]) -> Iterator[tuple[str, str]]:
    """All pairs that make a piece: user-defined pieces first, then by score; of a piece the longer left part first."""
    scores = _scores(metadata)
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
    """Tokens that are found whole, before anything else is done to the text.

    SentencePiece looks for user-defined ones where spaces are spelled `▁` already: Gemma has runs of spaces among them.
    With a space before the text that is left out, since that normalization would put one before each such token too.
    """
    spelled = metadata["tokenizer.ggml.model"] == "llama" and not metadata.get("tokenizer.ggml.add_space_prefix", True)
    swallow = metadata.get("general.architecture") == "phi3" and metadata["tokenizer.ggml.model"] == "llama"
    for special, kinds in ((True, (UNKNOWN, CONTROL)), (False, (USER_DEFINED,))):
        normalized = spelled and not special
        added = [
            AddedToken(token, special=special, normalized=normalized, rstrip=swallow and token not in _STRICT_PHI3)
            for _, token, kind in _tokens(metadata)
            if kind in kinds
        ]
        (tokenizer.add_special_tokens if special else tokenizer.add_tokens)(added)


def _set_post_processor(tokenizer: Tokenizer, metadata: Mapping[str, Any], ends: Ends) -> None:
    defaults = zip(("bos", "eos"), ends, strict=True)
    used = {name: token_text(metadata, name) for name, default in defaults if _flag(metadata, name, default)}
    texts = {name: text for name, text in used.items() if text is not None}
    if texts:
        parts = [texts.get("bos"), "$A", texts.get("eos")]
        special = [(text, tokenizer.token_to_id(text)) for text in dict.fromkeys(texts.values())]
        with foreign_errors(_DAMAGED):
            tokenizer.post_processor = processors.TemplateProcessing(
                single=[part for part in parts if part], special_tokens=special
            )


def _flag(metadata: Mapping[str, Any], name: str, default: bool) -> bool:
    return bool(metadata.get(f"tokenizer.ggml.add_{name}_token", default))
