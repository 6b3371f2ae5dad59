"""What a machine must have to run a plan."""

from __future__ import annotations

import math
from collections.abc import Iterator

import msgspec

from ..runtime.device.machine import available_memory
from ..runtime.plan import Plan
from .roofline import seconds_per_token
from .units import size

_READING = 10
"""Tokens a second that read like speech: what the bandwidth is given for."""


class Requirements(msgspec.Struct, frozen=True):
    """Bytes and bytes a second; compare with what `toolkit doctor` finds on a machine."""

    instruction_set: str
    """The lowest one that the plan has code for, or all its GPU architectures."""
    memory: int
    """Weights, activations, tables and the cache of one sequence of the longest length."""
    memory_full_batch: int
    """The same with the cache of `max_batch` such sequences: more than this is never used."""
    bandwidth: float
    """Bytes a second that must be read for 10 tokens a second at batch 1."""
    available: int | None
    """What this machine has now; None if the memory must be a GPU's."""

    @property
    def fits(self) -> bool:
        """Whether this machine has the memory."""
        return self.available is None or self.memory <= self.available


def requirements(plan: Plan) -> Requirements:
    """What a plan needs. Its weights are resident once, whatever the batch."""
    fixed = plan.memory.arena + plan.memory.weights + plan.memory.host
    pages = ((len(each.layers) * each.page_bytes, each.page_tokens) for each in plan.caches)
    sequence = sum(cost * -(-plan.model.max_context // tokens) for cost, tokens in pages)
    trash = sum(len(each.layers) * each.page_bytes for each in plan.caches)
    return Requirements(
        instruction_set=plan.target if plan.modules else plan.libraries[0].isa,
        memory=fixed + trash + sequence,
        memory_full_batch=fixed + trash + plan.max_batch * sequence,
        bandwidth=_READING * seconds_per_token(plan, 1.0),
        available=None if plan.modules else available_memory(),
    )


def sentences(found: Requirements, plan: Plan) -> Iterator[str]:
    """The requirements for people."""
    context = plan.model.max_context
    archs = " or ".join(found.instruction_set.rsplit(",", 1)).replace(",", ", ")
    machine = f"{archs} GPU" if plan.modules else f"{found.instruction_set} CPU"
    yield (
        f"an {machine} and {size(found.memory)} of memory for one sequence of {context} tokens, "
        f"{size(found.memory_full_batch)} for {plan.max_batch}"
    )
    yield f"{size(found.bandwidth)}/s of memory bandwidth for {_READING} tokens a second at batch 1"
    if found.available is not None and not found.fits:
        yield (
            f"this machine has {size(found.available)} available, {size(found.memory - found.available)} too little"
            + (_smaller(plan, found, found.available))
        )


def _smaller(plan: Plan, found: Requirements, available: int) -> str:
    """Which number of bits a weight would fit, if any does."""
    count = sum(math.prod(weight.shape) for weight in plan.weights.values())
    rest = found.memory - plan.memory.weights
    for bits, name in ((8.5, "int8"), (4.5, "int4")):
        needed = int(count * bits / 8) + rest
        if needed < found.memory and needed <= available:
            return f": --quant {name} would need {size(needed)}"
    smallest = int(count * 4.5 / 8) + rest
    return f": even --quant int4 would need {size(smallest)}" if smallest < found.memory else ""
