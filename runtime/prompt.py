"""Prompts: text and messages to token ids, and parameters to engine commands."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from .debug import debug_phase
from .decode import decode_json
from .errors import UserError
from .formats import Formats, detect_formats
from .load import verify_file
from .options import TextOptions
from .output import Detokenizer
from .parsers.answer import chosen_formats
from .plan import Plan
from .request import Add, SamplingParams
from .seams import pieces, seamed

if TYPE_CHECKING:
    from .chat import ChatTemplate

Prompt = str | Sequence[int]
Message = dict[str, Any]

GENERATION_CONFIG = "generation_config.json"


class Tokenizer(Detokenizer, Protocol):
    """Text to ids and back."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """The ids of a text."""

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of whole outputs."""


class Template(Protocol):
    """A chat template."""

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[dict[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **kwargs: Any,
    ) -> str:
        """The prompt text of a conversation. Raises UserError if the template refuses it."""


class Prompts:
    """Makes a plan's prompts and commands. Plans without text take token ids only."""

    def __init__(
        self,
        plan: Plan,
        tokenizer: Tokenizer | None,
        template: Template | None,
        defaults: dict[str, Any] | None = None,
        formats: Formats | None = None,
    ) -> None:
        self.plan = plan
        self.tokenizer = tokenizer
        self.template = template
        self.defaults = defaults or {}
        self.formats = formats or Formats()
        """Of tool calls and reasoning in the model's answers."""

    @classmethod
    @debug_phase("Tokenizer")
    def open(cls, directory: Path, plan: Plan, options: TextOptions | None = None) -> Prompts:
        """Read the plan's text files. This imports the tokenizer library.

        Raises UserError for files that are damaged or not the plan's own, or a parser that there is not.
        """
        options = options or TextOptions()
        if plan.text is None:
            return cls(plan, None, None)
        for file, sha256 in plan.text.files.items():
            verify_file(directory, file, sha256)
        from .chat import ChatTemplate
        from .tokenizer import Tokenizer as PlanTokenizer

        tokenizer = PlanTokenizer.open(directory, plan)
        template = ChatTemplate.open(directory) if "chat_template.jinja" in plan.text.files else None
        if options.chat_template is not None:
            template = _other(options.chat_template, template)
        formats = plan.text.formats
        if formats is None or options.chat_template is not None:
            formats = detect_formats(template.source if template else "", tokenizer.special_texts)
        formats = chosen_formats(formats, options)
        return cls(plan, tokenizer, template, sampling_defaults(directory), formats)

    def params(self, **changes: Any) -> SamplingParams:
        """Sampling parameters: the model's own defaults, changed."""
        return SamplingParams(**(self.defaults | changes))

    def encode(self, prompt: Prompt, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a prompt, which may be ids already."""
        if not isinstance(prompt, str):
            return self._checked(list(prompt))
        if self.tokenizer is None:
            raise UserError("this plan has no tokenizer, so a prompt must be a list of token ids, not text")
        first, *others = pieces(prompt)
        ids = self.tokenizer.encode(first, add_special_tokens)
        for piece in others:
            ids += self.tokenizer.encode(piece, False)
        return ids

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """The text of a prompt."""
        if self.tokenizer is None:
            raise UserError("this plan has no tokenizer, so it can't turn token ids into text")
        return self.tokenizer.decode(self._checked(list(ids)), skip_special_tokens)

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[dict[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        template: str | None = None,
        **kwargs: Any,
    ) -> str:
        """The text of a conversation; with `continue_final_message` it ends inside the last message. `template` stands
        in for the plan's own. Only what encodes it (`encode`) may read it: see `seams`."""
        chosen = self.template if template is None else _other(template, self.template)
        if chosen is None:
            what = "no tokenizer" if self.tokenizer is None else "no chat template"
            raise UserError(f"this plan has {what}, so it can't chat: send a plain prompt instead")
        if not messages:
            raise UserError("messages must hold at least one message")
        special = getattr(self.tokenizer, "special_texts", ())
        messages = [seamed(message, special) for message in messages]
        if not continue_final_message:
            return chosen.render(messages, tools, add_generation_prompt, **kwargs)
        if add_generation_prompt:
            raise UserError("continue_final_message needs add_generation_prompt to be false")
        return _open_ended(chosen.render(messages, tools, False, **kwargs), messages[-1])

    @property
    def template_source(self) -> str:
        """The text of the plan's template, by which its variables are known; "" without one."""
        return getattr(self.template, "source", "")

    def commands(
        self, request: str, prompt: list[int], params: SamplingParams, *, priority: int = 0, cache_salt: str = ""
    ) -> list[Add]:
        """The engine commands of a request, one a choice; with a seed each choice has its own.

        Raises UserError if the prompt is empty or leaves no room for output, or a token id is out of range.
        """
        limit = self.plan.model.max_context
        if not prompt:
            raise UserError("the prompt is empty: it must have at least one token")
        if len(prompt) >= limit:
            raise UserError(
                f"the prompt has {len(prompt)} tokens, but prompt and output together may have {limit}: shorten it, "
                "or compile the plan with a larger --max-context"
            )
        self._checked([*params.stop_token_ids, *params.logit_bias, *(params.allowed_token_ids or ())])
        params = self._with_bad_tokens(params)
        eos = () if params.ignore_eos else self.plan.eos_token_ids
        return [
            Add(
                request=f"{request}-{index}" if params.n > 1 else request,
                prompt=prompt,
                params=_choice_params(params, index),
                eos=eos,
                priority=priority,
                cache_salt=cache_salt,
                arrival=time.monotonic(),
            )
            for index in range(params.n)
        ]

    def _with_bad_tokens(self, params: SamplingParams) -> SamplingParams:
        """Bad words as token ids: as they begin a text, and as they stand behind a space. Other ways of spelling them
        in tokens stay possible, as in vLLM."""
        if not params.bad_words:
            return params
        found = {
            tuple(self.encode(f"{space}{word.lstrip()}", add_special_tokens=False))
            for word in params.bad_words
            for space in ("", " ")
        }
        forbidden = (*params.bad_token_ids, *sorted(each for each in found if each))
        return msgspec.structs.replace(params, bad_words=(), bad_token_ids=forbidden)

    def _checked(self, ids: list[int]) -> list[int]:
        size = self.plan.model.vocab_size
        if ids and not (min(ids) >= 0 and max(ids) < size):
            wrong = next(token for token in ids if not 0 <= token < size)
            raise UserError(f"token ids must be 0 to {size - 1}, not {wrong}")
        return ids


def _other(source: str, own: Template | None) -> ChatTemplate:
    """A template in place of the plan's own, whose special tokens it sees."""
    from .chat import ChatTemplate

    return ChatTemplate(source, special=own.special if isinstance(own, ChatTemplate) else None)


def _choice_params(params: SamplingParams, index: int) -> SamplingParams:
    if params.n == 1:
        return params
    seed = None if params.seed is None else (params.seed + index) % 2**64
    return msgspec.structs.replace(params, n=1, seed=seed)


def _open_ended(text: str, message: Message) -> str:
    """The rendered conversation cut right after the content of its last message."""
    content = message.get("content")
    if not isinstance(content, str) or not content.strip():
        raise UserError("continue_final_message needs a last message with text")
    start = text.rfind(content.strip())
    if start < 0:
        raise UserError("the chat template changes the last message, so continue_final_message can't continue it")
    trimmed = text[: start + len(content.strip())]
    trailing = content[len(content.rstrip()) :]
    return trimmed + trailing if text.startswith(trimmed + trailing) else trimmed


class _GenerationConfig(msgspec.Struct):
    """The sampling fields of generation_config.json."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None


def sampling_defaults(directory: Path) -> dict[str, Any]:
    """Sampling parameters that the model's authors recommend; empty if they recommend none.

    Raises UserError if the file is not JSON or holds values out of range.
    """
    path = directory / GENERATION_CONFIG
    if not path.exists():
        return {}
    try:
        config = decode_json(path.read_bytes(), _GenerationConfig)
        defaults = {name: value for name, value in msgspec.structs.asdict(config).items() if value is not None}
        SamplingParams(**defaults)
    except (ValueError, UserError) as error:
        raise UserError(f"{path} can't be used: {error}; correct it or compile the plan again") from None
    return defaults
