"""The IR: immutable values, ops and graphs in static single assignment form.

A graph computes one step of a model over `T` tokens packed from `S` sequences. State is functional: every cache enters
as a value of dtype "cache", an op that writes it returns its next version, and an op that reads it takes that version,
so that data dependencies are the only order there is.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from .shapes import TensorType
from .weights import Recipe

Attr = int | float | bool | str | tuple[int, ...] | tuple[float, ...] | tuple[str, ...]


@dataclass(frozen=True)
class Value:
    """A named result; its name is unique in the graph."""

    name: str
    type: TensorType

    def __str__(self) -> str:
        return f"%{self.name}: {self.type}"


@dataclass(frozen=True)
class Source:
    """Where an op came from, for reports and error messages."""

    module: str = ""
    """Module path in the model, e.g. `model.layers.3.self_attn`."""
    line: str = ""
    """`file.py:123` in the modeling code, or the pass that made the op."""


@dataclass(frozen=True)
class Op:
    """One operation. `kind` is a row of the op table (`ops.py`), which defines its attributes and meaning."""

    kind: str
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]
    attrs: Mapping[str, Attr] = field(default_factory=dict)
    source: Source = Source()

    def __post_init__(self) -> None:
        object.__setattr__(self, "attrs", MappingProxyType(dict(sorted(self.attrs.items()))))

    @property
    def output(self) -> Value:
        """The only output."""
        (value,) = self.outputs
        return value


@dataclass(frozen=True)
class Param:
    """A weight or constant: a value and the lazy recipe that makes it from the checkpoint."""

    value: Value
    recipe: Recipe


@dataclass(frozen=True)
class Cache:
    """One layer's attention K/V cache as the graph sees it."""

    value: Value
    """Its initial state, of type `CACHE`."""
    layer: int
    heads: int
    key_dim: int
    value_dim: int
    window: int
    """Positions that attention can look back, 0 for all."""


@dataclass(frozen=True)
class Graph:
    """One step of a model. `inputs` are step inputs by name, int32: `tokens[T] positions[T] rows[R]`, and `lengths[T]`
    if RoPE depends on the length of a token's sequence (see `StepBatch` in `runtime/step.py`).
    """

    inputs: tuple[Value, ...]
    params: tuple[Param, ...]
    ops: tuple[Op, ...]
    outputs: tuple[Value, ...]
    caches: tuple[Cache, ...] = ()

    def producers(self) -> dict[str, Op]:
        """The op that makes each value, by value name."""
        return {value.name: op for op in self.ops for value in op.outputs}

    def uses(self) -> dict[str, list[Op]]:
        """The ops that read each value, by value name."""
        users: dict[str, list[Op]] = {}
        for op in self.ops:
            for value in dict.fromkeys(op.inputs):
                users.setdefault(value.name, []).append(op)
        return users

    def values(self) -> Iterator[Value]:
        """Every value: inputs, parameters, caches, then results in order."""
        yield from self.inputs
        yield from (param.value for param in self.params)
        yield from (cache.value for cache in self.caches)
        for op in self.ops:
            yield from op.outputs
