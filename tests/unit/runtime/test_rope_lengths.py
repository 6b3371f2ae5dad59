"""What a token is rotated by depends on its request alone: not on chunks, on what is cached, or on preemption."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
from unit.runtime.engine_harness import alone, depth, device_of, make_engine, make_request, run

from toolkit.runtime.plan import RopeChanges
from toolkit.runtime.request import Add

__all__ = ["depth"]
pytestmark = pytest.mark.usefixtures("depth")
SWITCH, STRETCH = RopeChanges(20, 21), RopeChanges(20, 64)


def make_requests(seed: int) -> list[Add]:
    """Prompts of 5 to 34 tokens that begin alike, and outputs of up to 25."""
    rng = random.Random(seed)
    trunk = [3 + index % 50 for index in range(30)]
    prompts = [
        trunk[: rng.randrange(4, 30)] + [rng.randrange(3, 60) for _ in range(rng.randrange(1, 5))] for _ in range(24)
    ]
    return [make_request(f"{n}", prompt, max_tokens=rng.randrange(1, 26)) for n, prompt in enumerate(prompts)]


@pytest.mark.parametrize("changes", [SWITCH, STRETCH])
@pytest.mark.parametrize("pages", [16, 100])
@pytest.mark.parametrize("windows", [(0,), (0, 7)])
def test_outputs_are_those_of_requests_alone(changes: RopeChanges, pages: int, windows: tuple[int, ...]) -> None:
    requests = make_requests(pages)
    engine = make_engine(pages=pages, rope_changes=changes, windows=windows, max_tokens=12)
    found = run(engine, requests, arrivals=range(24))
    assert engine.scheduler.prefix_hits > 0
    assert (engine.scheduler.preemptions > 0) == (pages == 16)
    for request in requests:
        expected = alone(request, rope_changes=changes, windows=windows)
        assert found[request.request].result == expected.result, request.request


def test_a_prompt_in_chunks_has_one_length_and_outputs_have_their_own() -> None:
    engine = make_engine(rope_changes=STRETCH, max_tokens=10)
    run(engine, [make_request("a", [3 + n for n in range(25)], max_tokens=4)])
    steps = [(batch.positions.tolist(), batch.lengths.tolist()) for batch in device_of(engine).batches]
    assert steps == [
        (list(range(10)), [25] * 10),
        (list(range(10, 20)), [25] * 10),
        (list(range(20, 25)), [25] * 5),
        *(([position], [position + 1]) for position in (25, 26, 27)),
    ]


def test_a_sequence_that_outgrows_the_first_frequencies_is_computed_anew() -> None:
    prompt = [3 + n for n in range(15)]
    engine = make_engine(rope_changes=SWITCH, max_tokens=8)
    (found,) = run(engine, [make_request("a", prompt, max_tokens=12)]).values()
    tokens = prompt + found.tokens
    # As if each token had been drawn after a prompt of all tokens before it.
    for count in range(15, len(tokens)):
        again = alone(make_request("b", tokens[:count], max_tokens=1), rope_changes=SWITCH)
        assert again.tokens == tokens[count : count + 1]
    starts = [batch.positions.tolist()[0] for batch in device_of(engine).batches]
    assert [after for before, after in pairwise(starts) if after <= before] == [0], "once"
    assert engine.scheduler.preemptions == 0


def test_a_sequence_that_ends_at_the_switch_is_not_computed_anew() -> None:
    engine = make_engine(rope_changes=SWITCH)
    run(engine, [make_request("a", [3 + n for n in range(15)], max_tokens=6)])
    assert sum(len(batch.tokens) for batch in device_of(engine).batches) == 20
