"""Chat templates: a conversation becomes the prompt text that transformers would make of it, without transformers.

Templates are code that came with the model. They run in a sandbox, see plain JSON values only, and are bounded in time
and memory (`sandbox.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .decode import decode_json
from .errors import UserError, brief

if TYPE_CHECKING:
    from .sandbox import Sandbox

TEMPLATE, TOOL_TEMPLATE = "chat_template.jinja", "chat_template_tool_use.jinja"
SPECIAL_TOKENS = "special_tokens_map.json"
_REASONING = ("reasoning_content", "thinking", "reasoning")
"""Names that a message's reasoning goes by; templates read the first, some the second."""
_FAULTS = (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)
"""What a template's expressions may raise."""


class ChatTemplate:
    """A plan's chat template; safe to share between threads."""

    def __init__(
        self, template: str, tool_template: str | None = None, special: Mapping[str, str] | None = None
    ) -> None:
        self._template, self._tool_template = template, tool_template or template
        self.special = dict(special or {})
        self.source = template + (tool_template or "")
        _sandbox()

    @classmethod
    def open(cls, directory: Path) -> ChatTemplate:
        """Read a plan's template and special tokens. Raises UserError if the plan has none or they are damaged."""
        template = directory / TEMPLATE
        if not template.is_file():
            raise UserError(f"{directory} has no {TEMPLATE}, so it can't chat: send a plain prompt instead")
        tools, special = directory / TOOL_TEMPLATE, directory / SPECIAL_TOKENS
        try:
            return cls(
                template.read_text(encoding="utf-8"),
                tools.read_text(encoding="utf-8") if tools.is_file() else None,
                decode_json(special.read_bytes(), dict[str, str]) if special.is_file() else None,
            )
        except ValueError as error:
            raise UserError(f"{directory} has a damaged chat template ({error}): compile the plan again") from None

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **kwargs: Any,
    ) -> str:
        """The prompt text of a conversation. `kwargs` are further variables of the template.

        Raises UserError if the template refuses the messages, fails on them, or exceeds its limits.
        """
        from jinja2 import TemplateError

        values = {
            **self.special,
            "documents": None,
            **_plain(kwargs),
            "messages": [_message(message) for message in messages],
            "tools": _plain(tools),
            "add_generation_prompt": add_generation_prompt,
        }
        source = self._template if tools is None else self._tool_template
        try:
            return _sandbox().render(source, values)
        except (TemplateError, *_FAULTS) as error:
            raise UserError(f"the chat template can't render this conversation: {brief(error)}") from None


def _message(message: Any) -> dict[str, Any]:
    """A message as templates expect it: fields that are None are absent, and reasoning has all its names."""
    if not isinstance(message, Mapping):
        raise UserError(f"a chat message must be an object with a role, not {type(message).__name__}")
    fields = {key: value for key, value in _plain(message).items() if value is not None}
    reasoning = next((fields[name] for name in _REASONING if name in fields), None)
    return fields if reasoning is None else {"thinking": reasoning, **fields, "reasoning_content": reasoning}


def _plain(value: Any) -> Any:
    """The value rebuilt from JSON types, so that a template sees no methods but theirs."""
    if value is None or type(value) in (str, int, float, bool):
        return value
    for kind in (str, int, float):
        if isinstance(value, kind):
            return kind.__str__(value) if kind is str else kind(value)
    if isinstance(value, Mapping):
        return {_plain(key): _plain(item) for key, item in value.items()}
    if isinstance(value, Sequence):
        return [_plain(item) for item in value]
    raise UserError(f"chat messages hold JSON values only, not {type(value).__name__}")


@cache
def _sandbox() -> Sandbox:
    """The environment with the functions that chat templates count on."""
    import jinja2

    from .sandbox import Sandbox

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    def strftime_now(pattern: str) -> str:
        return datetime.now().strftime(pattern)

    sandbox = Sandbox(trim_blocks=True, lstrip_blocks=True)
    sandbox.globals |= {"raise_exception": raise_exception, "strftime_now": strftime_now}
    return sandbox
