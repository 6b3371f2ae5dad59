"""The programs of a plan, one a bucket: the lowered graph with a checked place in the arena for every buffer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..kernels_templates.registry import families
from ..runtime.plan import ArenaArg, Bucket, Buffer, KvDType, Launch
from .ir import Graph
from .lower import lower
from .lowered import Call, Lowered, View
from .lowering import GpuGenerator
from .memory import arena_bytes, lifetimes, plan_memory
from .memory_check import check_memory
from .shapes import Bounds
from .targets import FloatDType, Target


@dataclass(frozen=True)
class Program:
    """A graph lowered for one bucket, its buffers' places, and the launches that name them."""

    lowered: Lowered
    buffers: tuple[Buffer, ...]
    bucket: Bucket

    @property
    def arena(self) -> int:
        """Bytes of the arena."""
        return arena_bytes(self.buffers)


def make_programs(
    graph: Graph,
    target: Target,
    bounds: Bounds,
    kv_dtype: KvDType,
    *,
    dtype: FloatDType = "float32",
    deterministic: bool = False,
    alternatives: int = 0,
    generator: GpuGenerator = "cuda",
) -> tuple[Program, ...]:
    """Lower a fused graph with resolved encodings for each of the target's buckets, plan its memory and check the plan.

    Raises UserError naming every op that the target has no kernel for.
    """
    buckets = lower(
        *(graph, target, bounds, kv_dtype),
        dtype=dtype,
        deterministic=deterministic,
        alternatives=alternatives,
        generator=generator,
    )
    return tuple(_place_buffers(lowered, target) for lowered in buckets)


def _place_buffers(lowered: Lowered, target: Target) -> Program:
    buffers = plan_memory(lifetimes(lowered))
    program = Program(lowered, buffers, bind(lowered, buffers))
    check_memory(program.bucket, lowered.kernels, buffers, program.arena, families(target.kind))
    return program


def bind(lowered: Lowered, buffers: Sequence[Buffer]) -> Bucket:
    """The launch program: the calls with arena offsets for virtual buffers."""
    places = {buffer.value: buffer for buffer in buffers}
    limits, bounds = lowered.limits, lowered.limits.bounds

    def launch(call: Call) -> Launch:
        args = tuple(_place(arg, places) if isinstance(arg, View) else arg for arg in call.args)
        return Launch(call.kernel.symbol, args, call.barrier, call.op, call.bytes, call.flops)

    return Bucket(
        limits.name,
        bounds.max_tokens,
        bounds.max_sequences,
        bounds.max_rows,
        tuple(map(launch, lowered.forward)),
        tuple(map(launch, lowered.sample)),
        limits.decode,
        alternatives=lowered.alternatives,
    )


def _place(view: View, places: Mapping[str, Buffer]) -> ArenaArg:
    buffer = places[view.buffer]
    return ArenaArg(buffer.offset + view.offset, buffer.bytes - view.offset, view.buffer)
