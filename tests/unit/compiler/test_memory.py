"""Memory planning, its independent checker, and barriers: properties over random programs."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from toolkit.compiler.lowered import Argument, Call, Lowered, View, VirtualBuffer, epochs, place_barriers
from toolkit.compiler.memory import ALIGNMENT, Lifetime, align, arena_bytes, lifetimes, plan_memory
from toolkit.compiler.memory_check import check_memory, check_placement
from toolkit.compiler.program import bind
from toolkit.compiler.shapes import Bounds
from toolkit.compiler.targets import BucketLimits
from toolkit.kernels_templates.catalog import KernelSpec
from toolkit.runtime.errors import InternalError
from toolkit.runtime.plan import ConstArg, DimArg

LIMITS = BucketLimits("step", Bounds(max_tokens=8, max_sequences=2, max_rows=2, max_context=16))
INPUTS = 8


@st.composite
def lives(draw: st.DrawFn) -> list[Lifetime]:
    spans = draw(st.lists(st.tuples(st.integers(1, 500), st.integers(0, 20), st.integers(0, 8)), max_size=30))
    return [Lifetime(f"v{i}", size, first, first + length) for i, (size, first, length) in enumerate(spans)]


@given(lives())
def test_buffers_alive_together_never_overlap(many: list[Lifetime]) -> None:
    buffers = plan_memory(many)
    arena = arena_bytes(buffers)
    check_placement(buffers, arena)
    assert {buffer.value for buffer in buffers} == {life.value for life in many}
    at_once = [sum(align(life.bytes) for life in many if life.first <= t <= life.last) for t in range(30)]
    assert max(at_once) <= arena <= sum(align(life.bytes) for life in many)


@given(lives(), st.data())
def test_the_plan_does_not_depend_on_the_order_of_lifetimes(many: list[Lifetime], data: st.DataObject) -> None:
    assert plan_memory(data.draw(st.permutations(many))) == plan_memory(many)


def test_a_gap_is_filled_by_what_fits_it_best() -> None:
    buffers = plan_memory(
        [Lifetime("a", 640, 0, 1), Lifetime("b", 256, 0, 9), Lifetime("c", 128, 5, 9), Lifetime("d", 512, 5, 9)]
    )
    offsets = {buffer.value: buffer.offset for buffer in buffers}
    assert offsets == {"a": 0, "d": 0, "b": 640, "c": 512}


def test_the_checker_sees_overlap_misalignment_and_overrun() -> None:
    good = plan_memory([Lifetime("a", 64, 0, 3), Lifetime("b", 64, 2, 4)])
    check_placement(good, 128)
    for wrong, message in (
        ((good[0], msgspec.structs.replace(good[1], offset=good[0].offset)), "overlap"),
        ((msgspec.structs.replace(good[0], offset=32), good[1]), "aligned"),
        ((good[0], msgspec.structs.replace(good[1], offset=128)), "aligned to 64 bytes inside the arena"),
    ):
        with pytest.raises(InternalError, match=message):
            check_placement(wrong, 128)


# --- whole programs ---------------------------------------------------------------------------------------------------


def pointwise(inputs: list[str], out: str) -> Call:
    """A call that reads and writes whole buffers."""
    forms = {f"in{i}": "t" if i < len(inputs) else "" for i in range(INPUTS)}
    kernel = KernelSpec("pointwise", {"expr": "in0", **forms})
    args: tuple[Argument, ...] = (*map(View, inputs), View(out), DimArg("T"), ConstArg(4))
    return Call(kernel, args, frozenset(inputs), frozenset([out]), f"pointwise:{out}", bytes=0, flops=0)


@st.composite
def programs(draw: st.DrawFn) -> Lowered:
    """A random program in which every value is written once, before it is read."""
    count = draw(st.integers(2, 12))
    calls = [pointwise([], "v0")]
    for number in range(1, count):
        sources = draw(st.lists(st.integers(0, number - 1), min_size=0, max_size=3, unique=True))
        calls.append(pointwise([f"v{source}" for source in sources], f"v{number}"))
    sizes = draw(st.lists(st.integers(1, 1000), min_size=count, max_size=count))
    buffers = {f"v{number}": VirtualBuffer(size, size) for number, size in enumerate(sizes)}
    return Lowered(LIMITS, place_barriers(calls), (), buffers, {}, ())


@given(programs())
def test_random_programs_pass_the_checker(lowered: Lowered) -> None:
    buffers = plan_memory(lifetimes(lowered))
    check_memory(bind(lowered, buffers), lowered.kernels, buffers, arena_bytes(buffers))


@given(programs(), st.data())
def test_every_barrier_is_needed(lowered: Lowered, data: st.DataObject) -> None:
    placed = [index for index, call in enumerate(lowered.calls) if call.barrier]
    if not placed:
        return
    removed = data.draw(st.sampled_from(placed))
    calls = tuple(replace(call, barrier=call.barrier and i != removed) for i, call in enumerate(lowered.calls))
    broken = replace(lowered, forward=calls)
    buffers = plan_memory(lifetimes(broken))
    with pytest.raises(InternalError, match=r"barrier|do not hold"):
        check_memory(bind(broken, buffers), broken.kernels, buffers, arena_bytes(buffers))


@given(programs())
def test_the_checker_sees_every_overlap_that_matters(lowered: Lowered) -> None:
    """All buffers at offset 0: any program that reads a value after another was written must be refused."""
    buffers = plan_memory(lifetimes(lowered))
    piled = tuple(msgspec.structs.replace(buffer, offset=0) for buffer in buffers)
    bucket = bind(lowered, piled)
    if any(call.reads for call in lowered.calls):
        with pytest.raises(InternalError):
            check_memory(bucket, lowered.kernels, piled, arena_bytes(piled))


def test_reading_what_was_never_written_is_refused() -> None:
    lowered = Lowered(
        LIMITS, (pointwise(["v0"], "v1"),), (), {"v0": VirtualBuffer(64, 64), "v1": VirtualBuffer(64, 64)}, {}, ()
    )
    buffers = plan_memory(lifetimes(lowered))
    with pytest.raises(InternalError, match="do not hold"):
        check_memory(bind(lowered, buffers), lowered.kernels, buffers, arena_bytes(buffers))


def test_launches_between_barriers_are_alive_together() -> None:
    assert list(epochs([False, True, True, False])) == [(0, 1), (0, 1), (2, 2), (3, 3)]
    calls = place_barriers([pointwise([], "v0"), pointwise([], "v1"), pointwise(["v0", "v1"], "v2")])
    assert [call.barrier for call in calls] == [False, True, False]
    buffers = {name: VirtualBuffer(ALIGNMENT, 1) for name in ("v0", "v1", "v2")}
    spans = {life.value: (life.first, life.last) for life in lifetimes(Lowered(LIMITS, calls, (), buffers, {}, ()))}
    assert spans == {"v0": (0, 2), "v1": (0, 2), "v2": (2, 2)}
