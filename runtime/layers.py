"""The launch program by layer: what comes before the layers, the layers, and what comes after."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from .plan import ArenaArg, CacheArg, ConstArg, Launch, Plan, WeightArg


@dataclass(frozen=True)
class Part:
    """Launches that belong together; layers that are alike are one part."""

    name: str
    layers: tuple[int, ...]
    """Empty before and after the layers."""
    launches: tuple[tuple[int, ...], ...]
    """For each layer, else once: positions in the program."""


def without_layer(name: str) -> str:
    """The name with `*` for the number of its layer: what is alike in all layers."""
    return re.sub(r"(?<=[._])\d+", "*", name)


def split_layers(plan: Plan, program: Sequence[Launch]) -> list[Part]:
    """The parts in order of their first launch."""
    layers = _layers(program)
    numbered = [index for index, layer in enumerate(layers) if layer is not None]
    if not numbered:
        return [Part("program", (), (tuple(range(len(program))),))]
    first, last = numbered[0], numbered[-1]
    parts = [Part("before the layers", (), (tuple(range(first)),))] if first else []
    alike: dict[tuple[object, ...], dict[int, tuple[int, ...]]] = {}
    for layer in dict.fromkeys(layer for layer in layers if layer is not None):
        launches = tuple(index for index, each in enumerate(layers) if each == layer)
        alike.setdefault(tuple(_look(plan, program[index]) for index in launches), {})[layer] = launches
    for same in alike.values():
        parts.append(Part(_name(tuple(same)), tuple(same), tuple(same.values())))
    if last + 1 < len(program):
        parts.append(Part("after the layers", (), (tuple(range(last + 1, len(program))),)))
    return parts


def _layers(program: Sequence[Launch]) -> list[int | None]:
    """The layer of each launch, None before and after the layers.

    Tables that all layers share are named after the first one, so layers begin with the first launch that reads another
    launch's result. A launch without a number, such as the quantization of an activation, belongs to what it is for:
    the layer around it, or the next one.
    """
    numbers = [_number(launch.op) for launch in program]
    written: set[str] = set()
    for index, launch in enumerate(program):
        values = {arg.value for arg in launch.args if isinstance(arg, ArenaArg)}
        if numbers[index] is not None and values & written:
            break
        numbers[index] = None
        written |= values
    following: int | None = None
    for index in reversed(range(len(numbers))):
        if numbers[index] is not None:
            following = numbers[index]
        elif index and following is not None and any(number is not None for number in numbers[:index]):
            numbers[index] = following
    return numbers


def _number(op: str) -> int | None:
    found = re.search(r"\.(\d+)(?=\.|$)", op.partition(":")[2])
    return int(found[1]) if found else None


def _look(plan: Plan, launch: Launch) -> tuple[object, ...]:
    """All of a launch that may differ between layers of one kind, but for names and places."""
    details: list[object] = []
    for arg in launch.args:
        if isinstance(arg, WeightArg):
            weight = plan.weights[arg.name]
            details.append((weight.encoding, weight.layout, weight.shape))
        elif isinstance(arg, CacheArg):
            details.append(arg.group)
        elif isinstance(arg, ConstArg):
            details.append(arg.value)
    return (without_layer(launch.op), launch.kernel, launch.bytes, launch.flops, launch.barrier, *details)


def _name(layers: Sequence[int]) -> str:
    runs: list[list[int]] = []
    for layer in layers:
        if runs and layer == runs[-1][-1] + 1:
            runs[-1].append(layer)
        else:
            runs.append([layer])
    shown = ", ".join(f"{run[0]}–{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs)
    return f"layer{'s' if len(layers) > 1 else ''} {shown}"
