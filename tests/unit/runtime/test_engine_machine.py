"""The engine as a state machine: whatever is added, ended and reset in whatever order, every request ends exactly once,
good ones say what they say alone, and no page is lost."""

from __future__ import annotations

from collections import Counter
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from unit.runtime.engine_harness import alone, make_engine, make_request
from unit.runtime.fake_device import NAN_TOKEN

from toolkit.runtime.engine import Engine
from toolkit.runtime.request import Add, Error, Event, Finished, Tokens

TOKENS = st.integers(3, 50)


class EngineMachine(RuleBasedStateMachine):
    """Requests over few pages, so that they share, wait, and are preempted."""

    def __init__(self) -> None:
        super().__init__()
        self.engine: Engine
        self.open: dict[str, Add] = {}
        self.aborted: set[str] = set()
        self.tokens: dict[str, list[int]] = {}
        self.ends: Counter[str] = Counter()
        self.count = 0

    @initialize(pages=st.integers(9, 30), depth=st.sampled_from([1, 2]), prefix=st.booleans())
    def start(self, pages: int, depth: int, prefix: bool) -> None:
        self.engine = make_engine(pages=pages, depth=depth, options={"prefix_cache": prefix})

    @rule(prompt=st.lists(TOKENS, min_size=1, max_size=30), new=st.integers(1, 20), priority=st.integers(0, 2))
    def add(self, prompt: list[int], new: int, priority: int) -> None:
        self._add(prompt, max_tokens=new, priority=priority)

    @rule(seed=st.integers(0, 3), new=st.integers(1, 20))
    def add_sampled(self, seed: int, new: int) -> None:
        self._add([5, 6, 7, *range(3, 20)], max_tokens=new, temperature=1.0, seed=seed)

    @rule(prompt=st.sampled_from([[], [NAN_TOKEN, 5], [64], [5] * 64]))
    def add_a_bad_one(self, prompt: list[int]) -> None:
        self._add(prompt, max_tokens=5)

    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        if self.open:
            name = data.draw(st.sampled_from(sorted(self.open)))
            self.aborted.add(name)
            self.engine.abort(name)

    @rule()
    def reset_prefix_cache(self) -> None:
        self.engine.reset_prefix_cache()

    @rule(steps=st.integers(1, 5))
    def step(self, steps: int) -> None:
        for _ in range(steps):
            self._take(self.engine.step())

    @invariant()
    def pages_add_up(self) -> None:
        if hasattr(self, "engine"):
            self.engine.kv.check()

    def teardown(self) -> None:
        """All that is open ends, and nothing is left."""
        if not hasattr(self, "engine"):
            return
        for _ in range(5000):
            if not self.engine.has_work:
                break
            self._take(self.engine.step())
        assert not self.engine.has_work
        assert not self.open
        assert set(self.ends.values()) <= {1}
        assert self.engine.audit() == []
        stats = self.engine.stats()
        assert (stats.running, stats.waiting, stats.kv_usage) == (0, 0, 0.0)

    def _add(self, prompt: list[int], **params: Any) -> None:
        self.count += 1
        request = make_request(str(self.count), prompt, **params)
        self.open[request.request] = request
        self.tokens[request.request] = []
        self.engine.add(request)

    def _take(self, events: list[Event]) -> None:
        for event in events:
            if isinstance(event, Tokens):
                self.tokens[event.request] += event.tokens
            elif isinstance(event, Finished | Error):
                self._end(event)

    def _end(self, event: Finished | Error) -> None:
        request = self.open.pop(event.request)
        self.ends[event.request] += 1
        found, expected = self.tokens[event.request], alone(request)
        if isinstance(event, Error):
            assert expected.error is not None
            return
        fitting = expected.tokens[: self.engine.max_tokens - len(request.prompt)]  # a cache this small ends it there
        if event.reason == "abort":
            assert event.request in self.aborted
            assert found == fitting[: len(found)]
        else:
            assert found == fitting


TestEngine = EngineMachine.TestCase
TestEngine.settings = settings(
    max_examples=40, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
