"""Writing a model's text handling into a plan: tokenizer, chat templates, special tokens and generation defaults.

Whatever the source, the plan gets the same files, which the runtime reads without transformers:

    tokenizer.json  special_tokens_map.json  generation_config.json  chat_template.jinja  chat_template_tool_use.jinja
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from ..runtime.errors import UserError, foreign_errors
from ..runtime.formats import detect_formats
from ..runtime.plan import Text
from .charsmap import check_charsmaps
from .gguf_tokenizer import build_tokenizer, token_text
from .source import OpenedModel, read_json

_SPECIAL = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
"""Names in chat templates and in GGUF metadata."""


@dataclass(frozen=True)
class _TextParts:
    tokenizer: Tokenizer
    special: dict[str, str]
    """Name such as `bos_token` to text."""
    templates: dict[str, str]
    """Chat templates by name: `default` and, for some models, `tool_use`."""


def write_text(opened: OpenedModel, directory: Path) -> Text | None:
    """Write the files and describe them; None for a model without a tokenizer. Raises UserError if it has a bad one."""
    if opened.text is None:
        return None
    if opened.text.directory is not None:
        parts = _from_directory(opened.text.directory)
    else:
        assert opened.text.metadata is not None
        parts = _from_gguf(opened.text.metadata)
    names = {"default": "chat_template.jinja", "tool_use": "chat_template_tool_use.jinja"}
    settings = {"special_tokens_map.json": parts.special, "generation_config.json": _generation_config(opened)}
    templates = {names[name]: template for name, template in parts.templates.items() if name in names}
    files = {
        "tokenizer.json": parts.tokenizer.to_str(),
        **{name: _json(name, values) for name, values in settings.items()},
        **templates,
    }
    for name, content in files.items():
        (directory / name).write_bytes(_utf8(name, content))
    bos = parts.special.get("bos_token")
    with foreign_errors("The model's tokenizer cannot encode a text ({}); fix its files."):
        first = parts.tokenizer.encode("").tokens[:1]  # of no text, since it need not know any
    return Text(
        files={name: hashlib.sha256(content.encode()).hexdigest() for name, content in sorted(files.items())},
        bos_token=bos,
        eos_token=parts.special.get("eos_token"),
        add_bos=bos is not None and first == [bos],
        formats=detect_formats("".join(templates.values()), _special_texts(parts.tokenizer)),
    )


def _special_texts(tokenizer: Tokenizer) -> list[str]:
    return [token.content for token in tokenizer.get_added_tokens_decoder().values() if token.special]


def _utf8(name: str, content: str) -> bytes:
    try:
        return content.encode()
    except UnicodeEncodeError:
        raise UserError(
            f"The model's {name} would hold half a surrogate pair; fix the file that it comes from."
        ) from None


def _json(name: str, values: Mapping[str, Any]) -> str:
    try:
        return json.dumps(values, ensure_ascii=False, indent=2, sort_keys=True, allow_nan=False) + "\n"
    except ValueError:
        raise UserError(f"The model's {name} holds a number that is not finite; correct it.") from None


def _generation_config(opened: OpenedModel) -> dict[str, Any]:
    """The directory's own file, or the ids that a runtime needs."""
    assert opened.text is not None
    path = (opened.text.directory or Path()) / "generation_config.json"
    if opened.text.directory is not None and path.is_file():
        return read_json(path)
    ids = {"bos_token_id": opened.bos_token_id, "eos_token_id": list(opened.eos_token_ids) or None}
    return {name: id_ for name, id_ in ids.items() if id_ is not None}


def _from_gguf(metadata: Mapping[str, Any]) -> _TextParts:
    special = {name: token_text(metadata, key) for name, key in _SPECIAL.items()}
    keys = {"default": "tokenizer.chat_template", "tool_use": "tokenizer.chat_template.tool_use"}
    return _TextParts(
        tokenizer=build_tokenizer(metadata),
        special={name: text for name, text in special.items() if text is not None},
        templates={name: str(metadata[key]) for name, key in keys.items() if metadata.get(key)},
    )


_MAX_ID = 1 << 24
"""The library makes a table of all ids when it writes a tokenizer."""


def _check_tables(name: str, values: Mapping[str, Any]) -> None:
    """Refuse sizes in a tokenizer.json for which the library would take all memory."""
    check_charsmaps(values.get("normalizer"))
    model, added = values.get("model"), values.get("added_tokens")
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    ids = [*vocabulary.values()] if isinstance(vocabulary, dict) else []
    ids += [token.get("id") for token in added if isinstance(token, dict)] if isinstance(added, list) else []
    if any(isinstance(id_, int) and id_ > _MAX_ID for id_ in ids):
        raise UserError(f"The tokenizer.json in {name} has a token id above {_MAX_ID}; download it again.")


def _from_directory(directory: Path) -> _TextParts:
    """As transformers loads it, so that its conversions and overrides are in what we write."""
    from transformers import AutoTokenizer

    path = directory / "tokenizer.json"
    if path.is_file():
        _check_tables(directory.name, read_json(path))
    with foreign_errors(
        f"The tokenizer in {directory.name} cannot be loaded ({{}}); fix its files, or remove them to get a plan that "
        "takes and returns token ids."
    ):
        loaded: Any = AutoTokenizer.from_pretrained(str(directory), trust_remote_code=False)
        tokenizer = Tokenizer.from_str(loaded.backend_tokenizer.to_str())
    tokenizer.no_padding()
    tokenizer.no_truncation()
    template = loaded.chat_template
    return _TextParts(
        tokenizer=tokenizer,
        special={name: str(text) for name, text in loaded.special_tokens_map.items() if isinstance(text, str)},
        templates=template if isinstance(template, dict) else {"default": template} if template else {},
    )
