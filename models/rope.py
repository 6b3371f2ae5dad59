"""Hooks for rotary embeddings: tables are computed at compile time, and every rotation becomes one op.

A rotary module yields cos and sin for the positions; a function of the modeling file, `apply_rotary..`, uses them. What
the function does is found numerically, with tables of the form that the module makes. A module whose frequencies depend
on the length of the sequence is run for every length, and becomes a table of frequencies by length.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import SymInt, Tensor, nn

from .probe import RopeKind, agree, classify_rope
from .tracing import OPS, outside_tracing


@dataclass(frozen=True)
class Frequencies:
    """cos and sin of a position p are `scale` times those of p * f, where f[W] goes by the length of the sequence."""

    rows: Tensor
    """[K, W]: of the lengths `first`, `first` + 1, .. and, in the last row, of all that are longer."""
    first: int
    scale: float


@dataclass(frozen=True)
class RopeTable:
    """cos and sin [positions, W], float32, as a rotary module computes them."""

    cos: Tensor
    sin: Tensor
    frequencies: Frequencies | None = None
    """If they depend on the length of the sequence; then cos and sin are those of one length."""


@dataclass(frozen=True)
class RopeSite:
    """A way in which the model applies rotary tables: one function, one of its tensors."""

    function: Callable[..., Any]
    argument: str
    """The parameter that takes the tensor to rotate."""
    others: tuple[str, ...]
    """Parameters that take other tensors to rotate."""
    options: tuple[tuple[str, object], ...]
    """Arguments that are no tensors."""
    dim: int
    time_axis: int
    """Axis of the tokens in the function's 4-D tensors, 1 or 2."""

    @property
    def name(self) -> str:
        """The function, for messages."""
        return f"{self.function.__module__.rpartition('.')[2]}.{self.function.__qualname__}"

    def classify(self, table: Tensor) -> RopeKind | None:
        """How the function rotates, given tables of this form."""
        return classify_rope(self._apply, self.dim, table)

    def _apply(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """The function for x[1, H, T, D] and tables [1, T, W]."""
        swap = self.time_axis == 1
        inputs = dict.fromkeys((self.argument, *self.others), x.transpose(1, 2) if swap else x)
        found = self.function(**inputs, cos=cos, sin=sin, **dict(self.options))
        if self.others:
            order = [name for name in inspect.signature(self.function).parameters if name in inputs]
            found = found[order.index(self.argument)]
        assert isinstance(found, Tensor)
        return found.transpose(1, 2) if swap else found


class RopeHooks:
    """The rotary tables and rotations of one model, filled while it is traced."""

    def __init__(self, max_context: int, report: Callable[[str, str], None]) -> None:
        self.max_context = max_context
        self.tables: list[RopeTable] = []
        self.sites: list[RopeSite] = []
        self._report = report
        self._numbers: dict[object, int | None] = {}

    def replace_module(self, path: str, module: nn.Module) -> None:
        """Make a rotary module yield `rope_table`."""
        original, traced = copy.deepcopy(module), module.forward

        def forward(*args: object, **kwargs: object) -> Any:
            values = [*args, *kwargs.values()]
            key = (path, *(repr(value) for value in values if not isinstance(value, Tensor)))
            if key not in self._numbers:
                self._numbers[key] = outside_tracing(lambda: self._tabulate(path, original, args, kwargs))
            number = self._numbers[key]
            if number is None:
                return traced(*args, **kwargs)
            positions = next(v for v in values if isinstance(v, Tensor) and not v.is_floating_point())
            return tuple(OPS.rope_table(positions, number, self.tables[number].cos.shape[-1]))

        module.forward = forward

    def _tabulate(self, path: str, module: nn.Module, args: Any, kwargs: Any) -> int | None:
        """Run a rotary module for every position; the table's number, or None, after a problem, if it has none."""
        name = f"rotary module {type(module).__name__}"
        whole = _run(module, args, kwargs, self.max_context)
        if whole is None:
            self._report(f"{name} doesn't return cos and sin [1, T, W]", path)
            return None
        limit = _consistent_length(lambda count: _run(module, args, kwargs, count), whole)
        if limit < self.max_context:
            found = _by_length(module, args, kwargs, limit, self.max_context)
            if found is None:
                text = f"{name} computes something else in sequences of more than {limit} tokens: limit them to {limit}"
                self._report(text, path)
            whole = replace(whole, frequencies=found)
        self.tables.append(whole)
        return len(self.tables) - 1

    def replaced(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """A rope function that calls `rope` for each tensor it rotates."""
        signature = inspect.signature(function)

        def apply(*args: object, **kwargs: object) -> Any:
            given = signature.bind(*args, **kwargs).arguments
            cos, sin = given.pop("cos", None), given.pop("sin", None)
            rotated = {name: x for name, x in given.items() if isinstance(x, Tensor)}
            options = tuple((name, x) for name, x in given.items() if not isinstance(x, Tensor))
            if not isinstance(cos, Tensor) or not isinstance(sin, Tensor) or any(x.ndim != 4 for x in rotated.values()):
                place = function.__module__.rpartition(".")[2]
                self._report(f"{function.__name__} of {place} doesn't take 4-D tensors, cos and sin", "")
                return function(*args, **kwargs)
            results = []
            for name, x in rotated.items():
                axis = 1 if isinstance(x.shape[1], SymInt) else 2
                others = tuple(other for other in rotated if other != name)
                site = RopeSite(function, name, others, options, int(x.shape[-1]), axis)
                results.append(self._rotate(x, cos, sin, site))
            return tuple(results) if len(results) > 1 else results[0]

        return apply

    def _rotate(self, x: Tensor, cos: Tensor, sin: Tensor, site: RopeSite) -> Any:
        if site not in self.sites:
            self.sites.append(site)
        number = self.sites.index(site)
        if site.time_axis == 1:
            return OPS.rope(x, cos, sin, site=number)
        return OPS.rope(x.transpose(1, 2), cos, sin, site=number).transpose(1, 2)


def _run(module: nn.Module, args: Any, kwargs: Any, count: int) -> RopeTable | None:
    """What a rotary module yields for `count` positions from 0 on."""
    return _call(copy.deepcopy(module), args, kwargs, torch.arange(count))  # modules may remember the longest sequence


def _call(module: nn.Module, args: Any, kwargs: Any, positions: Tensor) -> RopeTable | None:
    """What a rotary module yields for some positions, with float32 in place of the hidden states."""

    def real(value: object) -> object:
        if not isinstance(value, Tensor):
            return value
        return torch.zeros(1, 1, 1) if value.is_floating_point() else positions[None]

    found = module(*map(real, args), **{name: real(value) for name, value in kwargs.items()})
    if not isinstance(found, tuple) or len(found) != 2:
        return None
    if any(not t.is_floating_point() or t.ndim != 3 or t.shape != (1, len(positions), t.shape[-1]) for t in found):
        return None
    cos, sin = found
    return RopeTable(cos[0].float(), sin[0].float())


def _consistent_length(run: Callable[[int], RopeTable | None], whole: RopeTable) -> int:
    """The longest sequence whose frequencies, which position 1 shows, are those of a short one."""

    def frequencies(count: int) -> Tensor:
        table = whole if count == len(whole.cos) else run(count)
        assert table is not None
        return table.cos[1]

    good, bad = 2, len(whole.cos)
    if bad <= good or torch.equal(frequencies(good), frequencies(bad)):
        return bad
    short = frequencies(good)
    while bad - good > 1:
        middle = (good + bad) // 2
        good, bad = (middle, bad) if torch.equal(frequencies(middle), short) else (good, middle)
    return good


def _by_length(module: nn.Module, args: Any, kwargs: Any, first: int, last: int) -> Frequencies | None:
    """Frequencies of sequences of `first` to `last` tokens, as few rows as differ; None if they are not found."""

    def row(module: nn.Module, length: int) -> tuple[Tensor, float] | None:
        positions = torch.tensor([0, 1, length - 1])
        table = _call(module, args, kwargs, positions)
        return None if table is None else _frequencies(module, table, positions)

    between = sorted({first + 1, last, *range(first + 1, last, max(1, (last - first) // 8))})
    some = [row(copy.deepcopy(module), length) for length in (first, *between)]
    rows = [found[0] for found in some if found is not None]
    if all(torch.equal(each, rows[-1]) for each in rows[1:]):
        found = some[:2]
    else:
        growing = copy.deepcopy(module)  # it may compute a longer sequence from what it remembers of a shorter one
        found = [row(growing, length) for length in range(first, last + 1)]
    known = [each for each in found if each is not None]
    scales = {scale for _, scale in known}
    if len(known) < len(found) or len(rows) < len(some) or len(scales) != 1:
        return None
    return Frequencies(torch.stack([each for each, _ in known]), first, scales.pop())


def _frequencies(module: nn.Module, table: RopeTable, positions: Tensor) -> tuple[Tensor, float] | None:
    """The buffer of a rotary module from which it just computed a table of `positions`, the first of them 0, and the
    factor of its cos and sin.
    """
    scale, width = float(table.cos[0, 0]), table.cos.shape[-1]
    for buffer in module.buffers():
        for columns in (buffer.repeat(2), buffer.repeat_interleave(2), buffer) if buffer.ndim == 1 else ():
            angles = positions[:, None].float() * columns
            if (
                len(columns) == width
                and agree(table.cos, angles.cos() * scale)
                and agree(table.sin, angles.sin() * scale)
            ):
                return columns.float(), scale
    return None
