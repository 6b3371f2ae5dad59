"""Requests of the OpenAI API with vLLM's extras: every field is honored or refused by name, none ignored silently."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Literal, TypeVar

import msgspec

from .. import grammar
from ..errors import UserError
from ..parsers.answer import needs_special
from ..prompt import Prompts
from ..request import SamplingParams
from .errors import ApiError

MAX_STOPS = 16
MAX_STOP_CHARACTERS = 4096
MAX_PROMPTS = 1024

# --- fields that are refused ------------------------------------------------------------------------------------------

_TOOLS = "only chat calls tools"
_MEDIA = "this model reads and writes text only"
_STORE = "only /v1/responses are stored"

REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {
    "audio": ((), _MEDIA),
    "chat_template": ((), "only chat has a template"),
    "documents": (([],), "put documents into the messages"),
    "echo": ((False,), "only completions can repeat the prompt"),
    "function_call": (("none",), "use tool_choice"),
    "functions": (([],), "use tools"),
    "include_reasoning": ((True,), "reasoning is part of the text"),
    "kv_transfer_params": ((), "prefill and decode run in one server"),
    "length_penalty": ((1.0,), "beam search is not supported"),
    "logits_processors": (([],), "code in requests is not run"),
    "mm_processor_kwargs": ((), _MEDIA),
    "modalities": ((["text"],), _MEDIA),
    "moderation": ((), "there is no moderation model"),
    "parallel_tool_calls": ((True, False), _TOOLS),
    "prediction": ((), "predicted outputs are not supported"),
    "prompt_cache_options": ((), "use cache_salt"),
    "prompt_cache_retention": (("in_memory", "in-memory"), "prefixes are cached in memory only"),
    "prompt_embeds": ((), "prompts are text or token ids"),
    "reasoning_effort": (("none",), "only chat thinks"),
    "service_tier": (("auto", "default"), "there is one tier"),
    "spaces_between_special_tokens": ((True,), "special tokens are joined as the tokenizer joins them"),
    "store": ((False,), _STORE),
    "suffix": (("",), "filling in the middle is not supported"),
    "tool_choice": (("none", "auto"), _TOOLS),
    "tools": (([],), _TOOLS),
    "use_beam_search": ((False,), "beam search is not supported"),
    "verbosity": (("medium",), "the model has no such control"),
    "vllm_xargs": (({},), "there are no extensions"),
    "web_search_options": ((), "the server searches nothing"),
}
"""Known fields that can't be honored: the values that ask for nothing, which are taken, and why others are refused."""

# --- fields that are honored ------------------------------------------------------------------------------------------


class StreamOptions(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """What a stream holds besides the text."""

    include_usage: bool = False
    """A last chunk with the usage."""
    continuous_usage_stats: bool = False
    """The usage so far in every chunk."""
    include_obfuscation: bool = False

    def __post_init__(self) -> None:
        if self.include_obfuscation:
            raise ValueError("include_obfuscation is not supported: chunks are sent as long as they are")


class Structured(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """`structured_outputs`: what the output must be, one of these."""

    json: dict[str, Any] | str | None = None
    """A JSON schema."""
    json_object: bool | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    """In Lark."""


class _Schema(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    name: str = ""
    description: str | None = None
    schema: dict[str, Any] = {}
    strict: bool | None = None


class ResponseFormat(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """`response_format`."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: _Schema | None = None


def _made(name: str, make: Callable[[Any], str], value: Any) -> str:
    """The grammar that a field asks for. Raises ApiError(400)."""
    try:
        return make(value)
    except UserError as error:
        raise ApiError(400, f"{name} can't be used: {error}", param=name.partition(".")[0]) from None


_DEFAULTED = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
_COPIED = (
    *("n", "frequency_penalty", "presence_penalty", "logit_bias", "seed", "include_stop_str_in_output"),
    *("ignore_eos", "min_tokens", "skip_special_tokens", "prompt_logprobs"),
)


class _Request(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Fields that completions and chat share. A null field is an absent one."""

    model: str | None = None
    max_tokens: int | None = None
    n: int = 1
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: dict[int, float] = {}
    seed: int | None = None
    stop: str | list[str] = []
    stop_token_ids: list[int] = []
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    min_tokens: int = 0
    skip_special_tokens: bool = True
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] = []
    prompt_logprobs: int | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    add_special_tokens: bool | None = None
    truncate_prompt_tokens: int | None = None
    """Keep only the last so many tokens of the prompt; -1: as many as fit."""
    priority: int = 0
    cache_salt: str = ""
    request_id: str | None = None
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool = False
    """Name tokens in log-probabilities `token_id:N`."""
    response_format: ResponseFormat | None = None
    structured_outputs: Structured | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    user: str | None = None
    """Labels of the caller's own, which change nothing: `user`, `metadata`, `safety_identifier`, `prompt_cache_key`."""
    metadata: dict[str, str] = {}
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None

    def __post_init__(self) -> None:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options needs stream to be true")
        if self.stream and self.prompt_logprobs is not None:
            raise ValueError("prompt_logprobs is not available in a stream: set stream to false")
        if self.prompt_logprobs == -1:
            raise ValueError("prompt_logprobs -1, the whole vocabulary, is available in Python only: use at most 20")
        if len(self.stops) > MAX_STOPS or any(len(stop) > MAX_STOP_CHARACTERS for stop in self.stops):
            raise ValueError(f"stop may hold {MAX_STOPS} strings of {MAX_STOP_CHARACTERS} characters")
        if not all(-100.0 <= bias <= 100.0 for bias in self.logit_bias.values()):
            raise ValueError("logit_bias must be -100 to 100")
        if self.truncate_prompt_tokens is not None and self.truncate_prompt_tokens < -1:
            raise ValueError(f"truncate_prompt_tokens must be -1 or more, not {self.truncate_prompt_tokens}")

    @property
    def stops(self) -> tuple[str, ...]:
        """The stop strings; an empty one asks for nothing."""
        return tuple(stop for stop in ([self.stop] if isinstance(self.stop, str) else self.stop) if stop)

    @property
    def grammars(self) -> dict[str, str]:
        """The grammars that the output must keep to, by the field that asks for it. Raises ApiError(400)."""
        asked = self.structured_outputs or Structured()
        fields: dict[str, Any] = {
            "structured_outputs.json": (grammar.of_schema, asked.json),
            "structured_outputs.json_object": (grammar.of_schema, {"type": "object"} if asked.json_object else None),
            "structured_outputs.regex": (grammar.of_regex, asked.regex),
            "structured_outputs.choice": (grammar.of_choice, asked.choice),
            "structured_outputs.grammar": (grammar.of_lark, asked.grammar),
            "guided_json": (grammar.of_schema, self.guided_json),
            "guided_regex": (grammar.of_regex, self.guided_regex),
            "guided_choice": (grammar.of_choice, self.guided_choice),
            "guided_grammar": (grammar.of_lark, self.guided_grammar),
            "response_format": (grammar.of_schema, self._response_schema()),
        }
        return {name: _made(name, make, value) for name, (make, value) in fields.items() if value is not None}

    @property
    def structured(self) -> bool:
        """Whether a field may ask for a grammar."""
        guided = (self.guided_json, self.guided_regex, self.guided_choice, self.guided_grammar)
        return any(value is not None for value in (self.response_format, self.structured_outputs, *guided))

    def _response_schema(self) -> dict[str, Any] | None:
        wanted = self.response_format
        if wanted is None or wanted.type == "text":
            return None
        if wanted.type == "json_object":
            return {"type": "object"}
        if wanted.json_schema is None:
            message = "response_format of type json_schema needs json_schema with a schema"
            raise ApiError(400, message, param="response_format")
        return wanted.json_schema.schema

    def _grammar(self) -> str:
        """The one grammar asked for, or "". Raises ApiError(400) if it is wrong or there are several."""
        grammars = self.grammars
        if len(grammars) > 1:
            names = " and ".join(grammars)
            raise ApiError(400, f"{names} exclude each other: send one of them", param=next(iter(grammars)))
        for name, text in grammars.items():
            if problem := grammar.check(text):
                raise ApiError(400, f"{name} can't be used: {problem}", param=name.partition(".")[0])
        return next(iter(grammars.values()), "")

    @property
    def with_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    def sampling(self, prompts: Prompts, **changes: Any) -> SamplingParams:
        """The engine's parameters: this request's, else the model's own defaults."""
        given = {name: value for name in _DEFAULTED if (value := getattr(self, name)) is not None}
        given |= {name: getattr(self, name) for name in _COPIED}
        given |= {"grammar": self._grammar()}
        given |= {"stop": self.stops, "stop_token_ids": tuple(self.stop_token_ids)}
        allowed = self.allowed_token_ids
        given |= {"allowed_token_ids": None if allowed is None else tuple(allowed), "bad_words": tuple(self.bad_words)}
        try:
            return prompts.params(**(given | changes))
        except UserError as error:
            raise ApiError(400, str(error), param=_param(str(error), type(self))) from None


class CompletionRequest(_Request, kw_only=True):
    """`POST /v1/completions`."""

    id_prefix: ClassVar[str] = "cmpl-"
    prompt_field: ClassVar[str] = "prompt"

    prompt: str | list[int | str | list[int]]
    echo: bool = False
    logprobs: int | None = None
    best_of: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.best_of is not None and self.best_of < self.n:
            raise ValueError(f"best_of must be at least n, which is {self.n}, not {self.best_of}")
        if self.best_of is not None and self.best_of > self.n and self.stream:
            raise ValueError("best_of above n is not available in a stream: set stream to false")
        if self.max_tokens == 0 and not self.echo:
            raise ValueError("max_tokens must be at least 1, except with echo")
        if len(self.prompts) > MAX_PROMPTS:
            raise ValueError(f"prompt may hold {MAX_PROMPTS} prompts, not {len(self.prompts)}")

    @property
    def prompts(self) -> list[str | list[int]]:
        """The prompts, one or more, each text or token ids."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        ids = [item for item in self.prompt if isinstance(item, int)]
        if ids and len(ids) == len(self.prompt):
            return [ids]
        if ids or not self.prompt:
            raise ValueError("prompt must be text, a list of token ids, or a list of one or more of these")
        return [item for item in self.prompt if not isinstance(item, int)]

    def params(self, prompts: Prompts) -> SamplingParams:
        changes: dict[str, Any] = {"logprobs": self.logprobs}
        if self.echo and self.logprobs is not None and self.prompt_logprobs is None:
            changes["prompt_logprobs"] = self.logprobs
        if self.best_of is not None and self.best_of > self.n:
            changes |= {"n": self.best_of, "logprobs": self.logprobs or 0}
        return self.sampling(prompts, max_tokens=max(1, 16 if self.max_tokens is None else self.max_tokens), **changes)


class _TextPart(msgspec.Struct, tag="text", forbid_unknown_fields=True):
    text: str


class _RefusalPart(msgspec.Struct, tag="refusal", forbid_unknown_fields=True):
    refusal: str


class ChatMessage(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """One message. Contents in parts are joined by newlines; what the template makes of names is the template's own."""

    role: str
    content: str | list[_TextPart | _RefusalPart] | None = None
    name: str | None = None
    refusal: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None

    def as_dict(self) -> dict[str, Any]:
        """The message as templates expect it: content is a string, and the developer is the system."""
        data = {name: value for name, value in msgspec.structs.asdict(self).items() if value is not None}
        if isinstance(self.content, list):
            parts = (part.text if isinstance(part, _TextPart) else part.refusal for part in self.content)
            data["content"] = "\n".join(parts)
        data.setdefault("content", data.pop("refusal", "") or "")
        if self.role == "developer":
            data["role"] = "system"
        if self.tool_calls is not None:
            data["tool_calls"] = [_parsed_call(call) for call in self.tool_calls]
        return data


def _parsed_call(call: dict[str, Any]) -> dict[str, Any]:
    """A tool call with its arguments as an object, as templates expect, where the API has them as JSON text."""
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = msgspec.json.decode(function["arguments"] or "{}")
    except (msgspec.DecodeError, RecursionError):  # the model wrote them so, and sees them again
        arguments = {"arguments": function["arguments"]}
    return call | {"function": function | {"arguments": arguments}}


class _Function(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A function that the model may call."""

    type: Literal["function"]
    function: _Function

    def as_dict(self) -> dict[str, Any]:
        """The tool as templates expect it."""
        function = {name: value for name, value in msgspec.structs.asdict(self.function).items() if value is not None}
        function.pop("strict", None)
        return {"type": self.type, "function": function}


class ChatRequest(_Request, kw_only=True):
    """`POST /v1/chat/completions`."""

    id_prefix: ClassVar[str] = "chatcmpl-"
    prompt_field: ClassVar[str] = "messages"

    messages: list[ChatMessage]
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template: str | None = None
    """In place of the plan's own; it runs in the same sandbox, within the same limits."""
    chat_template_kwargs: dict[str, Any] = {}
    reasoning_effort: str | None = None
    """For templates that have such a variable; `none` also for those that have `enable_thinking`."""
    max_completion_tokens: int | None = None
    logprobs: bool = False
    top_logprobs: int | None = None
    tools: list[Tool] = []
    tool_choice: str | dict[str, Any] = "auto"
    """`none`, `auto`, `required`, or `{"type": "function", "function": {"name": ...}}`."""
    parallel_tool_calls: bool = True
    """False: only the first call of an answer is kept."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs to be true")
        if isinstance(self.tool_choice, str) and self.tool_choice not in {"none", "auto", "required"}:
            raise ValueError("tool_choice must be none, auto, required, or name a function")
        if self.tool_choice not in ("none", "auto") and not self.forced:
            raise ValueError("tool_choice must be for one of the tools that are sent")
        if None not in (self.max_tokens, self.max_completion_tokens) and self.max_tokens != self.max_completion_tokens:
            raise ValueError("max_tokens and max_completion_tokens differ: send one of them")

    @property
    def limit(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def forced(self) -> list[Tool]:
        """The tools of which the model must call one."""
        if isinstance(self.tool_choice, str):
            return self.tools if self.tool_choice == "required" else []
        function = self.tool_choice.get("function")
        name = function.get("name") if isinstance(function, dict) else None
        return [tool for tool in self.tools if tool.function.name == name]

    @property
    def structured(self) -> bool:
        """See `_Request`."""
        return super().structured or bool(self.forced)

    @property
    def grammars(self) -> dict[str, str]:
        """See `_Request`; tools that must be called are a list of calls in JSON."""
        calls = [
            {
                "type": "object",
                "properties": {
                    "name": {"const": tool.function.name},
                    "arguments": tool.function.parameters or {"type": "object"},
                },
                "required": ["name", "arguments"],
                "additionalProperties": False,
            }
            for tool in self.forced
        ]
        if not calls:
            return super().grammars
        most = {} if self.parallel_tool_calls and self.tool_choice == "required" else {"maxItems": 1}
        forced = _made("tools", grammar.of_schema, {"type": "array", "items": {"anyOf": calls}, "minItems": 1, **most})
        return super().grammars | {"tool_choice": forced}

    @property
    def offered(self) -> list[Tool]:
        """The tools that the model may call."""
        return [] if self.tool_choice == "none" else self.tools

    def params(self, prompts: Prompts) -> SamplingParams:
        """Raises ApiError(400) if the model is to call tools and how it writes that is not known."""
        changes: dict[str, Any] = {"logprobs": (self.top_logprobs or 0) if self.logprobs else None}
        formats = prompts.formats
        if self.offered and not self.forced and formats.tools is None:
            message = "tools is not supported: the chat template shows no known form of calls, see --tool-call-parser"
            raise ApiError(400, message, param="tools", code="unsupported_parameter")
        if needs_special(formats, tools_offered=bool(self.offered)):
            changes["skip_special_tokens"] = False
        return self.sampling(prompts, max_tokens=self.limit, **changes)


class TokenizePrompt(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """`POST /tokenize` with a prompt."""

    prompt: str
    model: str | None = None
    add_special_tokens: bool = True
    return_token_strs: bool = False


class TokenizeChat(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """`POST /tokenize` with messages."""

    messages: list[ChatMessage]
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] = {}
    model: str | None = None
    add_special_tokens: bool = False
    return_token_strs: bool = False


def render_messages(request: ChatRequest | TokenizeChat, prompts: Prompts) -> str:
    """The prompt text of a request's messages. Raises ApiError(400) for what the template has no variable for."""
    kwargs = request.chat_template_kwargs
    reserved = {"messages", "tools", "add_generation_prompt"} & kwargs.keys()
    if reserved:
        raise ApiError(400, f"chat_template_kwargs can't set {min(reserved)}", param="chat_template_kwargs")
    template, tools = None, None
    if isinstance(request, ChatRequest):
        template = request.chat_template
        tools = [tool.as_dict() for tool in request.offered] or None
        kwargs = _effort(request.reasoning_effort, template or prompts.template_source) | kwargs
    return prompts.render(
        [message.as_dict() for message in request.messages],
        add_generation_prompt=request.add_generation_prompt,
        continue_final_message=request.continue_final_message,
        tools=tools,
        template=template,
        **kwargs,
    )


def _effort(effort: str | None, template: str) -> dict[str, Any]:
    """The template's variables that say how much to think."""
    if effort is None:
        return {}
    if "reasoning_effort" in template:
        return {"reasoning_effort": effort}
    if "enable_thinking" in template:
        return {"enable_thinking": effort != "none"}
    if effort == "none":
        return {}
    message = "reasoning_effort is not supported: the chat template has no variable for it"
    raise ApiError(400, message, param="reasoning_effort", code="unsupported_parameter")


class DetokenizeRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """`POST /detokenize`."""

    tokens: list[int]
    model: str | None = None


# --- reading ----------------------------------------------------------------------------------------------------------

T = TypeVar("T")
_FIELD = re.compile(r"`\$\.(\w+)|unknown field `(\w+)`|missing required field `(\w+)`")


def parse(data: Mapping[str, Any], kind: type[T], refused: Mapping[str, tuple[tuple[Any, ...], str]] = REFUSED) -> T:
    """A request of JSON data.

    Raises ApiError(400) naming the field that is refused, unknown, missing, or of a wrong type or value.
    """
    fields = {name: value for name, value in data.items() if value is not None}
    for name in refused.keys() & fields.keys():
        neutral, reason = refused[name]
        if name in getattr(kind, "__struct_fields__", ()):
            continue
        if not any(type(fields[name]) is type(value) and fields[name] == value for value in neutral):
            raise ApiError(400, f"{name} is not supported: {reason}", param=name, code="unsupported_parameter")
        del fields[name]
    try:
        return msgspec.convert(fields, kind, str_keys=True)
    except (msgspec.ValidationError, RecursionError) as error:
        message = str(error)
        raise ApiError(400, _sentence(message), param=_param(message, kind)) from None


def _param(message: str, kind: type) -> str | None:
    """The field that a message of ours or of the decoder is about."""
    match = _FIELD.search(message)
    if match:
        return next(group for group in match.groups() if group)
    first = message.split(" ", 1)[0]
    return first if first in getattr(kind, "__struct_fields__", ()) else None


def _sentence(message: str) -> str:
    """The decoder's message without its own notation: fields are named as the caller wrote them."""
    message = re.sub(r"Object contains unknown field `(\w+)`", r"\1 is not a field of this request", message)
    message = re.sub(r"Object missing required field `(\w+)`", r"\1 is required", message)
    message = re.sub(r" - at `\$(\.\w+)?`$", r"", message) if message.endswith("`$`") else message
    return re.sub(r"(.*) - at `\$\.(.+)`$", r"\2: \1", message)


def parse_json(body: bytes) -> dict[str, Any]:
    """A request body as JSON data. Raises ApiError(400) if it is no JSON object."""
    try:
        data = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ApiError(400, f"The body is not valid JSON: {error}.") from None
    if not isinstance(data, dict):
        raise ApiError(400, "The body must be a JSON object.")
    return data
