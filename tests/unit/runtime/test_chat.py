"""Chat templates render as transformers renders them, and cannot run away or get out."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from toolkit.runtime.chat import ChatTemplate
from toolkit.runtime.errors import UserError

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": 'The weather at a <place> & time — "now"',
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        },
    }
]
CALL = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": {"city": "Zürich", "days": 2}}}
CHAT: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": '  Hi <b>there</b> & "you"\n'},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "content": "12°", "tool_call_id": "c1"},
    {"role": "assistant", "content": "12 degrees.", "reasoning_content": "easy"},
    {"role": "user", "content": [{"type": "text", "text": "And"}, {"type": "text", "text": "now?"}]},
]
TEMPLATES = {
    "plain": "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m['content'] }}{{ eos_token }}{% endfor %}",
    "generation prompt": "{% for m in messages %}{{ m.role ~ ': ' ~ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}",
    "white space": """
        {%- for message in messages %}
            {%- if loop.first and message.role == 'system' %}
                {{- 'S: ' + message.content | trim + '\n' }}
            {%- elif message.content is string %}
                {{- message.role | upper }}: {{ message.content | trim }}
            {%- endif %}
            {% if not loop.last %}
    next
            {% endif %}
        {%- endfor %}
    """,
    "tools": "{% if tools %}{{ tools | tojson(indent=4) }}\n{% for t in tools %}{{ t | tojson }}{% endfor %}{% endif %}"
    "{% for m in messages %}{% if m.tool_calls is defined and m.tool_calls %}{% for c in m.tool_calls %}"
    "<call>{{ c.function.name }} {{ c.function.arguments | tojson }}</call>{% endfor %}"
    "{% elif m.role == 'tool' %}<result>{{ m.content }}</result>{% endif %}{% endfor %}",
    "content parts": "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content or [] %}{% if part.type == 'text' %}{{ part['text'] }} {% endif %}{% endfor %}"
    "{% endif %}|{% endfor %}",
    "namespace and slices": "{% set ns = namespace(last=-1, names=[]) %}{% for m in messages[1:] %}"
    "{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% set ns.names = ns.names + [m.role] %}{% endif %}"
    "{% endfor %}{{ ns.last }}{{ ns.names }}{{ messages[::-1][0].role }}{{ (messages | length) // 2 }}",
    "loop controls": "{% for m in messages %}{% if m.role == 'tool' %}{% continue %}{% endif %}"
    "{% if loop.index > 4 %}{% break %}{% endif %}{{ loop.index }}{{ m.role }}{% else %}none{% endfor %}",
    "macros": "{% macro show(value, level=0) %}{% if value is mapping %}{% for k, v in value | dictsort %}"
    "{{ '  ' * level }}{{ k }}:\n{{ show(v, level + 1) }}{% endfor %}{% else %}{{ '  ' * level }}{{ value }}\n"
    "{% endif %}{% endmacro %}{% for tool in tools or [] %}{{ show(tool) }}{% endfor %}",
    "generation tag": "{% for m in messages %}{% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content }}{{ eos_token }}{% endgeneration %}{% else %}{{ m.content }}{% endif %}{% endfor %}",
    "reasoning": "{% for m in messages %}{{ m.reasoning_content or '-' }}{{ m.thinking }}{% endfor %}",
    "filters": "{{ messages | selectattr('role', 'equalto', 'user') | map(attribute='content') | list | length }}"
    "{{ messages | map(attribute='role') | join(', ') }}{{ 'a-b-c'.split('-') | last }}{{ 'x' | default('y') }}"
    "{{ messages | rejectattr('role', 'in', ['user', 'tool']) | list | count }}{{ 'ab' | replace('a', '<') }}"
    "{{ [3, 1, 2] | sort | first }}{{ '%s-%02d' | format('n', 7) }}{{ '{}={:>4}'.format('k', 5) }}{{ 3.5 | int }}",
    "documents and variables": "{{ documents }}{{ thinking is defined }}{{ thinking }}{{ unk_token }}"
    "{% if enable_x is defined and enable_x is false %}off{% endif %}{{ {'a': messages[0].role, 'b': (1, 2)} }}",
    "strings": "{{ 'abc'[::-1] }}{{ 'a' 'b' }}{{ 'Hi'.startswith('H') }}{{ ' x '.strip() * 3 }}{{ 7 % 4 }}{{ 2 ** 10 }}"
    "{{ 'a,b'.replace(',', '\n') }}{{ \"it's\" | tojson }}{{ 'ß' | upper }}{{ none }}{{ true }}{{ 1 == 1.0 }}",
    "set blocks": "{% set t %}{% for m in messages %}{{ m.role }};{% endfor %}{% endset %}{{ t }}{{ t | count }}",
    "dict and items": "{% for k, v in dict(a=1, **{'b': 2}).items() %}{{ k }}{{ v }}{% endfor %}"
    "{% for a, b in [(1, 2), (3, 4)] %}{{ a + b }}{% endfor %}",
}


@pytest.fixture(scope="module")
def reference() -> Callable[..., str]:
    """transformers' rendering of a template."""
    from tokenizers import Tokenizer
    from tokenizers.models import BPE
    from transformers import PreTrainedTokenizerFast

    factory: Any = PreTrainedTokenizerFast
    tokenizer = factory(tokenizer_object=Tokenizer(BPE()), **SPECIAL)

    def render(template: str, messages: list[dict[str, Any]], **kwargs: Any) -> str:
        text: str = tokenizer.apply_chat_template(messages, chat_template=template, tokenize=False, **kwargs)
        return text

    return render


@pytest.mark.parametrize("prompt", [False, True])
@pytest.mark.parametrize("tools", [None, TOOLS], ids=["no tools", "tools"])
@pytest.mark.parametrize("name", TEMPLATES)
def test_renders_as_transformers_does(
    name: str, tools: list[dict[str, Any]] | None, prompt: bool, reference: Callable[..., str]
) -> None:
    template = TEMPLATES[name]
    options: dict[str, Any] = {"tools": tools, "thinking": "deep", "enable_x": False}
    expected = reference(template, CHAT, add_generation_prompt=prompt, **options)
    found = ChatTemplate(template, special=SPECIAL).render(CHAT, add_generation_prompt=prompt, **options)
    assert found == expected


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
MESSAGE = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "assistant", "tool"]), "content": st.text() | st.none()},
    optional={"tool_calls": st.lists(JSON, max_size=2), "reasoning": st.text(), "extra": JSON},
)
SHOW_ALL = (
    "{{ bos_token }}{% for m in messages %}{{ m | tojson(sort_keys=true) }}{{ m.content ~ m.role }}"
    "{{ (m.content or '') | trim }}{% endfor %}{{ tools | tojson }}{{ note }}"
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(messages=st.lists(MESSAGE, min_size=1, max_size=4), tools=st.none() | st.lists(JSON, max_size=2), note=JSON)
def test_any_conversation_renders_as_transformers_does(
    messages: list[dict[str, Any]], tools: Any, note: Any, reference: Callable[..., str]
) -> None:
    tools = tools if tools is None else [{"tool": tool} for tool in tools]
    expected = reference(SHOW_ALL, messages, tools=tools, note=note, add_generation_prompt=True)
    assert ChatTemplate(SHOW_ALL, special=SPECIAL).render(messages, tools, note=note) == expected


def test_the_date_is_today() -> None:
    found = ChatTemplate("{{ strftime_now('%Y-%m-%d') }}").render([{"role": "user"}])
    assert found in {time.strftime("%Y-%m-%d"), time.strftime("%Y-%m-%d", time.localtime(time.time() - 5))}


def test_smollm2_renders_as_transformers_does(smollm2: Path, tmp_path: Path, reference: Callable[..., str]) -> None:
    from toolkit.models.gguf_file import read_gguf

    template = read_gguf(smollm2).metadata["tokenizer.chat_template"]
    for chat in (CHAT[:2], CHAT[1:2], [*CHAT[:2], CHAT[4], CHAT[1]]):
        for prompt in (False, True):
            expected = reference(template, chat, add_generation_prompt=prompt)
            assert ChatTemplate(template).render(chat, None, prompt) == expected


# --- files ------------------------------------------------------------------------------------------------------------


def test_open_reads_the_templates_and_the_special_tokens(tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_text("{{ bos_token }}plain")
    (tmp_path / "chat_template_tool_use.jinja").write_text("{{ eos_token }}tools")
    (tmp_path / "special_tokens_map.json").write_text(json.dumps(SPECIAL))
    template = ChatTemplate.open(tmp_path)
    assert template.render(CHAT) == "<s>plain"
    assert template.render(CHAT, TOOLS) == "</s>tools"


def test_open_without_a_template(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"has no chat_template\.jinja, so it can't chat"):
        ChatTemplate.open(tmp_path)


@pytest.mark.parametrize("content", [b"\xff\xfe", b"{{ 1 }}"])
def test_damaged_files(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "chat_template.jinja").write_bytes(content)
    (tmp_path / "special_tokens_map.json").write_text("{")
    with pytest.raises(UserError, match="damaged chat template"):
        ChatTemplate.open(tmp_path)


# --- what is refused --------------------------------------------------------------------------------------------------


def refused(template: str, messages: Any = ({"role": "user", "content": "x"},), **kwargs: Any) -> str:
    begun = time.thread_time()
    with pytest.raises(UserError) as error:
        ChatTemplate(template).render(messages, **kwargs)
    assert time.thread_time() - begun < 4.0
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{% for %}", "Expected an expression"),
        ("{{ a.b }}", "'a' is undefined"),
        ("{{ 1 / 0 }}", "division by zero"),
        ("{{ none + 1 }}", "unsupported operand"),
        ("{{ {}['x'].y }}", "has no attribute 'x'"),
        ("{{ 'a'.encode('rot99') }}", "unknown encoding"),
        ("{% include 'x' %}", "no loader"),
    ],
)
def test_faults_of_the_template(template: str, reason: str) -> None:
    message = refused(template)
    assert message.startswith("the chat template can't render this conversation: ")
    assert reason in message


@pytest.mark.parametrize(
    "template",
    [
        "{% for i in range(90000) %}{% for j in range(90000) %}{% endfor %}{% endfor %}",
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    ],
)
def test_endless_templates_are_stopped(template: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("toolkit.runtime.sandbox.MAX_SECONDS", 0.2)
    assert "takes too long" in refused(template)


DOUBLING = (
    "{{% set ns = namespace(v={0}) %}}{{% for i in range(60) %}}{{% set ns.v = {1} %}}{{% endfor %}}{{{{ {2} }}}}"
)


@pytest.mark.parametrize(
    "template",
    [
        DOUBLING.format("'ab'", "ns.v ~ ns.v", "ns.v"),
        DOUBLING.format("'ab'", "ns.v + ns.v", "ns.v"),
        DOUBLING.format("'ab'", "ns.v * 2", "ns.v"),
        DOUBLING.format("'ab'", "ns.v | replace('a', 'aa')", "ns.v"),
        DOUBLING.format("'ab'", "ns.v.replace('a', 'aa')", "ns.v"),
        DOUBLING.format("'ab'", "'%s%s' % (ns.v, ns.v)", "ns.v"),
        DOUBLING.format("'ab'", "'{0}{0}'.format(ns.v)", "ns.v"),
        DOUBLING.format("'ab'", "ns.v.join([ns.v, ns.v])", "ns.v"),
        DOUBLING.format("[1]", "ns.v + ns.v", "ns.v"),
        DOUBLING.format("[1]", "[ns.v, ns.v]", "ns.v | tojson"),
        DOUBLING.format("[1]", "{'a': ns.v, 'b': ns.v}", "ns.v"),
        DOUBLING.format("[1]", "(ns.v, ns.v)", "ns.v == 1"),
        "{% set s = 'ab' %}" + "{% set s %}{{ s }}{{ s }}{% endset %}" * 60,
        "{{ 'a' * 10 ** 10 }}",
        "{{ [0] * 10 ** 10 }}",
        "{{ 'a'.center(10 ** 9) }}",
        "{{ 'a' | center(10 ** 9) }}",
        "{{ 'a' | indent(10 ** 9, true) }}",
        "{{ [1] | batch(10 ** 9, 0) | list }}",
        "{{ '%1000000000d' % 1 }}",
        "{{ '%*d' % (10 ** 9, 1) }}",
        "{{ '{:1000000000}'.format(1) }}",
        "{{ '{:{w}}'.format(1, w=10 ** 9) }}",
        "{{ 10 ** (10 ** 9) }}",
        DOUBLING.format("9", "ns.v * ns.v", "1"),
        "{{ range(10 ** 9) | list }}",
        "{{ [1] | tojson(indent=10 ** 9) }}",
        "{{ [1] | tojson(false, 10 ** 9) }}",
        "{{ [1] | tojson(indent='a' * 10 ** 6) }}",
        "{{ ([0] * 10 ** 4) | tojson(separators=('a' * 10 ** 6, ':')) }}",
        "{{ ([0] * 10 ** 4) | tojson(indent=60000) }}",
    ],
)
def test_huge_values_are_refused(template: str) -> None:
    assert "can't render" in refused(template)


@pytest.mark.parametrize("depth", [100, 300, 3000])
@pytest.mark.parametrize(
    ("opening", "inside", "closing"),
    [
        ("{{", "(", "1"),
        ("{{", "[", "1"),
        ("{{", "not ", "1"),
        ("{{", "-", "1"),
        ("", "{% if 1 %}", ""),
        ("", "{% for i in [1] %}", ""),
        ("", "{% set a %}", ""),
    ],
)
def test_deeply_nested_templates_are_rendered_or_refused(opening: str, inside: str, closing: str, depth: int) -> None:
    """Python's compiler, which sees what jinja makes of them, has limits of its own."""
    ends = {"(": ")", "[": "]", "{% if 1 %}": "{% endif %}", "{% for i in [1] %}": "{% endfor %}"}
    end = ends.get(inside, "{% endset %}" if "set" in inside else "")
    template = opening + inside * depth + closing + end * depth + ("}}" if opening else "")
    try:
        ChatTemplate(template).render([])
    except UserError as error:
        assert "nested too deeply" in str(error)


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update(role='x') }}",
        "{{ cycler.__init__.__globals__ }}",
        "{{ namespace(__class__=1) }}",
        "{% set n = namespace() %}{% set n._x = 1 %}",
        "{{ raise_exception.__globals__.x }}",
        "{{ '{0.__class__.__mro__}'.format('') }}",
        "{{ dict.__subclasses__() }}",
        "{{ self.__init__.__globals__ }}",
    ],
)
def test_templates_cannot_reach_python_or_change_the_messages(template: str) -> None:
    refused(template)


def test_messages_that_are_no_objects() -> None:
    assert "must be an object with a role, not str" in refused("x", ["hello"])
    assert "JSON values only, not object" in refused("x", [{"role": "user", "content": object()}])


def test_renders_on_many_threads_at_once() -> None:
    template = ChatTemplate(TEMPLATES["white space"])
    chats = [[{"role": "user", "content": str(number)}] for number in range(40)]
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(template.render, chats)) == [template.render(chat) for chat in chats]


def test_a_long_conversation_is_within_the_limits() -> None:
    chat = [{"role": "user", "content": "word " * 2000} for _ in range(200)]  # two million characters
    assert len(ChatTemplate(TEMPLATES["generation prompt"]).render(chat)) > 2_000_000


def test_nothing_heavy_is_imported() -> None:
    code = (
        "import sys; import toolkit.runtime.tokenizer, toolkit.runtime.chat; early = set(sys.modules);"
        "toolkit.runtime.chat.ChatTemplate('x').render([{'role': 'user'}]);"
        "heavy = {'torch', 'transformers', 'huggingface_hub'};"
        "print(sorted({'jinja2', 'tokenizers'} & early), sorted(heavy & set(sys.modules)))"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert found.strip() == "[] []"
