"""The text form of a graph: what `--dump-ir` writes, and what `parse_graph` reads back exactly.

    symbol T <= 512
    input %tokens: int32[T]
    param %embed: float32[49152, 576] = "model.embed_tokens.weight"
    param %qkv: float32[960, 576] = "q.weight"[:576], "k.weight".T[0:192] as affine(8, 32, 0, "float16", false)
    param %cos: float32[8192, 32] = constant 3f0c…              a large constant, by its SHA-256
    param %half: float32[2] = constant [0.5, 0.5]               a small one, in full
    cache %cache0: layer 0, heads 3, key_dim 64, value_dim 64, window 0
    %x: float32[T, 576] = embedding(%embed, %tokens) {scale = 24.0} from "model.embed_tokens" at "modeling_llama.py:12"
    return %x

Attributes that have their default are left out. A graph with large constants is read back with their table.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence

import msgspec
import numpy as np

from ..runtime.encodings import Encoding
from .ir import Attr, Cache, Graph, Op, Param, Source, Value
from .op_spec import DTYPES, Array, to_numpy
from .ops import OPS, complete
from .shapes import CACHE, Dim, DType, Shape, Sym, TensorType
from .weights import Constant, Piece, Recipe

INLINE = 16
"""Constants of up to this many finite elements are printed in full."""
AFFINE_FIELDS = ("bits", "group", "zero", "scale", "has_minimum")
BLOCK_FIELDS = ("block", "levels")
"""Printed after those unless both have their defaults."""
CACHE_FIELDS = ("layer", "heads", "key_dim", "value_dim", "window")


def print_graph(graph: Graph) -> str:
    """The text form."""
    return "\n".join(_lines(graph)) + "\n"


def constants(graph: Graph) -> dict[str, Array]:
    """The arrays that the text form names by digest."""
    made = (param.recipe.constant for param in graph.params)
    return {constant.digest: constant.array for constant in made if constant is not None and not _fits(constant.array)}


def _lines(graph: Graph) -> Iterator[str]:
    symbols = {dim.name: dim.bound for value in graph.values() for dim in value.type.shape if isinstance(dim, Sym)}
    yield from (f"symbol {name} <= {bound}" for name, bound in symbols.items())
    yield from (f"input {value}" for value in graph.inputs)
    yield from (f"param {param.value} = {_recipe(param.recipe)}" for param in graph.params)
    for cache in graph.caches:
        fields = ", ".join(f"{name} {getattr(cache, name)}" for name in CACHE_FIELDS)
        yield f"cache %{cache.value.name}: {fields}"
    yield from (_op(op) for op in graph.ops)
    yield "return " + ", ".join(f"%{value.name}" for value in graph.outputs)


def _op(op: Op) -> str:
    results = ", ".join(map(str, op.outputs))
    operands = ", ".join(f"%{value.name}" for value in op.inputs)
    specs = OPS[op.kind].attrs
    shown = [f"{name} = {_attr(value)}" for name, value in op.attrs.items() if repr(value) != repr(specs[name].default)]
    attrs = f" {{{', '.join(shown)}}}" if shown else ""
    module = f" from {json.dumps(op.source.module)}" if op.source.module else ""
    line = f" at {json.dumps(op.source.line)}" if op.source.line else ""
    return f"{results} = {op.kind}({operands}){attrs}{module}{line}"


def _attr(value: Attr) -> str:
    if isinstance(value, tuple):
        return f"[{', '.join(map(_attr, value))}]"
    if isinstance(value, bool):
        return "true" if value else "false"
    return json.dumps(value) if isinstance(value, str) else repr(value)


def _recipe(recipe: Recipe) -> str:
    if recipe.constant is not None:
        array = recipe.constant.array
        body = f"[{', '.join(str(item).lower() for item in array.ravel())}]" if _fits(array) else recipe.constant.digest
        return f"constant {body}{_encoding(recipe.encoding)}"
    return ", ".join(map(_piece, recipe.pieces)) + _encoding(recipe.encoding)


def _piece(piece: Piece) -> str:
    cut = f"[{piece.start}:{'' if piece.stop is None else piece.stop}]" if piece.start or piece.stop is not None else ""
    return json.dumps(piece.tensor) + (".T" if piece.transpose else "") + cut


def _encoding(encoding: Encoding | None) -> str:
    if encoding is None:
        return ""
    if encoding.kind != "affine":
        return f" as {encoding.kind}"
    names = AFFINE_FIELDS + (BLOCK_FIELDS if encoding.block or encoding.levels else ())
    return f" as affine({', '.join(_attr(getattr(encoding, name)) for name in names)})"


def _fits(array: Array) -> bool:
    return array.size <= INLINE and bool(np.isfinite(array).all()) and array.size > 0


# --- reading ----------------------------------------------------------------------------------------------------------

_TOKEN = re.compile(
    r'\s*("(?:[^"\\]|\\.)*"|%[^\s:,()={}\[\]]+|<=|[0-9a-f]{64}'
    r"|-?(?:inf|nan|[0-9]+(?:\.[0-9]+)?(?:e[+-]?[0-9]+)?)(?![A-Za-z_0-9])|[A-Za-z_][A-Za-z_0-9]*|[^\s])"
)


_DTYPES: Mapping[str, DType] = {dtype: dtype for dtype in (*DTYPES, CACHE.dtype)}


class _Reader:
    """Tokens of one line."""

    def __init__(self, line: str, number: int) -> None:
        self.line, self.number = line, number
        self.tokens = [match.group(1) for match in _TOKEN.finditer(line)]
        self.at = 0

    def peek(self) -> str:
        return self.tokens[self.at] if self.at < len(self.tokens) else ""

    def next(self, wanted: str = "") -> str:
        token = self.peek()
        if not token or (wanted and token != wanted):
            raise self.error(f"expected {wanted or 'more'}, found {token or 'the end'}")
        self.at += 1
        return token

    def take(self, token: str) -> bool:
        """Step over a token if it is next."""
        if self.peek() != token:
            return False
        self.at += 1
        return True

    def error(self, message: str) -> ValueError:
        return ValueError(f"line {self.number}: {message}: {self.line}")

    def name(self) -> str:
        token = self.next()
        if not token.startswith("%"):
            raise self.error(f"expected a value, found {token}")
        return token[1:]

    def string(self) -> str:
        token = self.next()
        if not token.startswith('"'):
            raise self.error(f"expected a string, found {token}")
        return str(json.loads(token))

    def integer(self) -> int:
        token = self.next()
        try:
            return int(token)
        except ValueError:
            raise self.error(f"expected an integer, found {token}") from None

    def attr(self) -> Attr:
        token = self.next()
        if token == "[":
            items = []
            while not self.take("]"):
                items.append(self.attr())
                self.take(",")
            return self._tuple(items)
        if token in ("true", "false"):
            return token == "true"
        if token.startswith('"'):
            return str(json.loads(token))
        try:
            return int(token) if re.fullmatch(r"-?[0-9]+", token) else float(token)
        except ValueError:
            raise self.error(f"expected a value of an attribute, found {token}") from None

    def _tuple(self, items: Sequence[Attr]) -> tuple[int, ...] | tuple[float, ...] | tuple[str, ...]:
        strings = tuple(item for item in items if isinstance(item, str))
        integers = tuple(item for item in items if isinstance(item, int))
        numbers = tuple(item for item in items if isinstance(item, int | float))
        for same in (strings, integers, numbers):
            if len(same) == len(items):
                return same
        raise self.error("expected a list of numbers or of strings")


def parse_graph(text: str, table: Mapping[str, Array] | None = None) -> Graph:
    """The graph that the text spells; `table` gives large constants by digest (see `constants`).

    Raises ValueError naming the line. The graph is not verified.
    """
    return _Parser(table or {}).parse(text)


class _Parser:
    def __init__(self, table: Mapping[str, Array]) -> None:
        self.table = table
        self.symbols: dict[str, int] = {}
        self.values: dict[str, Value] = {}
        self.inputs: list[Value] = []
        self.params: list[Param] = []
        self.caches: list[Cache] = []
        self.ops: list[Op] = []
        self.outputs: list[Value] = []

    def parse(self, text: str) -> Graph:
        statements = {
            "symbol": self._symbol,
            "input": self._input,
            "param": self._param,
            "cache": self._cache,
            "return": self._return,
        }
        for number, line in enumerate(text.splitlines(), 1):
            reader = _Reader(line, number)
            if not reader.tokens:
                continue
            if reader.peek() in statements:
                statements[reader.next()](reader)
            else:
                self._op(reader)
            if reader.peek():
                raise reader.error(f"unexpected {reader.peek()}")
        caches = tuple(self.caches)
        return Graph(tuple(self.inputs), tuple(self.params), tuple(self.ops), tuple(self.outputs), caches)

    def _symbol(self, reader: _Reader) -> None:
        name = reader.next()
        reader.next("<=")
        self.symbols[name] = reader.integer()

    def _input(self, reader: _Reader) -> None:
        self.inputs.append(self._value(reader))

    def _param(self, reader: _Reader) -> None:
        value = self._value(reader)
        reader.next("=")
        self.params.append(Param(value, self._recipe(reader, value.type)))

    def _cache(self, reader: _Reader) -> None:
        value = Value(reader.name(), CACHE)
        reader.next(":")
        fields = {}
        for field in CACHE_FIELDS:
            reader.next(field)
            fields[field] = reader.integer()
            reader.take(",")
        self.values[value.name] = value
        self.caches.append(Cache(value, **fields))

    def _return(self, reader: _Reader) -> None:
        while reader.peek():
            self.outputs.append(self._known(reader))
            reader.take(",")

    def _op(self, reader: _Reader) -> None:
        outputs = [self._value(reader)]
        while reader.take(","):
            outputs.append(self._value(reader))
        reader.next("=")
        kind = reader.next()
        inputs = []
        reader.next("(")
        while not reader.take(")"):
            inputs.append(self._known(reader))
            reader.take(",")
        attrs: dict[str, Attr] = {}
        if reader.take("{"):
            while not reader.take("}"):
                name = reader.next()
                reader.next("=")
                attrs[name] = reader.attr()
                reader.take(",")
        source = Source(reader.string() if reader.take("from") else "", reader.string() if reader.take("at") else "")
        try:
            full = complete(kind, [value.type for value in inputs], attrs)
        except ValueError as error:
            raise reader.error(str(error)) from None
        self.ops.append(Op(kind, tuple(inputs), tuple(outputs), full, source))

    def _known(self, reader: _Reader) -> Value:
        name = reader.name()
        if name not in self.values:
            raise reader.error(f"%{name} is not defined")
        return self.values[name]

    def _value(self, reader: _Reader) -> Value:
        name = reader.name()
        reader.next(":")
        value = Value(name, self._type(reader))
        self.values[name] = value
        return value

    def _type(self, reader: _Reader) -> TensorType:
        dtype = reader.next()
        reader.next("[")
        dims: list[Dim] = []
        while not reader.take("]"):
            dims.append(self._dim(reader))
            reader.take(",")
        if dtype not in _DTYPES:
            raise reader.error(f"expected a dtype, found {dtype}")
        return TensorType(_DTYPES[dtype], tuple(dims))

    def _dim(self, reader: _Reader) -> Dim:
        token = reader.next()
        if token in self.symbols:
            return Sym(token, self.symbols[token])
        if not token.isdigit():
            raise reader.error(f"expected a dimension, found {token}")
        if reader.take("*"):
            name = reader.next()
            return Sym(name, self.symbols[name], int(token))
        return int(token)

    def _recipe(self, reader: _Reader, type_: TensorType) -> Recipe:
        if reader.take("constant"):
            return Recipe(constant=Constant(self._constant(reader, type_)), encoding=self._encoding(reader))
        pieces = [self._piece(reader)]
        while reader.take(","):
            pieces.append(self._piece(reader))
        return Recipe(tuple(pieces), self._encoding(reader))

    def _constant(self, reader: _Reader, type_: TensorType) -> Array:
        if re.fullmatch(r"[0-9a-f]{64}", reader.peek()):
            digest = reader.next()
            if digest not in self.table:
                raise reader.error(f"constant {digest} is not in the table")
            return self.table[digest]
        shape: Shape = type_.shape
        return np.array(reader.attr(), to_numpy(type_.dtype)).reshape([dim for dim in shape if isinstance(dim, int)])

    def _piece(self, reader: _Reader) -> Piece:
        tensor, transpose = reader.string(), False
        if reader.take("."):
            reader.next("T")
            transpose = True
        if not reader.take("["):
            return Piece(tensor, transpose)
        start = reader.integer()
        reader.next(":")
        stop = None if reader.peek() == "]" else reader.integer()
        reader.next("]")
        return Piece(tensor, transpose, start, stop)

    def _encoding(self, reader: _Reader) -> Encoding | None:
        if not reader.take("as"):
            return None
        fields: dict[str, object] = {"kind": reader.next()}
        if reader.take("("):
            for name in AFFINE_FIELDS:
                fields[name] = reader.attr()
                more = reader.take(",")
            for name in BLOCK_FIELDS if more else ():
                fields[name] = reader.attr()
                reader.take(",")
            reader.next(")")
        try:
            return msgspec.convert(fields, Encoding)
        except msgspec.ValidationError as error:
            raise reader.error(str(error)) from None
