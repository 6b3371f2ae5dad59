"""How byte-level tokenizers cut a text into words before they merge: the rules behind `tokenizer.ggml.pre`.

A GGUF file holds the name alone. The rules are those of the tokenizer.json files that the names stand for.
"""

from __future__ import annotations

from dataclasses import dataclass

from tokenizers import Regex, pre_tokenizers

_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_TAIL = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CAMEL = (rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+", rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*")
_PUNCTUATION = r" ?[^\s\p{L}\p{N}]+"


def _words(digits: str, marks: str = "", punctuation: str = rf"{_PUNCTUATION}[\r\n]*", tail: str = _TAIL) -> str:
    """Contractions, words with the character before them, digits, punctuation, white space."""
    letters = rf"[\p{{L}}{marks}]+" if marks else r"\p{L}+"
    return rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?{letters}|\p{{N}}{digits}|{punctuation}|{tail}"


_LLAMA3 = _words("{1,3}")
_QWEN2 = _words("")
_QWEN35 = _words("", r"\p{M}", r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*")
_SEED = _words("{1}", punctuation=r" ?[^\s\p{L}\p{N}\r\n]+")
_JAIS2_SPACE = "|".join([rf"\s{{{1 << n}}}(?!\S)" for n in range(9, 1, -1)] + [r"\s{1,2}(?!\S)", r"\s{1}"])
_JAIS2 = _words("{1,3}", tail=rf"\s*[\r\n]+|{_JAIS2_SPACE}")
_BAILING = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|"
    r"\s+(?!\S)|\s+"
)
_TEKKEN = rf"{_CAMEL[0]}|{_CAMEL[1]}|\p{{N}}|{_PUNCTUATION}[\r\n/]*|{_TAIL}"
_GPT4O = rf"{_CAMEL[0]}{_CONTRACTION}?|{_CAMEL[1]}{_CONTRACTION}?|\p{{N}}{{1,3}}|{_PUNCTUATION}[\r\n/]*|{_TAIL}"
_BLOOM = r" ?[^(\s|.,!?…。，、।۔،)]+"
_CJK_AND_KANA = r"[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
_CJK_AND_HANGUL = r"[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
_DEEPSEEK3 = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+|"
    r" ?[\p{P}\p{S}]+[\r\n]*|" + _TAIL
)
_CASED = (
    "A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-ἕ\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d"
    "\u1f50-\u1f57\u1f59\u1f5b\u1f5d\u1f5f-\u1f7d\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3"
    "\u1fd6-\u1fdb\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128"
    "\u212a-\u212d\u212f-\u2134\u2139\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184Ⰰ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗ"
    "Ａ-Ｚａ-ｚ𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃"
)
"""Letters that have an upper or a lower case, as the tokenizer of DeepSeek LLM lists them."""
_DEEPSEEK_LLM = (
    r"[\r\n]",
    rf"\s?[{_CASED}]+",
    r"\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
    r"\s+$",
    _CJK_AND_HANGUL,
    r"\p{N}",
)


@dataclass(frozen=True)
class Split:
    """Rules of a byte-level tokenizer. The default is GPT-2's."""

    patterns: tuple[str, ...] = ()
    """What each matches is a word; so is what lies between. Words found by one are cut further by the next."""
    gpt2: bool = True
    """Whether GPT-2's own pattern cuts the words at last."""
    afterwards: tuple[str, ...] = ()
    """Patterns that cut words when their bytes are spelled as characters already."""
    nfc: bool = False
    ignore_merges: bool = False
    """A word that is in the vocabulary is one token, whatever its merges."""
    add_bos: bool = False
    """Whether bos comes first, where the file doesn't say."""

    def pre_tokenizer(self) -> pre_tokenizers.PreTokenizer:
        byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=self.gpt2)
        steps = [*map(_isolate, self.patterns), byte_level, *map(_isolate, self.afterwards)]
        return byte_level if len(steps) == 1 else pre_tokenizers.Sequence(steps)


def _isolate(pattern: str) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Split(Regex(pattern), behavior="isolated")


def _only(*patterns: str, nfc: bool = False, ignore_merges: bool = False, add_bos: bool = False) -> Split:
    return Split(patterns, False, nfc=nfc, ignore_merges=ignore_merges, add_bos=add_bos)


_BY_RULES: dict[tuple[str, ...], Split] = {
    ("gpt-2", "phi-2", "olmo", "mpt", "jais", "jina-es", "jina-de", "jina-v2-es", "jina-v2-de"): Split(),
    ("gigachat", "a.x-4.0", "mellum", "modern-bert", "exaone4", "trillion", "granite-docling"): Split(),
    ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b", "mellum2"): Split((r"\p{N}",)),
    ("falcon",): Split((r"[\p{P}$+<=>^`|~]+",), afterwards=(r"\p{N}+", r"[0-9][0-9][0-9]")),
    ("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2", "jina-v5-nano"): _only(
        _LLAMA3, ignore_merges=True, add_bos=True
    ),
    ("dbrx", "smaug-bpe", "glm4", "chatglm-bpe"): _only(_LLAMA3),
    ("qwen2", "deepseek-r1-qwen", "megrez", "kormo", "f2llmv2"): _only(_QWEN2, nfc=True),
    ("qwen35",): _only(_QWEN35, nfc=True),
    ("stablelm2", "hunyuan", "grok-2", "solar-open"): _only(_QWEN2),
    ("deepseek-llm",): _only(*_DEEPSEEK_LLM),
    ("deepseek-coder",): _only(r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CJK_AND_HANGUL, r"\p{N}"),
    ("deepseek-v3", "hunyuan-dense", "joyai-llm"): _only(r"\p{N}{1,3}", _CJK_AND_KANA, _DEEPSEEK3),
    ("tekken",): _only(_TEKKEN, ignore_merges=True, add_bos=True),
    ("gpt-4o", "llama4", "kanana2", "talkie", "minimax-m2"): _only(_GPT4O),
    ("seed-coder",): _only(_SEED),
    ("bailingmoe", "bailingmoe2", "llada-moe"): _only(_BAILING),
    ("jais-2",): _only(_JAIS2),
    ("bloom", "poro-chat", "gpt3-finnish"): _only(_BLOOM),
    ("viking",): _only(_BLOOM, r"\p{N}"),
    ("superbpe",): _only(r"\p{N}+", r"(?=(\d{3})+(?!\d))"),
}
SPLITS: dict[str, Split] = {name: split for names, split in _BY_RULES.items() for name in names}
"""By `tokenizer.ggml.pre`."""
