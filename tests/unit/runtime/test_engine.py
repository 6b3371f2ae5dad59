"""The engine over a device whose outputs depend on every token that can be read through the page tables."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from unit.runtime.engine_harness import PLENTY, alone, depth, device_of, make_engine, make_request, run
from unit.runtime.fake_device import EOS, NAN_TOKEN
from unit.runtime.queued_device import QueuedDevice

from toolkit.runtime.engine import step_limits
from toolkit.runtime.errors import InternalError, UserError
from toolkit.runtime.options import EngineOptions
from toolkit.runtime.request import Add, Error, Finished, Tokens

__all__ = ["depth"]
pytestmark = pytest.mark.usefixtures("depth")

# --- outputs do not depend on scheduling ------------------------------------------------------------------------------


@st.composite
def workloads(draw: st.DrawFn) -> list[Add]:
    """Requests whose prompts share prefixes, with all kinds of parameters."""
    trunk = draw(st.lists(st.integers(3, 63), min_size=24, max_size=24))
    requests = []
    for index in range(draw(st.integers(1, 8))):
        prompt = trunk[: draw(st.integers(0, 24))] + draw(st.lists(st.integers(3, 63), min_size=1, max_size=20))
        params: dict[str, Any] = {
            "max_tokens": draw(st.sampled_from([1, 2, 9, 30, None])),
            "temperature": draw(st.sampled_from([0.0, 1.0])),
            "seed": draw(st.integers(0, 2**64 - 1)),
            "repetition_penalty": draw(st.sampled_from([1.0, 1.3])),
            "frequency_penalty": draw(st.sampled_from([0.0, 0.5])),
            "top_k": draw(st.sampled_from([0, 5])),
            "top_p": draw(st.sampled_from([1.0, 0.8])),
            "logprobs": draw(st.sampled_from([None, 0, 3])),
            "prompt_logprobs": draw(st.sampled_from([None, None, 0, 2, -1])),
            "ignore_eos": draw(st.booleans()),
            "logit_bias": draw(st.sampled_from([{}, {5: 4.0, EOS: 2.0}])),
        }
        if params["max_tokens"] != 1:
            params["min_tokens"] = draw(st.sampled_from([0, 2]))
        salt = draw(st.sampled_from(["", "other"]))
        requests.append(make_request(str(index), prompt, priority=draw(st.integers(0, 2)), salt=salt, **params))
    return requests


@st.composite
def engines(draw: st.DrawFn) -> dict[str, Any]:
    """Engines whose pages, token budget or rows may be scarce; a full context takes 16 pages."""
    return {
        "windows": draw(st.sampled_from([(0,), (0, 6), (5,), (0, 3, 9), ()])),
        "pages": draw(st.sampled_from([17, 25, 40, PLENTY])),
        "max_tokens": draw(st.sampled_from([8, 13, 32])),
        "max_rows": draw(st.sampled_from([8, 11, 40])),
        "options": {"prefix_cache": draw(st.booleans())},
    }


@settings(deadline=None, max_examples=20)
@given(requests=workloads(), config=engines(), arrivals=st.lists(st.integers(0, 20), max_size=8))
def test_outputs_are_those_of_each_request_alone(
    requests: list[Add], config: dict[str, Any], arrivals: list[int]
) -> None:
    """Batched, chunked, with cached prefixes and preempted for lack of pages: nothing shows in the output."""
    outputs = run(make_engine(**config), requests, arrivals=arrivals)
    for request in requests:
        assert outputs[request.request].result == alone(request, windows=config["windows"]).result


@settings(deadline=None, max_examples=20)
@given(
    requests=workloads(),
    config=engines(),
    aborts=st.dictionaries(st.sampled_from("01234567"), st.integers(0, 25), min_size=1),
)
def test_aborts_at_any_point_leak_nothing_and_change_no_other_output(
    requests: list[Add], config: dict[str, Any], aborts: dict[str, int]
) -> None:
    outputs = run(make_engine(**config), requests, aborts=aborts)
    for request in requests:
        output, expected = outputs[request.request], alone(request, windows=config["windows"])
        if output.finished is not None and output.finished.reason == "abort":
            assert output.tokens == expected.tokens[: len(output.tokens)]
        else:
            assert output.result == expected.result


def test_preemption_happens_and_is_invisible() -> None:
    requests = [make_request(str(i), range(3 + i, 23 + i), max_tokens=40, ignore_eos=True) for i in range(8)]
    need = 8 * 15
    engine = make_engine(pages=need // 3)
    outputs = run(engine, requests)
    assert engine.stats().preemptions > 0
    for request in requests:
        assert outputs[request.request].result == alone(request).result
        metrics = outputs[request.request].finished
        assert metrics is not None
    assert sum(o.finished.metrics.preemptions for o in outputs.values() if o.finished and o.finished.metrics) > 0


def test_steps_are_queued_before_the_last_one_is_read(depth: int) -> None:
    """All but the first, while nothing runs out; and one is wasted where a stop token was not foreseen."""
    engine = make_engine()
    run(engine, [make_request("x", [9, 8], max_tokens=20, ignore_eos=True)])
    assert engine.stats().steps == 20
    run(engine, [make_request("y", [9], logit_bias={EOS: 100.0}, max_tokens=20)])
    assert engine.stats().steps == 20 + depth
    if isinstance(engine.device, QueuedDevice):
        assert engine.device.ahead == 19 + 1


# --- prefix cache -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("windows", [(0,), (0, 6), (5,)])
@pytest.mark.parametrize("extra", [0, 1, 3])
def test_hit_lengths_around_page_edges(windows: tuple[int, ...], extra: int) -> None:
    """Pages hold 4 tokens: whole shared pages are reused, and of a prompt known to the end all but its last token."""
    trunk = list(range(10, 31))
    for shared in range(0 if extra else 1, 22):
        engine = make_engine(windows=windows)
        run(engine, [make_request("first", trunk, max_tokens=4, ignore_eos=True)])
        second = make_request("second", trunk[:shared] + [50 + i for i in range(extra)])
        output = run(engine, [second])["second"]
        assert output.result == alone(second, windows=windows).result
        assert output.finished is not None
        assert output.finished.metrics is not None
        expected = shared - 1 if extra == 0 and shared % 4 == 0 else shared // 4 * 4
        assert output.finished.metrics.cached_tokens == expected


def test_window_groups_reuse_what_is_still_there() -> None:
    """Pages behind the window are cached, not lost: a prompt seen before hits as long as they were not needed."""
    engine = make_engine(windows=(0, 6))
    request = make_request("a", range(10, 50))
    run(engine, [request])
    output = run(engine, [make_request("b", range(10, 50))])["b"]
    assert output.finished is not None
    assert output.finished.metrics is not None
    assert output.finished.metrics.cached_tokens == 39


def test_salts_do_not_meet() -> None:
    engine = make_engine()
    prompt = range(10, 40)
    for salt, hits in (("", 0), ("a", 0), ("b", 0), ("a", 28)):
        before = engine.stats().prefix_hits
        run(engine, [make_request("x", prompt, salt=salt)])
        assert engine.stats().prefix_hits - before == hits


def test_reset_forgets_all_prefixes_that_are_not_in_use() -> None:
    engine = make_engine()
    run(engine, [make_request("x", range(10, 40))])
    engine.reset_prefix_cache()
    run(engine, [make_request("y", range(10, 40))])
    assert engine.stats().prefix_hits == 0
    assert engine.stats().prefix_queries == 60


def test_equal_prompts_that_arrive_together_are_computed_once() -> None:
    engine = make_engine(max_tokens=16)
    prompt = range(10, 50)
    outputs = run(engine, [make_request(str(i), prompt, temperature=1.0, seed=i) for i in range(8)])
    assert engine.stats().prefix_hits == 7 * 39
    assert all(
        output.result == alone(make_request(n, prompt, temperature=1.0, seed=int(n))).result
        for n, output in outputs.items()
    )


# --- parameters -------------------------------------------------------------------------------------------------------


def test_max_tokens_none_fills_the_context() -> None:
    output = run(make_engine(max_context=40), [make_request("x", range(5, 15), max_tokens=None, ignore_eos=True)])["x"]
    assert len(output.tokens) == 30
    assert output.finished is not None
    assert output.finished.reason == "length"


def test_output_ends_where_the_cache_does() -> None:
    """A cache of 5 pages of 4 holds 20 tokens, and the last one drawn need not be in it."""
    output = run(make_engine(pages=5), [make_request("x", range(5, 15), max_tokens=None, ignore_eos=True)])["x"]
    assert len(output.tokens) == 11
    assert output.finished is not None
    assert output.finished.reason == "length"


@pytest.mark.parametrize(("window", "pages"), [(1, 1), (5, 2), (6, 3), (9, 3)])
def test_a_window_needs_few_pages_for_any_context(window: int, pages: int) -> None:
    """Also for prompts in chunks larger than the pages, one request after another, with reuse."""
    engine = make_engine(pages=pages, windows=(window,))
    for name in ("a", "b"):
        request = make_request(name, range(3, 43), max_tokens=None, ignore_eos=True)
        output = run(engine, [request, other := make_request("other", range(20, 40))])
        assert output[name].result == alone(request, windows=(window,)).result
        assert output["other"].result == alone(other, windows=(window,)).result


def test_min_tokens_forbids_every_stop_until_then() -> None:
    bias = {EOS: 100.0, 7: 50.0}
    for minimum in (0, 1, 5):
        request = make_request("x", [9], max_tokens=8, min_tokens=minimum, logit_bias=bias, stop_token_ids=(7,))
        output = run(make_engine(), [request])["x"]
        assert len(output.tokens) == minimum + 1
        assert output.tokens[-1] == EOS
        assert output.finished is not None
        assert (output.finished.reason, output.finished.stop_token) == ("stop", EOS)


def test_stop_token_ids_and_ignore_eos() -> None:
    bias = {EOS: 100.0}
    output = run(make_engine(), [make_request("x", [9], logit_bias=bias, ignore_eos=True)])["x"]
    assert output.tokens == [EOS] * 8
    output = run(make_engine(), [make_request("x", [9], logit_bias={7: 100.0}, stop_token_ids=(7,))])["x"]
    assert output.tokens == [7]
    assert output.finished is not None
    assert (output.finished.reason, output.finished.stop_token) == ("stop", 7)


def test_without_a_seed_each_request_has_its_own() -> None:
    engine = make_engine(max_sequences=8)
    outputs = run(
        engine, [make_request(str(i), [9, 8], temperature=1.0, max_tokens=20, ignore_eos=True) for i in range(8)]
    )
    assert len({tuple(output.tokens) for output in outputs.values()}) == 8


def test_logprobs_and_prompt_logprobs() -> None:
    prompt = [5, 6, 7, 8, 9]
    output = run(make_engine(), [make_request("x", prompt, logprobs=2, prompt_logprobs=3)])["x"]
    assert [entry.token for entry in output.logprobs] == output.tokens
    assert all(entry.rank == 1 and entry.top[0] == (entry.token, entry.logprob) for entry in output.logprobs)
    assert all(len(entry.top) == 2 for entry in output.logprobs)
    assert output.prompt_logprobs is not None
    first, *others = output.prompt_logprobs
    assert first is None
    assert [entry.token for entry in others if entry is not None] == prompt[1:]
    assert all(entry is not None and len(entry.top) == 3 for entry in others)


def test_whole_vocabulary_prompt_logprobs() -> None:
    request = make_request("x", range(5, 25), prompt_logprobs=-1)
    output = run(make_engine(max_rows=8), [request])["x"]
    assert output.prompt_logprobs is not None
    for entry in output.prompt_logprobs[1:]:
        assert entry is not None
        row = np.frombuffer(entry.row, "<f4")
        assert row.shape == (64,)
        assert np.exp(row).sum() == pytest.approx(1.0, abs=1e-5)
        assert row[entry.token] == entry.logprob
        assert int((row > entry.logprob).sum()) + 1 == entry.rank
        assert entry.top == []


# --- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "params", "words"),
    [
        ([], {}, "empty"),
        ([5, 64], {}, "from 0 to 63, found 64"),
        ([5, -1], {}, "from 0 to 63, found -1"),
        ([5] * 64, {}, "may have 64"),
        ([5] * 200, {}, "may have 64"),
        ([5] * 49, {}, "the cache holds 48"),
        ([5], {"stop_token_ids": (64,)}, "stop_token_ids"),
        ([5], {"logit_bias": {-1: 1.0}}, "logit_bias"),
        ([5], {"logit_bias": {1: float("nan")}}, "finite"),
    ],
)
def test_what_cannot_be_served_is_refused_as_the_users_fault(
    prompt: list[int], params: dict[str, Any], words: str
) -> None:
    engine = make_engine(pages=12)
    outputs = run(engine, [make_request("bad", prompt, **params), good := make_request("good", [5, 6])])
    error = outputs["bad"].error
    assert error is not None
    assert error.user_fault
    assert words in error.message
    assert outputs["good"].result == alone(good).result


def test_whole_vocabulary_of_a_long_prompt_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("toolkit.runtime.engine.MAX_SCORE_BYTES", 64 * 4 * 10)
    requests = [make_request(str(length), [5] * length, prompt_logprobs=-1) for length in (10, 11)]
    outputs = run(make_engine(), requests)
    assert outputs["10"].error is None
    error = outputs["11"].error
    assert error is not None
    assert error.user_fault
    assert "at most 10 tokens" in error.message


def test_request_ids_are_unique() -> None:
    engine = make_engine()
    engine.add(make_request("x", [5]))
    with pytest.raises(InternalError, match="in use"):
        engine.add(make_request("x", [6]))


@pytest.mark.parametrize(
    "options", [{"max_num_seqs": 9}, {"max_batched_tokens": 33}, {"max_num_seqs": 8, "max_batched_tokens": 7}]
)
def test_options_beyond_the_plan_are_refused(options: dict[str, int]) -> None:
    with pytest.raises(UserError):
        make_engine(options=options)


def test_options_within_the_plan() -> None:
    plan = make_engine().plan
    assert step_limits(plan, EngineOptions(max_batched_tokens=4)).sequences == 4
    assert step_limits(plan, EngineOptions(max_num_seqs=3)).sequences == 3


# --- failures ---------------------------------------------------------------------------------------------------------


def test_logits_that_are_not_finite_end_only_their_request() -> None:
    engine = make_engine()
    bad = make_request("bad", [*range(10, 22), NAN_TOKEN, *range(22, 30)])
    good = make_request("good", range(10, 22))
    outputs = run(engine, [bad, good])
    error = outputs["bad"].error
    assert error is not None
    assert not error.user_fault
    assert "finite" in error.message
    assert outputs["good"].result == alone(good).result


def test_what_a_failed_request_computed_is_not_reused() -> None:
    engine = make_engine(max_tokens=8)
    run(engine, [make_request("bad", [*range(10, 22), NAN_TOKEN, *range(22, 30)])])
    run(engine, [make_request("again", range(10, 22))])
    assert engine.stats().prefix_hits == 0


@pytest.mark.parametrize("where", ["fail_submit", "fail_wait"])
def test_a_failed_step_ends_the_running_requests_and_no_others(where: str, capsys: pytest.CaptureFixture[str]) -> None:
    engine = make_engine(max_sequences=2)
    requests = [make_request(str(index), range(10 + index, 30), max_tokens=10, ignore_eos=True) for index in range(4)]
    for request in requests:
        engine.add(request)
    events = [event for _ in range(4) for event in engine.step()]
    assert any(isinstance(event, Tokens) for event in events)
    setattr(device_of(engine), where, RuntimeError("kernel exploded"))
    failures = engine.step()
    assert {event.request for event in failures if isinstance(event, Error)} == {"0", "1"}
    assert all(isinstance(event, Error) and "kernel exploded" in event.message for event in failures)
    assert not any(isinstance(event, Error) and event.user_fault for event in failures)
    assert "kernel exploded" in capsys.readouterr().err
    engine.kv.check()
    assert engine.kv.usage == 0.0
    rest = []
    while engine.has_work:
        rest += engine.step()
    assert {event.request for event in rest if isinstance(event, Finished)} == {"2", "3"}
    assert run(engine, [again := make_request("0", range(10, 30))])["0"].result == alone(again).result


def test_audit_reports_a_lost_page_and_recovers() -> None:
    engine = make_engine(pages=30)
    run(engine, [make_request("x", range(10, 30))])
    engine.add(request := make_request("y", range(10, 30)))
    while engine.has_work:
        engine.step()
    engine.kv.pools[0].take()
    (event,) = engine.audit()
    assert isinstance(event, Error)
    assert event.request == ""
    assert "audit" in event.message
    assert engine.audit() == []
    assert run(engine, [request])["y"].result == alone(request).result


# --- fairness ---------------------------------------------------------------------------------------------------------


def test_a_long_request_is_not_starved_by_a_stream_of_short_ones() -> None:
    engine = make_engine(pages=24, max_sequences=4, max_tokens=16)
    long = make_request("long", range(3, 43), max_tokens=20, ignore_eos=True)
    short = [make_request(f"short{index}", [5 + index % 50, 9, 8], max_tokens=6) for index in range(150)]
    outputs = run(engine, [*short[:4], long, *short[4:]], arrivals=[0] * 4 + [1] + [index // 2 for index in range(146)])
    last = list(outputs).index("long")
    assert outputs["long"].result == alone(long).result
    finished = outputs["long"].finished
    assert finished is not None
    assert finished.reason == "length"
    assert last == 4


def test_lower_priority_numbers_go_first_and_push_out_higher_ones() -> None:
    engine = make_engine(pages=20, max_sequences=2)
    for name, start in (("a", 10), ("b", 11)):
        engine.add(make_request(name, range(start, 30), priority=5, max_tokens=12, ignore_eos=True))
    engine.step()
    engine.add(make_request("urgent", range(30, 60), priority=0, max_tokens=3, ignore_eos=True))
    order = []
    while engine.has_work:
        order += [event.request for event in engine.step() if isinstance(event, Finished)]
    assert order[0] == "urgent"
    assert engine.stats().preemptions > 0


def test_decoding_goes_on_while_a_long_prompt_is_computed() -> None:
    engine = make_engine(max_tokens=8, max_context=200)
    engine.add(make_request("short", [5, 6], max_tokens=30, ignore_eos=True))
    engine.step()
    engine.add(make_request("long", range(3, 60), max_tokens=2))
    for _ in range(7):
        events = engine.step()
        assert [event.request for event in events if isinstance(event, Tokens)] == ["short"]


# --- state ------------------------------------------------------------------------------------------------------------


def test_stats_count() -> None:
    engine = make_engine()
    for index in range(3):
        engine.add(make_request(str(index), range(10, 20), max_tokens=5, ignore_eos=True))
    stats = engine.stats(7)
    assert (stats.number, stats.running, stats.waiting) == (7, 0, 3)
    engine.step()
    assert engine.stats().kv_usage > 0
    while engine.has_work:
        engine.step()
    stats = engine.stats()
    assert (stats.running, stats.waiting, stats.kv_usage) == (0, 0, 0.0)
    assert (stats.prompt_tokens, stats.generation_tokens) == (30, 15)
    assert stats.steps == len(device_of(engine).batches)
    assert stats.last_step >= 0


def test_request_metrics_are_times_since_arrival() -> None:
    now = [100.0]

    def clock() -> float:
        now[0] += 1.0
        return now[0]

    engine = make_engine()
    engine._clock = clock
    output = run(engine, [make_request("x", [5, 6], max_tokens=3, ignore_eos=True)])["x"]
    assert output.finished is not None
    metrics = output.finished.metrics
    assert metrics is not None
    assert 0 < metrics.queue < metrics.first_token < metrics.total


def test_a_step_has_at_least_one_row() -> None:
    engine = make_engine(max_tokens=8)
    run(engine, [make_request("x", range(3, 40))])
    batches = device_of(engine).batches
    assert [len(batch.rows) for batch in batches[:4]] == [1, 1, 1, 1]
    assert batches[0].rows["sample"][0] == 0
    assert batches[0].rows["target"][0] == -1
