"""What an engine must say on every device, however requests are scheduled; `case` is a device with a reference."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import pytest
from unit.runtime.engine_harness import Output, make_request, make_requests, run

from toolkit.runtime.engine import Engine
from toolkit.runtime.options import SpeculativeConfig
from toolkit.runtime.request import Add


class Case(ABC):
    """A plan on a device, beside something that computes the same in another way."""

    steps: int
    """Tokens of an output."""
    tolerance: float
    """How far a log-probability may be from the reference's, and how much less likely than the best a token may be."""

    @abstractmethod
    def engine(self, *, full_sequences: float = 8.0, **options: Any) -> Engine:
        """An engine whose cache holds so many sequences of full length."""

    @abstractmethod
    def logprobs(self, prompt: list[int], tokens: list[int]) -> npt.NDArray[Any]:
        """The reference's log-probabilities [tokens, V], of what comes after `prompt` and the tokens before each."""

    @abstractmethod
    def prompts(self, count: int) -> list[list[int]]:
        """Some begin alike; the longest are of several pages."""

    def requests(self, count: int, **params: Any) -> list[Add]:
        return make_requests(self.prompts(count), **({"max_tokens": self.steps} | params))

    def check_greedy(self, prompt: list[int], output: Output) -> None:
        """Every token is the reference's best after the tokens before it, or nearly so."""
        assert output.error is None
        assert output.tokens
        expected = self.logprobs(prompt, output.tokens)
        chosen = expected[np.arange(len(output.tokens)), output.tokens]
        assert float((expected.max(axis=1) - chosen).max()) < self.tolerance

    def check_all_greedy(self, outputs: dict[str, Output]) -> None:
        """The same of all prompts, whose outputs are whole."""
        for prompt, output in zip(self.prompts(len(outputs)), outputs.values(), strict=True):
            assert len(output.tokens) == self.steps
            self.check_greedy(prompt, output)


class EngineSuite:
    """Tests for a module with a fixture `case`."""

    @pytest.mark.parametrize(
        "options",
        [
            {},
            {"max_batched_tokens": 24},
            {"full_sequences": 1.2},
            {"full_sequences": 1.2, "max_batched_tokens": 11, "max_num_seqs": 3},
            {"prefix_cache": False},
        ],
    )
    def test_greedy_outputs_are_the_references(self, case: Case, options: dict[str, Any]) -> None:
        """In one batch, in small chunks, with little memory, with and without prefix cache."""
        engine = case.engine(**options)
        outputs = run(engine, case.requests(8))
        assert ("full_sequences" in options) == (engine.stats().preemptions > 0)
        case.check_all_greedy(outputs)
        engine.device.close()

    def test_cached_prefixes_and_lone_requests_say_the_same(self, case: Case) -> None:
        engine = case.engine()
        for request in case.requests(5):
            case.check_greedy(list(request.prompt), run(engine, [request])[request.request])
        before = engine.stats().prefix_hits
        case.check_all_greedy(run(engine, case.requests(5)))
        assert engine.stats().prefix_hits > before
        engine.device.close()

    def test_logprobs_are_the_references(self, case: Case) -> None:
        engine = case.engine()
        prompt = case.prompts(1)[0]
        output = run(engine, [make_request("x", prompt, logprobs=5, prompt_logprobs=-1, max_tokens=6)])["x"]
        expected = case.logprobs(prompt[:1], prompt[1:] + output.tokens)
        assert output.prompt_logprobs is not None
        assert output.prompt_logprobs[0] is None
        for position, entry in enumerate(output.prompt_logprobs[1:]):
            assert entry is not None
            row = np.frombuffer(entry.row, "<f4")
            np.testing.assert_allclose(row, expected[position], atol=case.tolerance)
            assert entry.token == prompt[position + 1]
            assert entry.logprob == pytest.approx(row[entry.token], abs=1e-6)
            assert entry.rank == int((row > row[entry.token]).sum()) + 1
        for index, entry in enumerate(output.logprobs):
            row = expected[len(prompt) - 1 + index]
            assert entry.token == output.tokens[index]
            assert entry.logprob == pytest.approx(row[entry.token], abs=case.tolerance)
            top = np.sort(row)[::-1][:5]
            np.testing.assert_allclose([value for _, value in entry.top], top, atol=case.tolerance)
        engine.device.close()

    def test_penalties_biases_and_stops_reach_the_sampler(self, case: Case) -> None:
        engine = case.engine()
        prompt = case.prompts(1)[0]
        biased = make_request("biased", prompt, logit_bias={7: 100.0}, max_tokens=5)
        assert run(engine, [biased])["biased"].tokens == [7] * 5
        stopped = make_request("stopped", prompt, logit_bias={7: 100.0, 9: 50.0}, stop_token_ids=(7,), min_tokens=3)
        assert run(engine, [stopped])["stopped"].tokens == [9, 9, 9, 7]
        much: dict[str, Any] = {"presence_penalty": 2.0, "repetition_penalty": 10.0}
        tokens = run(engine, [make_request("penalized", prompt, max_tokens=case.steps, **much)])["penalized"].tokens
        plain = run(engine, [make_request("plain", prompt, max_tokens=case.steps, ignore_eos=True)])["plain"].tokens
        assert len(set(tokens)) > len(set(plain))
        engine.device.close()

    def test_aborted_requests_leave_the_others_alone(self, case: Case) -> None:
        engine = case.engine()
        outputs = run(engine, case.requests(8), aborts={"1": 3, "2": 10, "5": 11})
        for index, prompt in enumerate(case.prompts(8)):
            output = outputs[str(index)]
            assert (len(output.tokens) < case.steps) == (index in (1, 2, 5))
            if output.tokens:
                case.check_greedy(prompt, output)
        engine.device.close()

    @pytest.mark.parametrize("method", ["ngram", "suffix"])
    def test_drafts_change_no_greedy_output(self, case: Case, method: Literal["ngram", "suffix"]) -> None:
        config = SpeculativeConfig(method=method, num_speculative_tokens=4, prompt_lookup_min=1, adaptive=False)
        engine = case.engine(speculative_config=config)
        case.check_all_greedy(run(engine, case.requests(8)))
        before, steps = engine.stats().spec_accepted_tokens, case.steps
        sure = make_request("sure", [7, 9] * 20, logit_bias={7: 100.0}, max_tokens=steps, ignore_eos=True)
        assert run(engine, [sure])["sure"].tokens == [7] * steps
        assert engine.stats().spec_accepted_tokens - before > steps / 4
        engine.device.close()

    def test_a_woken_engine_says_the_same(self, case: Case) -> None:
        engine = case.engine()
        expected = run(engine, case.requests(4))
        engine.sleep()
        assert engine.stats().memory["weights"] == engine.stats().memory["kv"] == 0
        engine.wake_up()
        for name, output in run(engine, case.requests(4)).items():
            assert output.tokens == expected[name].tokens
        engine.device.close()
