"""What the scheduler decides: limits, order, fairness."""

from __future__ import annotations

from itertools import islice

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from unit.runtime.engine_harness import make_request
from unit.runtime.fake_device import fake_plan

from toolkit.runtime.errors import InternalError
from toolkit.runtime.kv.manager import KVManager
from toolkit.runtime.kv.prefix import PageKeys
from toolkit.runtime.sampling import make_sampling
from toolkit.runtime.scheduler import Limits, Scheduler
from toolkit.runtime.sequence import Chunk, Sequence

CONTEXT = 64


LIMITS = Limits(16, 4, 8)


def make_scheduler(pages: int = 200, limits: Limits = LIMITS, windows: tuple[int, ...] = (0,)) -> Scheduler:
    plan = fake_plan(windows=windows)
    kv = KVManager(plan.caches, (pages + 1,) * len(windows), lanes=limits.sequences, max_context=CONTEXT)
    return Scheduler(kv, limits)


def make_sequence(
    number: int, prompt: list[int], *, outputs: int = 1, priority: int = 0, prompt_logprobs: int | None = None
) -> Sequence:
    request = make_request(str(number), prompt, prompt_logprobs=prompt_logprobs)
    tokens = np.zeros(len(prompt) + outputs, np.int32)
    tokens[: len(prompt)] = prompt
    return Sequence(
        request=request.request,
        order=(priority, number),
        tokens=tokens,
        prompt_length=len(prompt),
        sampling=make_sampling(request, tokens, 64),
        keys=PageKeys("", 4),
        arrival=0.0,
        length=len(prompt),
        known=len(prompt),
        horizon=len(tokens),
        rope_length=len(prompt),
    )


def distinct(number: int, length: int) -> list[int]:
    """A prompt that shares no page with those of other numbers."""
    return [number % 60 + 3, number // 60, *[5] * (length - 2)]


def execute(scheduler: Scheduler, chunks: list[Chunk]) -> None:
    """What the engine does with a step's chunks: every drawn token is 7, and sequences end when they are full."""
    for chunk in chunks:
        sequence, computed = chunk.sequence, chunk.start + chunk.count
        if sequence.table is not chunk.table:
            continue
        sequence.scored = max(sequence.scored, chunk.first_score + chunk.scores)
        scheduler.kv.settle(chunk.table, sequence.keys(sequence.tokens, computed // 4), computed)
        if chunk.samples:
            sequence.tokens[sequence.known] = 7
            sequence.known += 1
            if sequence.known == len(sequence.tokens):
                scheduler.remove(sequence)


@settings(deadline=None, max_examples=60)
@given(
    lengths=st.lists(st.tuples(st.integers(2, 40), st.integers(1, 20), st.integers(0, 2)), min_size=1, max_size=12),
    scored=st.lists(st.sampled_from([None, 0]), min_size=12, max_size=12),
    limits=st.sampled_from([Limits(4, 4, 4), Limits(16, 4, 5), Limits(64, 8, 64)]),
    pages=st.sampled_from([16, 20, 100]),
    windows=st.sampled_from([(0,), (6, 0), (3,)]),
)
def test_steps_stay_within_limits_and_everything_ends(
    lengths: list[tuple[int, int, int]],
    scored: list[int | None],
    limits: Limits,
    pages: int,
    windows: tuple[int, ...],
) -> None:
    scheduler = make_scheduler(pages, limits, windows)
    for number, (length, outputs, priority) in enumerate(lengths):
        prompt = distinct(number, length)
        scheduler.add(make_sequence(number, prompt, outputs=outputs, priority=priority, prompt_logprobs=scored[number]))
    for _ in range(3000):
        decoding = {s.request for s in scheduler.running if s.length - s.computed == 1}
        preemptions = scheduler.preemptions
        chunks = scheduler.schedule()
        if not chunks:
            break
        assert sum(chunk.count for chunk in chunks) <= limits.tokens
        assert len(chunks) <= limits.sequences
        assert sum(chunk.scores + chunk.samples for chunk in chunks) <= limits.rows
        assert min(chunk.count for chunk in chunks) > 0
        first = min((*scheduler.running, *scheduler.waiting), key=lambda sequence: sequence.order)
        assert any(chunk.sequence is first for chunk in chunks), "the first in order must always advance"
        if preemptions == scheduler.preemptions:
            assert decoding <= {chunk.sequence.request for chunk in chunks}
        orders = [sequence.order for sequence in scheduler.running]
        assert orders == sorted(orders)
        execute(scheduler, chunks)
        scheduler.kv.check()
    assert not scheduler.running
    assert not scheduler.waiting
    assert scheduler.kv.usage == 0.0


def test_first_come_first_served() -> None:
    scheduler = make_scheduler(limits=Limits(16, 2, 8))
    for number in range(4):
        scheduler.add(make_sequence(number, distinct(number, 10), outputs=3))
    seen: list[str] = []
    while chunks := scheduler.schedule():
        seen += [chunk.sequence.request for chunk in chunks if chunk.start == 0]
        execute(scheduler, chunks)
    assert seen == ["0", "1", "2", "3"]


def test_the_head_of_the_line_is_not_overtaken_by_what_would_fit() -> None:
    scheduler = make_scheduler(pages=12)
    scheduler.add(make_sequence(0, distinct(0, 20), outputs=20))
    execute(scheduler, scheduler.schedule())
    scheduler.add(make_sequence(1, distinct(1, 40)))
    scheduler.add(make_sequence(2, distinct(2, 4)))
    for _ in range(5):
        chunks = scheduler.schedule()
        assert [chunk.sequence.request for chunk in chunks] == ["0"]
        execute(scheduler, chunks)


def test_the_last_in_order_gives_its_pages_back_first() -> None:
    scheduler = make_scheduler(pages=13, limits=Limits(64, 4, 8))
    for number, priority in ((0, 0), (1, 5), (2, 0)):
        scheduler.add(make_sequence(number, distinct(number, 12), outputs=30, priority=priority))
    while not scheduler.preemptions:
        execute(scheduler, scheduler.schedule())
    assert [sequence.request for sequence in scheduler.running] == ["0", "2"]
    (waiting,) = scheduler.waiting
    assert waiting.request == "1"
    assert waiting.computed == 0
    assert waiting.length > waiting.prompt_length


def test_prompt_scores_are_chunked_to_the_rows_left() -> None:
    scheduler = make_scheduler(limits=Limits(16, 4, 5))
    scheduler.add(make_sequence(0, distinct(0, 12), prompt_logprobs=0))
    steps = []
    while chunks := scheduler.schedule():
        steps += [(chunk.start, chunk.count, chunk.first_score, chunk.scores, chunk.samples) for chunk in chunks]
        execute(scheduler, chunks)
    assert steps == [(0, 5, 0, 5, False), (5, 5, 5, 5, False), (10, 2, 10, 1, True)]


def test_scores_are_computed_once_also_after_a_preemption() -> None:
    scheduler = make_scheduler(limits=Limits(16, 4, 5))
    sequence = make_sequence(0, distinct(0, 12), outputs=4, prompt_logprobs=0)
    scheduler.add(sequence)
    execute(scheduler, scheduler.schedule())
    scheduler._preempt(sequence)
    (chunk,) = scheduler.schedule()
    assert chunk.start == 4, "what was scored may come from the cache"
    assert chunk.first_score == 5
    execute(scheduler, [chunk])


def test_limits_that_cannot_hold_a_token_a_sequence_are_our_fault() -> None:
    with pytest.raises(InternalError):
        make_scheduler(limits=Limits(2, 4, 8))
    with pytest.raises(InternalError):
        make_scheduler(limits=Limits(16, 4, 3))


@settings(deadline=None, max_examples=60)
@given(
    long=st.tuples(st.integers(20, 40), st.integers(1, 20)),
    short=st.lists(st.tuples(st.integers(2, 6), st.integers(1, 3)), min_size=1, max_size=60),
    before=st.integers(0, 20),
    each_step=st.integers(1, 4),
    pages=st.sampled_from([16, 20, 100]),
)
def test_a_long_request_is_not_overtaken_by_a_stream_of_short_ones(
    long: tuple[int, int], short: list[tuple[int, int]], before: int, each_step: int, pages: int
) -> None:
    """Requests of one priority start in order of arrival, and the oldest that is open advances in every step."""
    scheduler = make_scheduler(pages)
    arrivals = [*short[:before], long, *short[before:]]
    sequences = [
        make_sequence(number, distinct(number, length), outputs=outputs)
        for number, (length, outputs) in enumerate(arrivals)
    ]
    started: list[int] = []
    coming = iter(sequences)
    while True:
        for sequence in islice(coming, each_step):
            scheduler.add(sequence)
        opened = [*scheduler.running, *scheduler.waiting]
        if not opened:
            break
        chunks = scheduler.schedule()
        oldest = min(opened, key=lambda sequence: sequence.order)
        assert oldest in [chunk.sequence for chunk in chunks]
        for number in (chunk.sequence.order[1] for chunk in chunks):
            if number not in started:
                started.append(number)
        execute(scheduler, chunks)
    assert started == list(range(len(arrivals)))
