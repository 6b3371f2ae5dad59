"""A Jinja environment for templates that came with a model: no access to Python, and bounded time and memory.

Every loop turn, macro and call checks the clock; every string that is made counts toward a limit, and operations that
could make a huge one at a stroke (`"a" * 10**9`, `center(10**9)`) are refused beforehand. Lists and objects count with
all that is in them, so that sharing cannot make a short one long when it is written out.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from functools import lru_cache, wraps
from typing import Any

from jinja2 import Environment, Template, TemplateError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

MAX_SECONDS = 2.0
"""Processor time of one rendering."""
MAX_CHARS = 1 << 26
"""Characters of all strings made in one rendering."""
MAX_WIDTH = 1 << 16
"""Largest number that a filter or string method may be given: a width, an indent, a count."""
MAX_BITS = 1 << 12
"""Longest integer that arithmetic may make."""
_ITEM = 16
"""Characters that an item of a list counts as."""
_CONTAINERS = (list, tuple, dict)


class LimitExceeded(TemplateError):
    """The template ran too long or made too much text."""


class _Budget:
    def __init__(self) -> None:
        self._deadline, self._chars = time.thread_time() + MAX_SECONDS, MAX_CHARS
        self._weights: dict[int, tuple[Any, int]] = {}  # with the values, so that an id means one value

    def weight(self, value: Any) -> int:
        """The values in a container, at every level and as often as they occur."""
        if not isinstance(value, _CONTAINERS):
            return 1
        if id(value) not in self._weights:
            self.spend(_ITEM * len(value))
            items = value.values() if isinstance(value, dict) else value
            self._weights[id(value)] = value, 1 + sum(map(self.weight, items))
        return self._weights[id(value)][1]

    def spend(self, chars: int) -> None:
        self._chars -= chars
        if self._chars < 0:
            raise LimitExceeded("it makes too much text")
        if time.thread_time() > self._deadline:
            raise LimitExceeded("it takes too long")


_budget: ContextVar[_Budget | None] = ContextVar("budget", default=None)


class Sandbox(ImmutableSandboxedEnvironment):
    """The environment; `render` is the way to use it."""

    intercepted_binops = frozenset(("+", "*", "**", "%"))

    def __init__(self, **options: Any) -> None:
        super().__init__(extensions=[_Generation, loopcontrols], finalize=self._count, **options)
        filters = self.filters | {"tojson": self._to_json}
        self.filters = {name: self._bounded(function) for name, function in filters.items()}
        self.globals |= {"dict": _Dict(), "namespace": _Namespace}
        del self.globals["lipsum"]
        self._compiled = lru_cache(maxsize=16)(self.from_string)

    def render(self, source: str, values: Mapping[str, Any]) -> str:
        """The text of a template. Raises jinja2.TemplateError, or whatever Python error its expressions cause."""
        token = _budget.set(_Budget())
        try:
            return self._made(source).render(values)
        finally:
            _budget.reset(token)

    def _made(self, source: str) -> Template:
        try:
            return self._compiled(source)
        except (SyntaxError, RecursionError, MemoryError):  # Python's own compiler bounds its stack and its blocks
            raise LimitExceeded("it is nested too deeply") from None

    def spend(self, chars: int = 0) -> None:
        """Check the limits. Templates call it at each turn of a loop."""
        budget = _budget.get()
        if budget is not None:
            budget.spend(chars)

    def join(self, *parts: Any) -> str:
        """The `~` operator."""
        text = "".join(map(str, parts))
        self.spend(len(text))
        return text

    def literal(self, value: Any) -> Any:
        """A list, tuple or dict that an expression makes."""
        budget = _budget.get()
        if budget is not None:
            budget.spend(_ITEM * budget.weight(value))
        return value

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        owner = getattr(getattr(__obj, "__wrapped__", __obj), "__self__", None)
        if isinstance(owner, str):
            _check_text_call(__obj.__name__, owner, args, kwargs)
        return __self._count(super().call(__context, __obj, *args, **kwargs))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        _check_binop(operator, left, right)
        return self._count(super().call_binop(context, operator, left, right))

    def _count(self, value: Any) -> Any:
        """Count a value that was made or is to be shown."""
        if isinstance(value, _CONTAINERS):
            return self.literal(value)
        self.spend(len(value) if isinstance(value, str) else 0)
        return value

    def _to_json(
        self,
        value: Any,
        ensure_ascii: bool = False,
        indent: int | str | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        """JSON as transformers writes it, counted piece by piece."""
        if isinstance(indent, str) and len(indent) > MAX_WIDTH:
            raise LimitExceeded("it calls tojson with a huge indent")
        encoder = json.JSONEncoder(ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
        pieces = []
        for piece in encoder.iterencode(value):
            self.spend(len(piece))
            pieces.append(piece)
        return "".join(pieces)

    def _bounded(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """A filter with its arguments checked and its result counted."""

        @wraps(function)  # with the attributes that say what jinja passes to it
        def bounded(*args: Any, **kwargs: Any) -> Any:
            given = [arg for arg in args if isinstance(arg, str | int | list | tuple | dict)]
            text = given[0] if given and isinstance(given[0], str) else ""
            _check_text_call(function.__name__.removeprefix("do_"), text, given[1:], kwargs)
            return self._count(function(*args, **kwargs))

        return bounded

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree: nodes.Template = _Checks().visit(super()._parse(source, name, filename))
        return tree


class _Dict:
    """`dict` without the attributes of the type."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)


class _Namespace(Namespace):
    """`namespace()` that keeps private names out and does not show what it holds."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        self, *given = args  # so that an attribute may be named `self`
        values = dict(*given, **kwargs)
        for name in values:
            _check_public(name)
        Namespace.__init__(self, values)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_public(name)
        super().__setitem__(name, value)

    def __repr__(self) -> str:
        return "<Namespace>"


def _check_public(name: str) -> None:
    if name.startswith("_"):
        raise SecurityError(f"a namespace can't have an attribute {name!r}")


class _Checks(NodeTransformer):
    """Puts a call of `Sandbox.spend` at the start of each loop and macro, and has `Sandbox` make new values."""

    def _spending(self, node: Any) -> nodes.Node:
        self.generic_visit(node)
        check = nodes.ExprStmt(_call("spend", [], node.lineno), lineno=node.lineno)
        node.body = [check, *node.body]
        checked: nodes.Node = node
        return checked

    visit_For = visit_Macro = _spending

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _call("join", node.nodes, node.lineno)

    def _literal(self, node: Any) -> nodes.Node:
        self.generic_visit(node)
        parts = [pair.value for pair in node.items] if isinstance(node, nodes.Dict) else node.items
        made: nodes.Node = node
        if getattr(node, "ctx", "load") != "load" or all(isinstance(part, nodes.Const) for part in parts):
            return made
        return _call("literal", [node], node.lineno)

    visit_List = visit_Tuple = visit_Dict = _literal


def _call(method: str, args: list[nodes.Expr], line: int) -> nodes.Call:
    return nodes.Call(nodes.EnvironmentAttribute(method, lineno=line), args, [], None, None, lineno=line)


def _check_binop(operator: str, left: Any, right: Any) -> None:
    if operator == "*":
        for text, count in ((left, right), (right, left)):
            if isinstance(text, str | list | tuple) and isinstance(count, int) and len(text) * count > MAX_CHARS:
                raise LimitExceeded("it makes too much text")
    if operator == "%" and isinstance(left, str):
        _check_text_call("format", left, (), {})
    if isinstance(left, int) and isinstance(right, int):
        bits = {"**": left.bit_length() * max(right, 0), "*": left.bit_length() + right.bit_length()}
        if bits.get(operator, 0) > MAX_BITS:
            raise LimitExceeded("it makes a huge number")


_WIDE_FIELD = re.compile(r"\d{6}|\*|\{[^}]*\{")
"""A field of a format string with a huge width, or one that is given by an argument."""


def _check_text_call(name: str, text: str, args: Any, kwargs: Mapping[str, Any]) -> None:
    """Refuse a string method or filter that could make a huge string, before it does."""
    values = [*args, *kwargs.values()]
    if name in ("format", "format_map"):
        if _WIDE_FIELD.search(text):
            raise LimitExceeded("it formats to a huge width")
        return
    if any(isinstance(value, int) and value > MAX_WIDTH for value in values):
        raise LimitExceeded(f"it calls {name} with a huge number")
    if name in ("replace", "join"):
        longest = max((len(value) for value in values if isinstance(value, str)), default=0)
        count = max((len(value) for value in values if isinstance(value, list | tuple)), default=len(text))
        if longest * (count + 1) > MAX_CHARS:
            raise LimitExceeded("it makes too much text")


class _Generation(Extension):
    """`{% generation %}`, by which templates mark the assistant's tokens for training: here it changes nothing."""

    tags = {"generation"}  # noqa: RUF012

    def __init__(self, environment: Environment) -> None:
        super().__init__(environment)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)

    def _body(self, caller: Callable[[], str]) -> str:
        return caller()
