"""Whose code a kernel runs: C++, which has every kernel, or TVM on CPUs and Triton on GPUs, which have some of them for
known shapes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import msgspec

from ..kernels_templates.catalog import KernelSpec
from ..kernels_templates.registry import FAMILIES, is_triton
from ..kernels_templates.render import arguments
from ..kernels_templates.tvm.families import takes
from ..runtime.plan import Choice, ConstArg, DimArg, IsaName, Launch
from .lowered import Call, Lowered
from .program import Program

ROWS = (1, 8, 64)
"""Numbers of rows that choices are made for: decoding one sequence, a few, and prompts. A choice serves up to as many
rows, the last one all others."""

Choices = Mapping[KernelSpec, tuple[Choice, ...]]
"""By kernel with its shape. A kernel that has none is C++ at every level."""


def candidates(lowered: Lowered) -> tuple[KernelSpec, ...]:
    """Each kernel and shape of the program that TVM can make code for, once, in order of their symbols."""
    found = {kernel for _, kernel in _shaped(lowered)}
    return tuple(sorted(found, key=lambda kernel: kernel.symbol))


def all_tvm(kernels: Sequence[KernelSpec], isas: Sequence[IsaName]) -> Choices:
    """TVM's code wherever there is any."""
    return {kernel: tuple(Choice(isa, ROWS[-1], "tvm") for isa in isas) for kernel in kernels}


def stays_cpp(lowered: Lowered) -> str:
    """A sentence on the calls that TVM can't make code for."""
    shaped = {id(call) for call, _ in _shaped(lowered)}
    counts = Counter(call.kernel.family for call in lowered.calls if id(call) not in shaped)
    named = ", ".join(f"{count} {family}" for family, count in sorted(counts.items()))
    return f"TVM has no code for {sum(counts.values())} calls, which stay C++: {named}"


def stays_cuda(programs: Sequence[Program]) -> str:
    """A sentence on the GPU kernels that Triton has no template for."""
    calls = [call for program in programs for call in program.lowered.calls]
    lacking = {call.kernel for call in calls if not any(map(is_triton, (call.kernel, *call.others)))}
    counts = Counter(kernel.family for kernel in lacking)
    named = ", ".join(f"{count} {family}" for family, count in sorted(counts.items()))
    total = len({call.kernel for call in calls})
    return f"Triton has no template for {len(lacking)} of {total} kernels, which stay CUDA C++: {named}"


def with_choices(program: Program, choices: Choices) -> Program:
    """The program with the kernels that choices were made for, under names that tell their shapes."""
    shaped = {id(call): kernel for call, kernel in _shaped(program.lowered)}

    def switch(call: Call) -> Call:
        kernel = shaped.get(id(call), call.kernel)
        return replace(call, kernel=replace(kernel, choices=choices[kernel])) if kernel in choices else call

    def rename(calls: Sequence[Call], launches: Sequence[Launch]) -> tuple[Launch, ...]:
        pairs = zip(calls, launches, strict=True)
        return tuple(msgspec.structs.replace(launch, kernel=call.kernel.symbol) for call, launch in pairs)

    forward, sample = (tuple(map(switch, calls)) for calls in (program.lowered.forward, program.lowered.sample))
    bucket = msgspec.structs.replace(
        program.bucket, forward=rename(forward, program.bucket.forward), sample=rename(sample, program.bucket.sample)
    )
    return replace(program, lowered=replace(program.lowered, forward=forward, sample=sample), bucket=bucket)


def _shaped(lowered: Lowered) -> Iterator[tuple[Call, KernelSpec]]:
    """The calls that TVM can make code for, with their kernels and shapes."""
    for call in lowered.calls:
        bound = list(zip(arguments(FAMILIES[call.kernel.family], call.kernel), call.args, strict=True))
        shape = {
            spec.name: int(arg.value)
            for spec, arg in bound
            if spec.role == "const" and spec.ctype == "int32_t" and isinstance(arg, ConstArg)
        }
        shaped = replace(call.kernel, shape=shape)
        if takes(shaped) and any(spec.role == "dim" and isinstance(arg, DimArg) for spec, arg in bound):
            yield call, shaped
