"""Options that several commands share."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any, TypeVar

import click
import msgspec

from ..runtime.errors import UserError
from ..runtime.options import EngineOptions, SpeculativeConfig, TextOptions, parse_memory

Command = Callable[..., Any]
Config = TypeVar("Config")

as_json = click.option("--json", "as_json", is_flag=True, help="Print JSON.")

_ENGINE = (
    click.option(
        "--memory",
        default="0.9",
        show_default=True,
        metavar="SHARE|AMOUNT",
        help="Memory to use in all: a share of what is available, or an amount such as 8GiB.",
    ),
    click.option("--max-num-seqs", type=click.IntRange(1), help="Requests running at once.  [default: the plan's]"),
    click.option("--max-batched-tokens", type=click.IntRange(1), help="Tokens of a step.  [default: the plan's]"),
    click.option("--threads", type=click.IntRange(1), help="Kernel threads.  [default: one a core]"),
    click.option("--speculative-config", metavar="JSON", help="How to guess tokens; see the documentation."),
)
_TEXT = (
    click.option("--tool-call-parser", help="Form of tool calls, such as hermes.  [default: the plan's]"),
    click.option("--reasoning-parser", help="Form of reasoning, such as qwen3.  [default: the plan's]"),
    click.option("--chat-template", metavar="FILE", help="Jinja template.  [default: the plan's]"),
)
_STEP = (
    click.option("--batch", type=click.IntRange(1), default=1, show_default=True, help="Sequences in the step."),
    click.option("--tokens", type=click.IntRange(1), default=1, show_default=True, help="New tokens of each sequence."),
    click.option("--context", type=click.IntRange(1), help="Tokens of each, new ones included.  [default: 128]"),
)
_SAMPLING = (
    click.option("--max-tokens", type=click.IntRange(1), help="Most tokens of an answer.  [default: until it ends]"),
    click.option("--temperature", type=float, help="0 is greedy.  [default: the model's]"),
    click.option("--top-p", type=float, help="Sample from the likeliest tokens of this sum.  [default: the model's]"),
    click.option("--top-k", type=int, help="Sample from the likeliest so many tokens.  [default: the model's]"),
    click.option("--seed", type=int, help="Makes sampling repeatable."),
    click.option("--stop", multiple=True, help="Text that ends an answer; may be repeated."),
)


def text_options(command: Command) -> Command:
    """`--tool-call-parser --reasoning-parser --chat-template`, as `text: TextOptions`."""

    @wraps(command)
    def gathered(
        *, tool_call_parser: str | None, reasoning_parser: str | None, chat_template: str | None, **rest: Any
    ) -> None:
        text = TextOptions(
            tool_parser=tool_call_parser,
            reasoning_parser=reasoning_parser,
            chat_template=None if chat_template is None else _template(chat_template),
        )
        command(text=text, **rest)

    return _with(_TEXT, gathered)


def _template(given: str) -> str:
    """A template's text: that of a file, or the template itself. Raises UserError if it is neither."""
    path = Path(given)
    try:
        if "{%" in given or "{{" in given:
            return given
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise UserError(f"--chat-template must be a file with a template, or a template: {path}: {error}") from None


def engine_options(command: Command) -> Command:
    """`--memory --max-num-seqs --max-batched-tokens --threads --speculative-config`, as `options: EngineOptions`."""

    @wraps(command)
    def gathered(
        *,
        memory: str,
        max_num_seqs: int | None,
        max_batched_tokens: int | None,
        threads: int | None,
        speculative_config: str | None,
        **rest: Any,
    ) -> None:
        options = EngineOptions(
            memory=parse_memory(memory),
            max_num_seqs=max_num_seqs or 0,
            max_batched_tokens=max_batched_tokens or 0,
            threads=threads or 0,
            speculative_config=parse_config("--speculative-config", speculative_config, SpeculativeConfig),
        )
        command(options=options, **rest)

    return _with(_ENGINE, gathered)


def parse_config(option: str, text: str | None, kind: type[Config]) -> Config | None:
    """The value of an option that takes a JSON object. Raises UserError naming what is wrong with it."""
    if text is None:
        return None
    try:
        return msgspec.json.decode(text, type=kind)
    except msgspec.DecodeError as error:
        raise UserError(f"{option} must be a JSON object of {', '.join(kind.__struct_fields__)}: {error}") from None  # type: ignore[attr-defined]


def step_size(command: Command) -> Command:
    """`--batch --tokens --context`, passed as `size: StepSize`."""

    @wraps(command)
    def gathered(*, batch: int, tokens: int, context: int | None, **rest: Any) -> Any:
        from .workload import StepSize  # it knows the kernels, which serving need not load

        return command(size=StepSize(batch, tokens, context or 0), **rest)

    return _with(_STEP, gathered)


def sampling_options(command: Command) -> Command:
    """`--max-tokens --temperature --top-p --top-k --seed --stop`, passed as `sampling`: those given, by name."""

    @wraps(command)
    def gathered(**values: Any) -> None:
        names = ("max_tokens", "temperature", "top_p", "top_k", "seed", "stop")
        given = {name: value for name in names if (value := values.pop(name)) not in (None, ())}
        command(sampling=given, **values)

    return _with(_SAMPLING, gathered)


def _with(options: tuple[Callable[[Command], Command], ...], command: Command) -> Command:
    for option in reversed(options):
        command = option(command)
    return command
