"""Races: the code of each generator for each kernel, shape and number of rows is timed on this machine.

Inputs are random. Weights are copies in a pool that is larger than the caches, each call reads the next one, and the
generators take turns. The clock is the caller's (`Measure`), since the compiler knows no device.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from ..kernels_templates.catalog import ArgSpec, KernelSpec
from ..kernels_templates.expression import Call, Expression, parse
from ..kernels_templates.packing import block_dtype, layout_bytes, q8_pack, q8_row_bytes
from ..kernels_templates.registry import FAMILIES
from ..kernels_templates.render import arguments, render_template, signature, tvm_symbol
from ..kernels_templates.tvm.linear import encoding_of
from ..runtime.plan import Choice, Generator, IsaName
from ..runtime.tuning import Race
from .codegen.cpu import ISA_LEVELS, SPINS, IsaLevel, Job, compile_all, compile_object, kernel_jobs, link
from .generators import ROWS, Choices

MARGIN = 0.03
"""C++ stays unless another generator takes less time by this share: below it a race measures noise."""
POOL_BYTES = 96 << 20
"""Of weights that calls go round, larger than most last-level caches."""


MAX_THREADS = 256
"""Of a race."""

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Trial:
    """One call to time in the code of each generator."""

    functions: Mapping[Generator, int]
    """Numbers of the library's functions."""
    pointers: npt.NDArray[np.uint64]
    """[copies, arguments] addresses; each row has another copy of the weight."""
    numbers: npt.NDArray[np.int32]
    """[arguments] the other arguments."""
    keep: tuple[Array, ...]
    """The memory behind the addresses."""


Measure = Callable[[Path, Sequence[Trial]], Sequence[Mapping[Generator, float]]]
"""Gets a library made from `cpu/race.cpp.j2` and trials, and returns seconds of one call of each by generator."""


def run_races(
    kernels: Sequence[KernelSpec],
    isas: Sequence[IsaName],
    measure: Measure,
    progress: Callable[[str, int, int], None] | None = None,
) -> tuple[Race, ...]:
    """Race every kernel with its shape at the given levels, which this machine can run."""
    races: list[Race] = []
    inputs = _Inputs()
    levels = [level for level in ISA_LEVELS if level.name in isas]
    with tempfile.TemporaryDirectory() as folder:
        for level in levels:
            library = Path(folder, f"race-{level.name}.so")
            _build(kernels, level, library, progress)
            for number, kernel in enumerate(kernels):
                trials = [inputs.trial(kernel, 2 * number, rows) for rows in ROWS]
                races += _decide(kernel, level.name, measure(library, trials))
                if progress is not None:
                    progress(f"race of {kernel.family} for {level.name}", number + 1, len(kernels))
    return tuple(sorted(races, key=_order))


def choices_of(
    races: Sequence[Race], kernels: Sequence[KernelSpec], isas: Sequence[IsaName]
) -> tuple[Choices, tuple[str, ...]]:
    """What races chose for these kernels at these levels, and notes on what had no race and on races of other kernels.

    Without a race a kernel is C++, as one that C++ won everywhere: it has no choices.
    """
    found: dict[KernelSpec, list[Choice]] = {kernel: [] for kernel in kernels}
    by_name = {_name(kernel): kernel for kernel in kernels}
    used = used_races(races, kernels)
    for race in used:
        found[by_name[race.kernel, _shape(race)]].append(Choice(race.isa, race.rows, race.chosen))
    notes = []
    for isa in isas:
        missing = sum(all(choice.isa != isa for choice in choices) for choices in found.values())
        if missing:
            notes.append(
                f"{missing} of {len(kernels)} kernels that TVM has for {isa} were not raced there: they are C++"
            )
    if strangers := len(races) - len(used):
        notes.append(f"the tuning file has {strangers} races of kernels or shapes that are not in this plan")
    won = {kernel: choices for kernel, choices in found.items() if any(each.generator == "tvm" for each in choices)}
    chosen = {
        kernel: tuple(
            choice
            for isa in isas
            for choice in [each for each in choices if each.isa == isa] or [Choice(isa, ROWS[-1], "cpp")]
        )
        for kernel, choices in won.items()
    }
    return chosen, tuple(notes)


def used_races(races: Sequence[Race], kernels: Sequence[KernelSpec]) -> tuple[Race, ...]:
    """The races of these kernels, in order."""
    names = set(map(_name, kernels))
    return tuple(sorted((race for race in races if (race.kernel, _shape(race)) in names), key=_order))


def _name(kernel: KernelSpec) -> tuple[str, tuple[tuple[str, int], ...]]:
    return kernel.any_shape.symbol, tuple(kernel.shape.items())


def _shape(race: Race) -> tuple[tuple[str, int], ...]:
    return tuple(sorted(race.shape.items()))


def _order(race: Race) -> tuple[str, tuple[tuple[str, int], ...], str, int]:
    return race.kernel, _shape(race), race.isa, race.rows


# --- deciding ---------------------------------------------------------------------------------------------------------


def _decide(kernel: KernelSpec, isa: IsaName, times: Sequence[Mapping[Generator, float]]) -> list[Race]:
    seconds: list[dict[Generator, float]] = [{name: round(value, 9) for name, value in each.items()} for each in times]
    winners = [_winner(each) for each in seconds]
    if not rounds_alike(kernel):  # a sequence's logits must not depend on how many others are in the step
        winners = [_winner_of_all(seconds)] * len(seconds)
    return [
        Race(kernel.any_shape.symbol, dict(kernel.shape), isa, rows, each, winner)
        for rows, each, winner in zip(ROWS, seconds, winners, strict=True)
    ]


def one_for_all_rows(races: Sequence[Race]) -> tuple[Race, ...]:
    """The races with the generator chosen that is best over all numbers of rows, as deterministic plans need."""

    def kernel(race: Race) -> tuple[object, ...]:
        return _order(race)[:3]

    decided: list[Race] = []
    for _, group in groupby(sorted(races, key=_order), kernel):
        rows = list(group)
        winner = _winner_of_all([race.seconds for race in rows])
        decided += [msgspec.structs.replace(race, chosen=winner) for race in rows]
    return tuple(decided)


def _winner_of_all(seconds: Sequence[Mapping[Generator, float]]) -> Generator:
    return _winner({name: sum(each[name] / each["cpp"] for each in seconds) for name in seconds[0]})


def _winner(seconds: Mapping[Generator, float]) -> Generator:
    best = min(seconds, key=lambda name: seconds[name])
    return best if seconds[best] < seconds["cpp"] * (1 - MARGIN) else "cpp"


def rounds_alike(kernel: KernelSpec) -> bool:
    """Whether all generators give the same bits.

    They use the same formulas, and every compiler fuses a product and a sum into one operation. Where both sides of a
    sum are products, each takes the one it likes.
    """
    text = str(kernel.params.get("epilogue", kernel.params.get("expr", "")))
    return not text or not _fuses_either(parse(text))


def _fuses_either(expression: Expression) -> bool:
    if not isinstance(expression, Call):
        return False
    both = expression.operator in ("add", "sub") and all(
        isinstance(arg, Call) and arg.operator == "mul" for arg in expression.args
    )
    return both or any(map(_fuses_either, expression.args))


# --- the library ------------------------------------------------------------------------------------------------------


def _build(
    kernels: Sequence[KernelSpec],
    level: IsaLevel,
    library: Path,
    progress: Callable[[str, int, int], None] | None,
) -> None:
    """Functions 2i and 2i + 1 of the library are kernel i in C++ and in TVM's code."""
    functions = []
    for kernel in kernels:
        specs = arguments(FAMILIES[kernel.family], kernel)
        args = ", ".join(_pass(spec, place) for place, spec in enumerate(specs))
        for symbol in (kernel.any_shape.symbol, tvm_symbol(kernel)):
            functions.append({"symbol": symbol, "declaration": signature(kernel, symbol), "args": args})
    source = render_template("cpu/race.cpp.j2", functions=functions, spins=SPINS, max_threads=MAX_THREADS)
    # Both generators' code of every kernel: choices that name both are asked for.
    both = (Choice(level.name, 1, "cpp"), Choice(level.name, 2, "tvm"))
    jobs = kernel_jobs([replace(kernel, choices=both) for kernel in kernels], level)
    jobs.append(Job(level, "race", partial(compile_object, source, level, "race", "-O1")))
    link(compile_all(jobs, progress)[level.name], level, library, "race_")


def _pass(spec: ArgSpec, place: int) -> str:
    return f"({spec.ctype})p[{place}]" if spec.ctype.endswith("*") else f"v[{place}]"


# --- inputs -----------------------------------------------------------------------------------------------------------


class _Inputs:
    """Random inputs; weights of one form share a pool."""

    def __init__(self) -> None:
        self._pools: dict[np.dtype[Any], npt.NDArray[np.uint8]] = {}
        self._rng = np.random.default_rng(0)

    def trial(self, kernel: KernelSpec, function: int, rows: int) -> Trial:
        """Calls of functions `function` (C++) and the one behind it (TVM)."""
        specs = arguments(FAMILIES[kernel.family], kernel)
        buffers = {spec.name: self._buffer(kernel, spec, rows) for spec in specs if spec.ctype.endswith("*")}
        calls = np.arange(max(map(len, buffers.values())))
        pointers = np.zeros((len(calls), len(specs)), np.uint64)
        numbers = np.zeros(len(specs), np.int32)
        for place, spec in enumerate(specs):
            if spec.name in buffers:
                buffer = buffers[spec.name]
                pointers[:, place] = buffer.ctypes.data + calls % len(buffer) * buffer.strides[0]
            else:
                numbers[place] = rows if spec.role == "dim" else kernel.shape[spec.name]
        return Trial({"cpp": function, "tvm": function + 1}, pointers, numbers, tuple(buffers.values()))

    def _buffer(self, kernel: KernelSpec, spec: ArgSpec, rows: int) -> Array:
        """Memory for a pointer argument: [copies, ...], of which only weights have several."""
        width = next(kernel.shape[name] for name in ("N", "W", "F", "K") if name in kernel.shape)
        encoding = encoding_of(kernel) if kernel.family == "linear" else None
        if encoding is not None and spec.name == "weight":
            size = layout_bytes("panel16", encoding, (width, kernel.shape["K"]))
            return self._weights(block_dtype(encoding), size)
        if encoding is not None and spec.name == "x":
            return _aligned(q8_pack(self._floats(rows, kernel.shape["K"])))
        if spec.name == "q8":
            return _aligned(np.zeros((rows, q8_row_bytes(width)), np.uint8))
        return _aligned(self._floats(rows, 2 * width))  # the longest row that any of them reads or writes

    def _floats(self, rows: int, columns: int) -> npt.NDArray[np.float32]:
        return self._rng.standard_normal((rows, columns), np.float32)

    def _weights(self, block: np.dtype[Any], size: int) -> Array:
        pool = self._pools.get(block)
        if pool is None or len(pool) < size:
            blocks = np.frombuffer(self._rng.bytes(1024 * block.itemsize), block).copy()
            for field in {"scale", "minimum"}.intersection(block.names or ()):
                blocks[field] = self._rng.uniform(0.001, 0.01, blocks[field].shape)
            pool = _aligned(np.resize(blocks.view(np.uint8), max(POOL_BYTES, size)))[0]
            self._pools[block] = pool
        copies = len(pool) // size
        return pool[: copies * size].reshape(copies, size)


def _aligned(array: Array) -> Array:
    """One copy [1, ...] that starts at a multiple of 64 bytes, as buffers of the arena do."""
    memory = np.empty(array.nbytes + 64, np.uint8)
    start = -memory.ctypes.data % 64
    copy = memory[start : start + array.nbytes].view(array.dtype).reshape(1, *array.shape)
    copy[0] = array
    return copy
