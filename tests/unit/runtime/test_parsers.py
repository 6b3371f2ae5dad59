"""Tool-call and reasoning parsers: what each reads, that cuts don't matter, and that nothing is an error."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.json import encode as dump_json
from pydantic_core import from_json

from toolkit.runtime.errors import UserError
from toolkit.runtime.formats import Formats, detect_formats
from toolkit.runtime.options import TextOptions
from toolkit.runtime.parsers.answer import REASONING_PARSERS, TOOL_PARSERS, AnswerParser, chosen_formats
from toolkit.runtime.parsers.body import Call, Parts

SCHEMAS = {"weather": {"city": {"type": "string"}, "days": {"type": "integer"}}, "time": {}}
ARGUMENTS = {"city": "Bern", "days": 2}
BODY = json.dumps(ARGUMENTS)
CALL = json.dumps({"name": "weather", "arguments": ARGUMENTS})
TIME = '{"name": "time", "arguments": {}}'

OUTPUTS: dict[str, tuple[str, str, int]] = {
    "hermes": (
        f"Let me see.\n<tool_call>\n{CALL}\n</tool_call>\n<tool_call>\n{TIME}\n</tool_call>",
        "Let me see.",
        2,
    ),
    "llama3_json": ('{"name": "weather", "parameters": ' + BODY + "}; " + TIME, "", 2),
    "llama4_pythonic": ("<|python_start|>[weather(city='Bern', days=2), time()]<|python_end|>", "", 2),
    "mistral": (
        f"Let me see.[TOOL_CALLS]weather[CALL_ID]abc123456[ARGS]{BODY}[TOOL_CALLS]time[ARGS]{{}}",
        "Let me see.",
        2,
    ),
    "deepseek": (
        f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n{BODY}\n```<｜tool▁call▁end｜>\n"
        "<｜tool▁call▁begin｜>time<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        "",
        2,
    ),
    "qwen3_xml": (
        "<tool_call>\n<function=weather>\n<parameter=city>\nBern\n</parameter>\n<parameter=days>\n2\n</parameter>\n"
        "</function>\n</tool_call>\n<tool_call>\n<function=time>\n</function>\n</tool_call>",
        "",
        2,
    ),
    "glm": (
        "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Bern</arg_value>\n<arg_key>days</arg_key>\n"
        "<arg_value>2</arg_value>\n</tool_call><tool_call>time\n</tool_call>",
        "",
        2,
    ),
    "kimi": (
        "Well<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>"
        f"{BODY}<|tool_call_end|><|tool_call_begin|>functions.time:1<|tool_call_argument_begin|>{{}}<|tool_call_end|>"
        "<|tool_calls_section_end|>",
        "Well",
        2,
    ),
    "granite": (f"<|tool_call|>[{CALL}, {TIME}]", "", 2),
    "gemma": (
        "<start_function_call>call:weather{city:<escape>Bern<escape>,days:2}<end_function_call>"
        "<|tool_call>call:time{}<tool_call|>",
        "",
        2,
    ),
    "gpt-oss": (
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary to=functions.weather "
        f"<|constrain|>json<|message|>{BODY}<|call|><|start|>assistant to=functions.time<|channel|>commentary"
        "<|message|>{}<|call|>",
        "",
        2,
    ),
}
REASONING: dict[str, tuple[str, str]] = {
    "qwen3": ("<think>\nHm, so.\n</think>\n\nYes.", "User: ?"),
    "glm": ("Hm, so.</think>Yes.", "User: ?<think>\n"),
    "deepseek_r1": ("Hm, so.\n</think>\n\nYes.", "User: ?"),
    "granite": ("Here is my thought process: Hm, so.\n\nHere is my response: Yes.", "User: ?"),
    "gpt-oss": (
        "<|channel|>analysis<|message|>Hm, so.<|end|><|start|>assistant<|channel|>final<|message|>Yes.<|return|>",
        "User: ?",
    ),
}
WRITTEN_ELSEWISE = ("llama4_pythonic", "qwen3_xml", "glm", "gemma")
"""Formats in which a call's arguments are not JSON."""
MARKS = [
    "<think>",
    "</think>",
    "Here is my response:",
    "[ARGS]",
    "<arg_key>",
    "</arg_key>",
    "<escape>",
    "{",
    "}",
    "[",
    "]",
]
MARKS += [
    "call:",
    "f(a=1)",
    "<function=f>",
    ",",
    '"',
    ":",
    "\n",
    " ",
    "<",
    "|",
    "\\d",
    "to=functions.f",
    "<|message|>",
    "\0",
]
MARKS += [mark for text, _, _ in OUTPUTS.values() for mark in (text[: len(text) // 2], text[len(text) // 2 :])]


def parse(formats: Formats, pieces: list[str], prompt: str = "") -> Parts:
    parser = AnswerParser(formats, prompt, SCHEMAS)
    parts = Parts()
    for piece in pieces:
        parts += parser.push(piece)
    return parts + parser.flush()


def test_every_parser_has_an_example() -> None:
    assert OUTPUTS.keys() == set(TOOL_PARSERS)
    assert REASONING.keys() == set(REASONING_PARSERS)


@pytest.mark.parametrize("name", TOOL_PARSERS)
def test_calls_are_read_and_cuts_do_not_matter(name: str) -> None:
    text, content, count = OUTPUTS[name]
    formats = Formats(tools=name, reasoning="gpt-oss" if name == "gpt-oss" else None)
    whole = parse(formats, [text])
    assert whole.content == content
    assert [call.name for call in whole.calls] == ["weather", "time"][:count]
    assert [json.loads(call.arguments) for call in whole.calls] == [ARGUMENTS, {}]
    assert parse(formats, list(text)) == whole
    for cut in range(len(text)):
        assert parse(formats, [text[:cut], text[cut:]]) == whole


@pytest.mark.parametrize("name", REASONING_PARSERS)
def test_reasoning_is_set_apart(name: str) -> None:
    text, prompt = REASONING[name]
    formats = Formats(reasoning=name)
    whole = parse(formats, [text], prompt)
    assert whole == Parts("Yes.", "Hm, so.")
    assert parse(formats, list(text), prompt) == whole


@pytest.mark.parametrize("name", sorted({*TOOL_PARSERS, *REASONING_PARSERS}))
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_whatever_a_model_writes_no_parser_fails_and_cuts_do_not_matter(name: str, data: st.DataObject) -> None:
    pieces = data.draw(st.lists(st.sampled_from(MARKS) | st.text(max_size=4), max_size=10))
    formats = Formats(
        name if name in TOOL_PARSERS else data.draw(st.sampled_from(TOOL_PARSERS)),
        name if name in REASONING_PARSERS else None,
    )
    prompt = data.draw(st.sampled_from(["", "<think>\n", "<think>\n\n</think>\n"]))
    text = "".join(pieces)
    whole = parse(formats, [text], prompt)
    assert parse(formats, pieces, prompt) == whole
    assert parse(formats, list(text), prompt) == whole
    assert all(call.name and call.arguments.startswith("{") for call in whole.calls if call.arguments)
    if name in WRITTEN_ELSEWISE:
        for call in whole.calls:
            assert not call.arguments or isinstance(from_json(call.arguments, allow_partial="trailing-strings"), dict)
    dump_json(whole)


@pytest.mark.parametrize("name", TOOL_PARSERS)
def test_arguments_come_while_they_are_written(name: str) -> None:
    text = OUTPUTS[name][0]
    parser = AnswerParser(Formats(tools=name), "", SCHEMAS)
    parts = Parts()
    for char in text[: text.index("2", text.index("days"))]:
        parts += parser.push(char)
    assert [call.name for call in parts.calls] == ["weather"]
    assert parts.calls[0].arguments.startswith('{"city": "Bern"')


@pytest.mark.parametrize("name", ["qwen3_xml", "glm", "gemma"])
def test_strings_come_while_they_are_written(name: str) -> None:
    text = OUTPUTS[name][0]
    parser = AnswerParser(Formats(tools=name), "", SCHEMAS)
    assert parser.push(text[: text.index("rn")]).calls == [Call("weather", '{"city": "Be')]
    parts = parser.push('"\n' + text[text.index("rn") :]) + parser.flush()
    assert json.loads('{"city": "Be' + parts.calls[0].arguments)["city"] == 'Be"\nrn'


ODD: list[tuple[str, str, list[Call], str]] = [
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "b', [Call("f", '{"a": "b')], ""),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1}</tool_call>', [Call("f", '{"a": 1}')], ""),
    ("hermes", '<tool_call>{"name": "f", "arguments": {a}}</tool_call>x', [Call("f", "{a}")], "x"),
    ("hermes", '<tool_call>{"arguments": {"a": 1}, "name": "f"}</tool_call>', [Call("f", '{"a": 1}')], ""),
    ("hermes", r'<tool_call>{"name": "f", "arguments": "{\"a\": 1}"}</tool_call>', [Call("f", '{"a": 1}')], ""),
    ("hermes", '<tool_call>{"name": "f", "arguments": null} and</tool_call>', [Call("f", "{}")], "and"),
    (
        "hermes",
        r'<tool_call>{"name": "\ud800", "arguments": {}}',
        [],
        r'<tool_call>{"name": "\ud800", "arguments": {}}',
    ),
    ("llama3_json", '{"answer": {"name": 1}}', [], '{"answer": {"name": 1}}'),
    (
        "llama4_pythonic",
        "[f(a=[1, '),'], b={'x': None}, c=true)]",
        [Call("f", '{"a": [1, "),"], "b": {"x": null}, "c": true}')],
        "",
    ),
    ("llama4_pythonic", "[f(a='''it's\n''', b=g(1))]", [Call("f", '{"a": "it\'s\\n"')], "b=g(1))]"),
    ("llama4_pythonic", r"[f(a='\ud800')]", [Call("f", r'{"a": "\ud800"}')], ""),
    ("llama4_pythonic", "[see (below)]", [], "[see (below)]"),
    ("llama4_pythonic", "[1, 2]", [], "[1, 2]"),
    ("qwen3_xml", "<tool_call><function=weather><parameter=days>2</parameter>", [Call("weather", '{"days": 2')], ""),
    ("glm", "<tool_call>weather", [], "<tool_call>weather"),
    (
        "gemma",
        "<|tool_call>call:f{a:{b:[1,<escape>x<escape>]},c:true}<tool_call|>",
        [Call("f", '{"a": {"b": [1, "x"]}, "c": true}')],
        "",
    ),
    (
        "kimi",
        "<|tool_call_begin|>functions.time:0<|tool_call_argument_begin|><|tool_call_end|>",
        [Call("time", "{}", "functions.time:0")],
        "",
    ),
    (
        "mistral",
        '[TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}}, {"name": "g", "arguments": {}}]',
        [Call("f", '{"a": 1}'), Call("g", "{}")],
        "",
    ),
]


@pytest.mark.parametrize(("name", "text", "calls", "content"), ODD)
def test_calls_that_are_odd_or_cut_off(name: str, text: str, calls: list[Call], content: str) -> None:
    whole = parse(Formats(tools=name), [text])
    assert whole == Parts(content, "", calls)
    assert parse(Formats(tools=name), list(text)) == whole


@pytest.mark.parametrize("text", ["<tool_call>{", "<tool_call>[1]</tool_call>", "<tool_call>" + "[" * 100_000])
def test_what_is_no_call_is_content(text: str) -> None:
    assert parse(Formats(tools="hermes"), [text]) == Parts(text)


def test_plain_text_passes_at_once() -> None:
    parser = AnswerParser(Formats("hermes", "qwen3"), "", SCHEMAS)
    assert [parser.push(piece).content for piece in ("Hello", " <b>", "x <tool", "s>")] == [
        "Hello",
        " <b>",
        "x",
        " <tools>",
    ]


@pytest.mark.parametrize(
    ("template", "formats"),
    [
        ("{{ '<tool_call>' }}", Formats("hermes")),
        ("<tool_call> <think></think>", Formats("hermes", "qwen3")),
        ("<tool_call><function=x></think>", Formats("qwen3_xml", "qwen3")),
        ("<｜Assistant｜><｜tool▁calls▁begin｜></think>", Formats("deepseek", "deepseek_r1")),
        ("<|start|><|channel|><|message|>", Formats("gpt-oss", "gpt-oss")),
        ("[TOOL_CALLS]", Formats("mistral")),
        ("<|im_start|>", Formats()),
    ],
)
def test_formats_are_detected_in_templates(template: str, formats: Formats) -> None:
    assert detect_formats(template) == formats


def test_special_tokens_tell_what_a_template_with_tools_leaves_open() -> None:
    special = ["<|begin_of_text|>", "<|python_tag|>"]
    assert detect_formats("{% if tools %}Call them in JSON{% endif %}", special) == Formats("llama3_json")
    assert detect_formats("{{ messages }}", special) == Formats()
    assert detect_formats("{% if tools %}<tool_call>{% endif %}", special) == Formats("hermes")


def test_the_user_chooses_before_the_template() -> None:
    told = Formats("hermes", "glm")
    assert chosen_formats(told, TextOptions()) == told
    chosen = TextOptions(tool_parser="openai", reasoning_parser="qwen3")
    assert chosen_formats(told, chosen) == Formats("gpt-oss", "qwen3")
    with pytest.raises(UserError, match="no tool-call parser 'x': choose one of hermes"):
        chosen_formats(told, TextOptions(tool_parser="x"))
