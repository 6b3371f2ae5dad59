"""What the engine counts of its steps, and the times that come with first tokens."""

from __future__ import annotations

import pytest
from unit.runtime.engine_harness import depth, make_engine, make_requests, shared_prompts  # noqa: F401

from toolkit.runtime.request import STEP_TOKENS, Finished, RequestMetrics, Tokens

PROMPTS = shared_prompts(12, vocabulary=64, trunk=30, begin=(0, 30), end=(1, 15))


@pytest.mark.usefixtures("depth")
@pytest.mark.parametrize("prefix_cache", [True, False])
def test_tokens_of_steps_add_up(prefix_cache: bool) -> None:
    engine = make_engine(options={"prefix_cache": prefix_cache, "max_batched_tokens": 16, "max_num_seqs": 4})
    for request in make_requests(PROMPTS, max_tokens=9):
        engine.add(request)
    while engine.has_work:
        engine.step()
    stats = engine.stats()
    assert stats.preemptions == 0
    computed = sum(map(len, PROMPTS)) - stats.prefix_hits
    assert stats.step_tokens_sum == computed + 9 * len(PROMPTS)
    assert sum(stats.step_tokens) == stats.steps
    assert stats.prefix_cache == prefix_cache
    assert (stats.prefix_hits > 0) == prefix_cache
    most = next(bound for bound in STEP_TOKENS if bound >= 16 + 4)  # drawn tokens count besides computed ones
    assert not any(stats.step_tokens[STEP_TOKENS.index(most) + 1 :])


@pytest.mark.usefixtures("depth")
def test_first_tokens_bring_the_times_so_far() -> None:
    engine = make_engine()
    for request in make_requests(PROMPTS, max_tokens=5):
        engine.add(request)
    first: dict[str, RequestMetrics] = {}
    last: dict[str, RequestMetrics] = {}
    while engine.has_work:
        for event in engine.step():
            if isinstance(event, Tokens) and event.metrics is not None:
                assert event.request not in first
                first[event.request] = event.metrics
            elif isinstance(event, Finished):
                assert event.metrics is not None
                last[event.request] = event.metrics
    assert first.keys() == last.keys() == {str(index) for index in range(len(PROMPTS))}
    for name, begun in first.items():
        ended = last[name]
        assert 0 <= begun.queue <= begun.first_token == begun.total <= ended.total
        assert (begun.queue, begun.first_token, begun.cached_tokens) == (
            ended.queue,
            ended.first_token,
            ended.cached_tokens,
        )
