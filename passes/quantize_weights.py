"""Choose how each weight is stored."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

import yaml

from ..compiler.ir import Graph, Op, Param
from ..compiler.ops import OPS
from ..compiler.pass_ import Outcome, Pass
from ..runtime.encodings import BFLOAT16, FLOAT16, FLOAT32, INT4, INT8, Q4_1, Q5_0, Q5_1, Encoding, FloatName
from ..runtime.errors import UserError

KEEP, NONE = "keep", "none"
ENCODINGS: Mapping[str, Encoding] = {
    "float32": FLOAT32,
    "float16": FLOAT16,
    "bfloat16": BFLOAT16,
    "int8": INT8,
    "int4": INT4,
    "q4_1": Q4_1,
    "q5_0": Q5_0,
    "q5_1": Q5_1,
}
"""Encodings that a rule can ask for by name, besides `keep` (as the checkpoint has it) and `none` (the float dtype)."""
CHOICES = (KEEP, NONE, *ENCODINGS)
PRESETS: Mapping[str, tuple[str, str]] = {
    KEEP: (KEEP, KEEP),
    NONE: (NONE, NONE),
    "int8": ("int8", "int8"),
    "int4": ("int4", "int8"),
}
"""Preset to the choices for linear layers, and for embedding tables and the output head."""


@dataclass(frozen=True)
class QuantizationRule:
    """Weights whose checkpoint name contains a match of the regular expression get the encoding."""

    match: str
    encoding: str


@dataclass(frozen=True)
class Quantization:
    """How weights are to be stored: the first rule that matches decides, and without one the kind of layer does."""

    rules: tuple[QuantizationRule, ...] = ()
    linear: str = KEEP
    table: str = KEEP
    """For embedding tables and the output head, which lose more by rounding."""
    dtype: FloatName = "float32"
    """What `none` means, and what a weight that can't be quantized gets."""

    @staticmethod
    def parse(text: str, dtype: FloatName = "float32") -> Quantization:
        """From `keep`, `none`, `int8`, `int4` or the path of a YAML file: a list of {match, encoding}.

        Raises UserError for anything else.
        """
        if text in PRESETS:
            linear, table = PRESETS[text]
            return Quantization(linear=linear, table=table, dtype=dtype)
        path = Path(text)
        if path.suffix not in (".yaml", ".yml"):
            raise UserError(f"--quant expects {', '.join(PRESETS)} or a .yaml file of rules, found {text!r}")
        return Quantization(tuple(_read_rules(path)), dtype=dtype)

    def choice(self, tensor: str, *, table: bool) -> str:
        """The choice for a checkpoint tensor."""
        matching = (rule.encoding for rule in self.rules if re.search(rule.match, tensor))
        return next(matching, self.table if table else self.linear)


def _read_rules(path: Path) -> Iterator[QuantizationRule]:
    try:
        entries = yaml.safe_load(path.read_text())
    except OSError as error:
        raise UserError(f"can't read the quantization rules {path}: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"{path} is not YAML: {' '.join(str(error).split())}") from None
    if not isinstance(entries, list):
        raise UserError(f"{path} must be a list of rules with `match` and `encoding`, found {type(entries).__name__}")
    for number, entry in enumerate(entries, 1):
        yield _rule(entry, f"rule {number} of {path}")


def _rule(entry: object, where: str) -> QuantizationRule:
    if not isinstance(entry, dict) or entry.keys() != {"match", "encoding"}:
        raise UserError(f"{where} must have `match` and `encoding`, found {entry!r}")
    match, encoding = entry["match"], entry["encoding"]
    if encoding not in CHOICES:
        raise UserError(f"{where} has encoding {encoding!r}, expected one of {', '.join(CHOICES)}")
    try:
        re.compile(match)
    except (re.error, TypeError) as error:
        raise UserError(f"{where} has match {match!r}, which is no regular expression: {error}") from None
    return QuantizationRule(match, encoding)


@dataclass(frozen=True)
class QuantizeWeights(Pass):
    """Expects: weights not merged yet. Guarantees: every weight that only linear layers and embeddings read has the
    encoding that the rules choose (None: as the checkpoint has it); all else (norms, biases, tables) is float32.

    A weight whose rows are no multiple of the encoding's group stays at the float dtype, which is reported.
    """

    quantization: Quantization
    name: ClassVar[str] = "quantize_weights"

    def run(self, graph: Graph) -> Outcome:
        users, heads = graph.uses(), _heads(graph)
        notes: list[str] = []
        params = [self._param(param, users.get(param.value.name, []), heads, notes) for param in graph.params]
        matches = sum(old.recipe != new.recipe for old, new in zip(graph.params, params, strict=True))
        return Outcome(replace(graph, params=tuple(params)), matches, tuple(notes))

    def _param(self, param: Param, users: list[Op], heads: set[str], notes: list[str]) -> Param:
        encoding: Encoding | None = FLOAT32
        if param.recipe.constant is None and users and all(_reads_weight(op, param) for op in users):
            table = any(op.kind == "embedding" or op.output.name in heads for op in users)
            encoding = self._matrix(param, table, notes)
        return replace(param, recipe=replace(param.recipe, encoding=encoding))

    def _matrix(self, param: Param, table: bool, notes: list[str]) -> Encoding | None:
        plain = ENCODINGS[self.quantization.dtype]
        tensor = param.recipe.pieces[0].tensor
        choice = self.quantization.choice(tensor, table=table)
        if choice in (KEEP, NONE):
            return None if choice == KEEP else plain
        encoding, columns = ENCODINGS[choice], param.value.type.shape[1]
        assert isinstance(columns, int)
        if encoding.kind == "affine" and columns % encoding.group:
            notes.append(
                f"{tensor} stays {self.quantization.dtype}: its {columns} columns are no multiple of {encoding.group}"
            )
            return plain
        return encoding


def _heads(graph: Graph) -> set[str]:
    """Results of linear layers that reach an output through pointwise ops alone."""
    producers = graph.producers()
    heads, pending = set(), [value.name for value in graph.outputs]
    while pending:
        op = producers.get(pending.pop())
        if op is not None and op.kind == "linear":
            heads.add(op.output.name)
        elif op is not None and OPS[op.kind].expression(op.attrs, len(op.inputs)) is not None:
            pending += [value.name for value in op.inputs]
    return heads


def _reads_weight(op: Op, param: Param) -> bool:
    """Whether an op reads a parameter as the weight of a linear layer or the table of an embedding, and only so."""
    place = {"linear": 1, "embedding": 0}.get(op.kind)
    return place is not None and [value == param.value for value in op.inputs].index(True) == place
