"""The Python API over the real engine and a fake device."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
from unit.runtime.engine_harness import device_of, make_engine
from unit.runtime.fake_device import NAN_TOKEN
from unit.runtime.server.fakes import ByteTokenizer, RoleTemplate

from toolkit import LLM, AsyncLLM, SamplingParams
from toolkit.runtime.engine import Engine
from toolkit.runtime.errors import UserError
from toolkit.runtime.options import EngineOptions, parse_memory
from toolkit.runtime.prompt import Prompts, sampling_defaults

NO_NAN = {NAN_TOKEN: -100.0}
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logit_bias=NO_NAN)


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch) -> list[Engine]:
    """Engines that were opened, over fake devices with a token a byte."""
    opened: list[Engine] = []

    def open_engine(directory: object, options: EngineOptions) -> Engine:
        opened.append(make_engine(vocabulary=256))
        return opened[-1]

    def open_prompts(directory: object, plan: Any) -> Prompts:
        return Prompts(plan, ByteTokenizer(), RoleTemplate())

    monkeypatch.setattr("toolkit.runtime.llm.open_engine", open_engine)
    monkeypatch.setattr("toolkit.runtime.engine.open_engine", open_engine)
    monkeypatch.setattr(Prompts, "open", open_prompts)
    return opened


def test_results_are_in_order_and_equal_alone_or_together(engines: list[Engine]) -> None:
    prompts: list[str | list[int]] = ["one", "three", [70, 71, 72, 73], "x" * 40]
    with LLM("plan") as llm:
        together = llm.generate(prompts, GREEDY)
        alone = [llm.generate([prompt], GREEDY)[0] for prompt in prompts]
    assert [result.token_ids for result in together] == [result.token_ids for result in alone]
    assert [result.prompt for result in together] == ["one", "three", None, "x" * 40]
    assert together[2].prompt_token_ids == [70, 71, 72, 73]
    first = together[0]
    assert (len(first.token_ids), first.finish_reason) == (12, "length")
    assert first.text == ByteTokenizer().decode(first.token_ids)
    assert first.metrics is not None
    assert 0 <= first.metrics.queue <= first.metrics.first_token <= first.metrics.total
    assert first.logprobs is None
    assert first.prompt_logprobs is None
    assert device_of(engines[0]).closed


def test_one_prompt_may_come_alone(engines: list[Engine]) -> None:
    llm = LLM("plan")
    texts = [llm.generate(prompt, GREEDY)[0].text for prompt in ("ab", [97, 98], np.array([97, 98]).tolist())]
    assert texts[0] == texts[1] == texts[2]
    assert llm.generate([], GREEDY) == []


def test_logprobs_are_dictionaries_by_token_id(engines: list[Engine]) -> None:
    params = SamplingParams(
        temperature=0, max_tokens=3, logprobs=2, prompt_logprobs=1, ignore_eos=True, logit_bias=NO_NAN
    )
    (result,) = LLM("plan").generate("abc", params)
    assert result.logprobs is not None
    assert [max(table, key=table.__getitem__) for table in result.logprobs] == result.token_ids
    assert [len(table) for table in result.logprobs] == [2, 2, 2]
    assert result.prompt_logprobs is not None
    assert result.prompt_logprobs[0] is None
    assert [token in (table or {}) for token, table in zip(b"bc", result.prompt_logprobs[1:], strict=True)] == [
        True
    ] * 2


def test_whole_vocabulary_prompt_logprobs(engines: list[Engine]) -> None:
    (result,) = LLM("plan").generate("abc", SamplingParams(max_tokens=1, prompt_logprobs=-1))
    assert result.prompt_logprobs is not None
    for table in result.prompt_logprobs[1:]:
        assert table is not None
        assert list(table) == list(range(256))
        assert np.exp(list(table.values())).sum() == pytest.approx(1.0, abs=1e-4)


def test_n_outputs_each_with_a_seed_of_its_own(engines: list[Engine]) -> None:
    params = SamplingParams(n=3, seed=5, max_tokens=10, ignore_eos=True, logit_bias=NO_NAN)
    llm = LLM("plan")
    (result,) = llm.generate("abc", params)
    assert len({tuple(output.token_ids) for output in result.outputs}) == 3
    assert result.token_ids == result.outputs[0].token_ids
    (second,) = llm.generate("abc", SamplingParams(seed=6, max_tokens=10, ignore_eos=True, logit_bias=NO_NAN))
    assert second.token_ids == result.outputs[1].token_ids


def test_stop_strings_free_the_request(engines: list[Engine]) -> None:
    llm = LLM("plan")
    (whole,) = llm.generate("abc", GREEDY)
    stop = next(char for char in whole.text[3:] if char != "\ufffd")
    (result,) = llm.generate(
        "abc", SamplingParams(temperature=0, max_tokens=50, ignore_eos=True, stop=(stop,), logit_bias=NO_NAN)
    )
    assert (result.finish_reason, result.outputs[0].stop_reason) == ("stop", stop)
    assert result.text == whole.text[: whole.text.index(stop)]
    assert llm.generate("abc", GREEDY)[0].text == whole.text
    assert not engines[0].has_work
    assert engines[0].kv.usage == 0


def test_chat(engines: list[Engine]) -> None:
    llm = LLM("plan")
    messages = [{"role": "user", "content": "hi"}]
    (result,) = llm.chat(messages, GREEDY)
    assert result.prompt == "user:hi\nassistant:"
    assert [each.text for each in llm.chat([messages, messages], GREEDY)] == [result.text] * 2
    (other,) = llm.chat(messages, GREEDY, thinking=True)
    assert other.prompt == "user:hi\n[thinking=True]assistant:"
    assert "".join(delta.text for delta in llm.stream_chat(messages, GREEDY)) == result.text


def test_a_stream_may_be_left(engines: list[Engine]) -> None:
    llm = LLM("plan")
    stream = llm.stream("abc", GREEDY)
    assert next(stream).token_ids
    with pytest.raises(UserError, match="busy"):
        llm.generate("x", GREEDY)
    del stream
    assert "".join(delta.text for delta in llm.stream("abc", GREEDY)) == llm.generate("abc", GREEDY)[0].text
    assert engines[0].kv.usage == 0


def test_bad_prompts_are_refused_before_anything_runs(engines: list[Engine]) -> None:
    llm = LLM("plan")
    for prompts, params, reason in (
        (["a", ""], GREEDY, "empty"),
        (["a", [999]], GREEDY, "0 to 255"),
        (["a", "x" * 200], GREEDY, "shorten"),
        (["a", 3], GREEDY, "mixes"),
        (["a", "b"], [GREEDY], "2 prompts"),
    ):
        bad: Any = prompts
        with pytest.raises(UserError, match=reason):
            llm.generate(bad, params)
    assert not engines[0].has_work


def test_options_are_checked(engines: list[Engine]) -> None:
    with pytest.raises(UserError, match="max_num_seqs"):
        LLM("plan", max_seqs=3)
    with pytest.raises(UserError, match="8GiB"):
        LLM("plan", memory="lots")


@pytest.mark.parametrize(
    ("text", "amount"), [("0.5", 0.5), ("1", 1.0), ("8GiB", 2.0**33), ("500MB", 5e8), ("1.5 GiB", 1.5 * 2**30)]
)
def test_memory_amounts(text: str, amount: float) -> None:
    assert parse_memory(text) == amount


@pytest.mark.parametrize("text", ["", "0", "2", "x", "-1", "8GiB!", "nan", "8 T"])
def test_memory_amounts_that_are_none(text: str) -> None:
    with pytest.raises(UserError, match="up to 1"):
        parse_memory(text)


def test_progress_is_shown(engines: list[Engine], capsys: pytest.CaptureFixture[str]) -> None:
    LLM("plan").generate(["a", "b"], GREEDY, progress=True)
    assert "2/2" in capsys.readouterr().out


def test_async_equals_sync_and_serves_many_at_once(engines: list[Engine]) -> None:
    prompts = ["one", "three", "x" * 40]
    expected = LLM("plan").generate(prompts, GREEDY)

    async def main() -> None:
        async with AsyncLLM("plan") as llm:
            results = await asyncio.gather(*(llm.generate(prompt, GREEDY) for prompt in prompts))
            assert [result.text for (result,) in results] == [result.text for result in expected]
            messages = [{"role": "user", "content": "hi"}]
            assert (await llm.chat(messages, GREEDY))[0].text
            pieces = [delta.text async for delta in llm.stream("one", GREEDY)]
            assert "".join(pieces) == expected[0].text
            with pytest.raises(UserError, match="empty"):
                await llm.generate(["a", ""], GREEDY)

    asyncio.run(main())
    assert device_of(engines[1]).closed


def test_defaults_come_from_generation_config(tmp_path: Any) -> None:
    assert sampling_defaults(tmp_path) == {}
    path = tmp_path / "generation_config.json"
    path.write_text('{"temperature": 0.6, "top_k": 20, "top_p": null, "eos_token_id": 2, "do_sample": true}')
    assert sampling_defaults(tmp_path) == {"temperature": 0.6, "top_k": 20}
    for bad in ("{", '{"temperature": "hot"}', '{"top_p": 7}'):
        path.write_text(bad)
        with pytest.raises(UserError, match="generation_config"):
            sampling_defaults(tmp_path)
