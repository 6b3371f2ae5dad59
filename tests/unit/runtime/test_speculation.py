"""Speculative decoding changes how many steps an output takes, and nothing else."""

from __future__ import annotations

from collections import Counter
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from unit.runtime.engine_harness import alone, depth, make_engine, make_request, run
from unit.runtime.fake_device import NAN_TOKEN, FakeDevice, fake_plan, mix
from unit.runtime.test_engine import engines, workloads

from toolkit.cli.options import parse_config
from toolkit.runtime import speculator
from toolkit.runtime.device.base import Ticket
from toolkit.runtime.drafts import CANDIDATES, Drafter, NgramIndex, SharedOutputs
from toolkit.runtime.engine import Engine
from toolkit.runtime.errors import UserError
from toolkit.runtime.options import EngineOptions, SpeculativeConfig
from toolkit.runtime.request import Add
from toolkit.runtime.speculator import Speculator, StepCosts
from toolkit.runtime.step import RESULT, StepBatch, StepResult

__all__ = ["depth"]

NGRAM = SpeculativeConfig(method="ngram", num_speculative_tokens=4, prompt_lookup_max=3, prompt_lookup_min=1)
ALWAYS = SpeculativeConfig(method="ngram", num_speculative_tokens=4, prompt_lookup_max=3, adaptive=False)
SUFFIX = SpeculativeConfig(method="suffix", num_speculative_tokens=6, adaptive=False)


class Oracle:
    """Guesses what a request will say, with some tokens wrong."""

    def __init__(self, answer: list[int], wrong: float, rng: np.random.Generator) -> None:
        guesses = np.array(answer, np.int64)
        self._answer = np.where(rng.random(len(guesses)) < wrong, rng.integers(3, 60, len(guesses)), guesses).tolist()
        self._said = 0
        self.guess: list[int] = []
        self.chance = 1 - wrong

    def take(self, tokens: list[int]) -> int:
        self._said += len(tokens)
        self.guess = self._answer[self._said : self._said + 4]
        return 0


@pytest.fixture
def oracles(monkeypatch: pytest.MonkeyPatch) -> dict[str, Oracle]:
    """Drafters by request, to be filled in before a run."""
    prepared: dict[str, Oracle] = {}

    def start(self: Speculator, sequence: Any) -> None:
        sequence.drafter = prepared[sequence.request]
        sequence.drafter.take(sequence.tokens[sequence.prompt_length : sequence.known].tolist())

    monkeypatch.setattr(Speculator, "start", start)
    return prepared


@pytest.mark.usefixtures("depth")
@settings(deadline=None, max_examples=12)
@given(
    requests=workloads(),
    config=engines(),
    arrivals=st.lists(st.integers(0, 20), max_size=8),
    wrong=st.sampled_from([0.0, 0.3, 1.0]),
    aborts=st.dictionaries(st.sampled_from("01234567"), st.integers(0, 25), max_size=2),
)
def test_outputs_are_those_of_plain_decoding(
    requests: list[Add], config: dict[str, Any], arrivals: list[int], wrong: float, aborts: dict[str, int]
) -> None:
    """Greedy and seeded, with penalties, biases, stops, log-probabilities, in chunks, from the prefix cache, preempted,
    aborted: whatever is guessed."""
    rng = np.random.default_rng(len(requests))
    expected = {request.request: alone(request, windows=config["windows"]) for request in requests}
    with pytest.MonkeyPatch.context() as patch:

        def start(self: Speculator, sequence: Any) -> None:
            sequence.drafter = Oracle(expected[sequence.request].tokens, wrong, rng)
            sequence.drafter.take(sequence.tokens[sequence.prompt_length : sequence.known].tolist())

        patch.setattr(Speculator, "start", start)
        engine = make_engine(**config | {"options": config["options"] | {"speculative_config": ALWAYS}})
        outputs = run(engine, requests, arrivals=arrivals, aborts=aborts)
    for request in requests:
        output = outputs[request.request]
        if output.finished is not None and output.finished.reason == "abort":
            assert output.tokens == expected[request.request].tokens[: len(output.tokens)]
        else:
            assert output.result == expected[request.request].result


@pytest.mark.usefixtures("depth")
def test_right_guesses_save_steps_and_are_counted(oracles: dict[str, Oracle]) -> None:
    request = make_request("x", [9, 8], max_tokens=21, ignore_eos=True)
    answer = alone(request).tokens
    oracles["x"] = Oracle(answer, 0.0, np.random.default_rng(0))
    engine = make_engine(options={"speculative_config": ALWAYS})
    output = run(engine, [request])["x"]
    assert output.tokens == answer
    stats = engine.stats()
    assert stats.steps == 1 + 4  # the prompt, then 5 tokens a step
    assert (stats.spec_drafts, stats.spec_draft_tokens, stats.spec_accepted_tokens) == (4, 16, 16)
    assert stats.spec_accepted_per_position == (4, 4, 4, 4)
    assert stats.generation_tokens == 21


def test_what_follows_a_stop_is_not_said(oracles: dict[str, Oracle]) -> None:
    plain = alone(make_request("x", [9, 8], max_tokens=21, ignore_eos=True)).tokens
    stop = next(token for token in plain if plain.index(token) >= 3)
    place = plain.index(stop)
    oracles["x"] = Oracle(plain, 0.0, np.random.default_rng(0))
    engine = make_engine(options={"speculative_config": ALWAYS})
    request = make_request("x", [9, 8], max_tokens=21, ignore_eos=True, stop_token_ids=(stop,), logprobs=1)
    output = run(engine, [request])["x"]
    assert output.tokens == plain[: place + 1]
    assert len(output.logprobs) == place + 1
    assert output.finished is not None
    assert (output.finished.reason, output.finished.stop_token) == ("stop", stop)
    assert engine.stats().generation_tokens == place + 1


def test_guesses_preempt_nobody(oracles: dict[str, Oracle]) -> None:
    """With pages for exactly what is said, wrong guesses would need more."""
    requests = [make_request(str(index), [9 + index, 8], max_tokens=18, ignore_eos=True) for index in range(4)]
    for request in requests:
        oracles[request.request] = Oracle(alone(request).tokens, 1.0, np.random.default_rng(0))
    engine = make_engine(pages=4 * 5, options={"speculative_config": ALWAYS})
    outputs = run(engine, requests)
    assert engine.stats().preemptions == 0
    assert engine.stats().spec_drafts > 0
    assert all(outputs[request.request].result == alone(request).result for request in requests)


@pytest.mark.usefixtures("depth")
@pytest.mark.parametrize("config", [NGRAM, ALWAYS, SUFFIX])
def test_texts_that_repeat_are_guessed(config: SpeculativeConfig) -> None:
    """Penalties drive the fake model round a few tokens."""
    bias = dict.fromkeys((10, 11), 40.0)
    requests = [
        make_request(str(i), [10, 11, 12, 10, 11], logit_bias=bias, max_tokens=40, temperature=t, seed=i)
        for i, t in enumerate((0.0, 0.0, 1.0, 1.0))
    ]
    engine = make_engine(options={"speculative_config": config})
    outputs = run(engine, requests)
    assert all(outputs[request.request].result == alone(request).result for request in requests)
    if not config.adaptive:
        assert engine.stats().spec_accepted_tokens > 0


def test_outputs_of_other_requests_are_guessed_from() -> None:
    request = make_request("a", [9, 8], max_tokens=30, ignore_eos=True)
    engine = make_engine(options={"speculative_config": SUFFIX})
    first = run(engine, [request])["a"]
    before = engine.stats()
    second = run(engine, [make_request("b", [9, 8], max_tokens=30, ignore_eos=True)])["b"]
    assert second.tokens == first.tokens
    after = engine.stats()
    assert after.spec_accepted_tokens - before.spec_accepted_tokens > 20
    assert after.steps - before.steps < 10


def test_unseeded_draws_have_the_models_distribution() -> None:
    """The second and third token of many outputs: some guesses were right, most were wrong."""
    vocabulary, count, temperature = 8, 2000, 2.0
    config = msgspec.structs.replace(ALWAYS, prompt_lookup_min=1)
    engine = make_engine(vocabulary=vocabulary, options={"speculative_config": config}, max_rows=40)
    prompt = [3, 4, 5, 6, 7, 0, 3, 5, 7, 4, 6, 0, 3]
    found: Counter[tuple[int, ...]] = Counter()
    for start in range(0, count, 100):
        names = map(str, range(start, start + 100))
        params: dict[str, Any] = {"temperature": temperature, "max_tokens": 3, "ignore_eos": True}
        outputs = run(engine, [make_request(name, prompt, **params) for name in names])
        found.update(tuple(output.tokens[1:]) for output in outputs.values())
    stats = engine.stats()
    assert stats.spec_accepted_tokens > count / 20
    assert stats.spec_draft_tokens - stats.spec_accepted_tokens > count / 3
    expected = {pair: chance * count for pair, chance in pair_chances(prompt, vocabulary, temperature).items()}
    cells = [(found[pair], value) for pair, value in expected.items() if value >= 5]
    cells.append((count - sum(a for a, _ in cells), max(1.0, count - sum(b for _, b in cells))))
    freedom = len(cells) - 1
    assert freedom > 20
    assert sum((a - b) ** 2 / b for a, b in cells) < freedom + 5 * (2 * freedom) ** 0.5


def pair_chances(prompt: list[int], vocabulary: int, temperature: float) -> dict[tuple[int, int], float]:
    """Of the second and third token after a prompt, from the log-probabilities of plain decoding."""

    def after(tokens: list[int]) -> list[tuple[int, float]]:
        request = make_request("x", tokens, max_tokens=1, logprobs=vocabulary, ignore_eos=True)
        (entry,) = alone(request, vocabulary=vocabulary).logprobs
        weights = [(token, float(np.exp(value / temperature))) for token, value in entry.top if token != NAN_TOKEN]
        return [(token, weight / sum(weight for _, weight in weights)) for token, weight in weights]

    chances: dict[tuple[int, int], float] = {}
    for first, one in after(prompt):
        for second, two in after([*prompt, first]):
            for third, three in after([*prompt, first, second]):
                chances[second, third] = chances.get((second, third), 0.0) + one * two * three
    return chances


# --- lookups ----------------------------------------------------------------------------------------------------------

texts = st.lists(st.integers(0, 3), max_size=60)


@given(pieces=st.lists(texts, max_size=5), least=st.integers(1, 3), depth=st.integers(3, 8))
def test_places_are_where_the_last_tokens_occurred(pieces: list[list[int]], least: int, depth: int) -> None:
    index = NgramIndex(least)
    text: list[int] = []
    for piece in pieces:
        index.extend(piece)
        text += piece

    def match(place: int) -> int:
        longest = min(place, depth)
        return next((n for n in range(longest, 0, -1) if text[place - n : place] == text[len(text) - n :]), 0)

    expected = [(match(place), place) for place in range(len(text) - 1, 0, -1) if match(place) >= least]
    assert index.places(text, depth) == expected[:CANDIDATES]


@given(text=texts, most=st.integers(1, 6))
def test_a_guess_is_what_followed_the_longest_match(text: list[int], most: int) -> None:
    config = SpeculativeConfig(method="ngram", num_speculative_tokens=most, prompt_lookup_min=2, prompt_lookup_max=4)
    drafter = Drafter(config)
    drafter.take(text)
    places = [
        (n, place)
        for place in range(2, len(text))
        for n in range(2, 5)
        if n <= place and text[place - n : place] == text[len(text) - n :]
    ]
    if not places:
        assert drafter.guess == []
        return
    recent = sorted({place for _, place in places})[-CANDIDATES:]
    _, place = max(entry for entry in places if entry[1] in recent)
    said = text[place:]
    assert drafter.guess == [said[i % len(said)] for i in range(most)]


def test_a_suffix_guess_goes_as_far_as_the_places_agree() -> None:
    config = SpeculativeConfig(method="suffix", num_speculative_tokens=9, suffix_decoding_min_token_prob=0.6)
    shared = SharedOutputs(config)
    for output in ([1, 2, 3, 4, 5, 6, 7], [1, 2, 3, 4, 5, 6, 8], [1, 2, 3, 4, 5, 9]):
        shared.add(output)
    drafter = Drafter(config, shared)
    drafter.take([20, 1, 2, 3])
    assert drafter.guess == [4, 5, 6]  # 3 tokens match, so no more are guessed
    drafter.take([4, 5])
    assert drafter.guess == [6]  # then 7 and 8 disagree


def test_old_outputs_are_forgotten() -> None:
    config = SpeculativeConfig(method="suffix", suffix_decoding_max_cached_requests=4)
    shared = SharedOutputs(config)
    for number in range(9):
        shared.add([number] * 10)
    assert 2 <= sum(text.tokens.count(-1) for text in shared.texts) <= 4
    drafter = Drafter(config, shared)
    drafter.take([8, 8])
    assert drafter.guess[:2] == [8, 8]
    drafter = Drafter(config, shared)
    drafter.take([50, 1])
    assert drafter.guess == []


def test_guesses_are_judged_without_being_tried() -> None:
    drafter = Drafter(NGRAM)
    drafter.take([5, 6, 5, 6, 5])
    for token in (6, 5, 6, 5, 6, 5):
        assert drafter.take([token]) == 1
    assert drafter.chance > 0.8
    for token in range(10, 50):
        drafter.guess = [1]
        assert drafter.take([token]) == 0
    assert drafter.chance < speculator.LEAST_CHANCE


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"method": "ngram"}, "num_speculative_tokens is required"),
        ({"method": "ngram", "num_speculative_tokens": 65}, "1 to 64"),
        (
            {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_min": 4, "prompt_lookup_max": 3},
            "prompt_lookup_min",
        ),
        ({"method": "suffix", "suffix_decoding_max_tree_depth": 0}, "must be 1 to 64"),
        ({"method": "suffix", "suffix_decoding_max_spec_factor": 0.0}, "spec_factor"),
    ],
)
def test_wrong_options_are_named(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        SpeculativeConfig(**fields)


@pytest.mark.parametrize("text", ["{", "[]", '{"method": "mtp"}', '{"method": "suffix", "draft": 3}'])
def test_wrong_json_is_named(text: str) -> None:
    with pytest.raises(UserError, match="--speculative-config must be a JSON object of method, num_speculative"):
        parse_config("--speculative-config", text, SpeculativeConfig)


# --- how much to verify -----------------------------------------------------------------------------------------------


class SlowDevice(FakeDevice):
    """A device whose steps take a time of a clock of its own."""

    def __init__(self, base: float, row: float) -> None:
        super().__init__(fake_plan(max_context=2048, max_tokens=64, max_rows=64, vocabulary=64), 4000)
        self.now = 1.0
        self._base, self._row = base, row

    def submit(self, batch: StepBatch) -> Ticket:
        """Greedy rows say 3 to 9 over and over; others anything, by their seed and index."""
        self.now += self._base + self._row * len(batch.tokens)
        self.batches.append(batch)
        rows = np.zeros(len(batch.rows), RESULT)
        at, wild = batch.rows["token"], batch.rows["temperature"] > 0
        drawn = (mix(mix(batch.rows["seed"]) + batch.rows["index"]) % np.uint64(60)).astype(np.int32)
        rows["token"] = 3 + np.where(wild, drawn, (batch.positions[at] + 1) % 7)
        self._result = StepResult(rows, np.zeros((len(rows), 1), np.int32), np.zeros((len(rows), 1), np.float32), 0.0)
        return Ticket(len(self.batches))


def seconds(base: float, row: float, batch: int, config: SpeculativeConfig | None, *, repeats: bool) -> float:
    """What requests take on a device with these costs."""
    device = SlowDevice(base, row)
    engine = Engine(device, EngineOptions(speculative_config=config), clock=lambda: device.now)
    rng = np.random.default_rng(3)
    for index in range(batch):
        prompt = [3 + i % 7 for i in range(15)] if repeats else rng.integers(3, 63, 40).tolist()
        params: dict[str, Any] = {"temperature": 0.0} if repeats else {"temperature": 1.5, "seed": index}
        engine.add(make_request(str(index), prompt, max_tokens=400, ignore_eos=True, **params))
    while engine.has_work:
        engine.step()
    return device.now


@pytest.mark.parametrize("batch", [1, 8])
@pytest.mark.parametrize(("base", "row"), [(1.0, 0.01), (1.0, 0.3), (0.2, 1.0)])
@pytest.mark.parametrize("repeats", [False, True])
def test_it_never_costs_more_than_it_yields(base: float, row: float, batch: int, repeats: bool) -> None:
    """Whether rows are nearly free, as where weights are read for few, or cost as much as anything else."""
    plain = seconds(base, row, batch, None, repeats=repeats)
    for config in (NGRAM, SpeculativeConfig(method="suffix")):
        found = seconds(base, row, batch, config, repeats=repeats)
        assert found < plain / 0.98
        if repeats and row < 0.1:
            assert found < plain / 2.5


def test_costs_are_interpolated_and_forgotten() -> None:
    costs = StepCosts()
    costs.add(2, 1.0)
    assert costs(2) == costs(9) == costs(1) == 1.0
    costs.add(6, 3.0)
    assert costs(3) == pytest.approx(1.5)
    assert costs(7) == 3.0
    costs.add(6, 300.0)
    assert costs(6) < 4.0  # one step that took long is no reason to think that all do
    for _ in range(speculator.FORGET_STEPS):
        costs.add(2, 1.0)
    costs.forget(2)
    assert costs(6) == 1.0


def test_steps_are_queued_ahead_where_nothing_is_worth_a_guess() -> None:
    engine = make_engine(depth=2, options={"speculative_config": NGRAM})
    request = make_request("x", [9, 8], max_tokens=40, ignore_eos=True, temperature=1.0, seed=4)
    run(engine, [request])
    assert engine.device.ahead > 20  # type: ignore[attr-defined]
