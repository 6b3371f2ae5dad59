from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from unit.runtime.server.fakes import EOS, ByteTokenizer

from toolkit.runtime.errors import InternalError, UserError
from toolkit.runtime.output import Delta, OutputStream, StopStrings, TokenTexts, logprob_table
from toolkit.runtime.request import Add, Error, Event, Finished, SamplingParams, TokenLogprob, Tokens

TEXT = st.text(alphabet="abé🙂", max_size=24)
STOPS = st.lists(st.text(alphabet="abé🙂", min_size=1, max_size=5), max_size=4)


def first_stop(text: str, stops: list[str], include: bool) -> tuple[str, str | None]:
    """The definition: the stop string that is complete first, the longest of those complete at one character."""
    for end in range(len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            stop = max(complete, key=len)
            return text[: end if include else end - len(stop)], stop
    return text, None


@given(TEXT, STOPS, st.booleans(), st.lists(st.integers(0, 24)))
def test_stop_strings_do_not_depend_on_the_cuts(text: str, stops: list[str], include: bool, cuts: list[int]) -> None:
    matcher = StopStrings(stops, include=include)
    places = sorted({0, len(text), *(cut for cut in cuts if cut <= len(text))})
    pieces = [matcher.push(text[start:end]) for start, end in pairwise(places)]
    assert ("".join(pieces) + matcher.flush(), matcher.matched) == first_stop(text, stops, include)


@given(TEXT, STOPS)
def test_only_the_start_of_a_stop_string_is_kept_back(text: str, stops: list[str]) -> None:
    matcher = StopStrings(stops)
    shown = matcher.push(text)
    if matcher.matched is None and shown != text:
        assert any(stop.startswith(text[len(shown) :]) for stop in stops)


def run(events: list[Event], params: SamplingParams) -> list[Delta]:
    stream = OutputStream(Add("r", [1], params, eos=(EOS,)), ByteTokenizer())
    deltas = []
    for event in events:
        deltas.append(stream.push(event))
        if deltas[-1].finish_reason:
            break
    return deltas


def joined(deltas: list[Delta]) -> tuple[str, list[int], str | None, str | int | None]:
    ids = [token for delta in deltas for token in delta.token_ids]
    return "".join(delta.text for delta in deltas), ids, deltas[-1].finish_reason, deltas[-1].stop_reason


@given(TEXT, STOPS, st.booleans(), st.integers(0, 6), st.lists(st.integers(0, 99)))
def test_streamed_equals_whole(text: str, stops: list[str], include: bool, min_tokens: int, cuts: list[int]) -> None:
    tokens = [*text.encode(), EOS]
    params = SamplingParams(
        stop=tuple(stops), include_stop_str_in_output=include, min_tokens=min_tokens, max_tokens=None
    )
    places = sorted({0, len(tokens), *(cut for cut in cuts if cut <= len(tokens))})
    spans = pairwise(places)
    pieces = [Tokens("r", tokens[start:end]) for start, end in spans if end > start]
    end = Finished("r", "stop", EOS)
    whole = joined(run([Tokens("r", tokens), end], params))
    assert joined(run([*pieces, end], params)) == whole
    if min_tokens == 0:
        assert (whole[0], whole[3]) == first_stop(text, stops, include)


def test_ids_and_logprobs_end_with_the_token_that_completes_a_stop_string() -> None:
    tokens = list(b"one two three")
    logprobs = [TokenLogprob(token, -1.0, 1, []) for token in tokens]
    (delta,) = run([Tokens("r", tokens, logprobs)], SamplingParams(stop=("two",), logprobs=0))
    assert (delta.text, delta.finish_reason, delta.stop_reason) == ("one ", "stop", "two")
    assert delta.token_ids == list(b"one two")
    assert delta.logprobs == logprobs[:7]


@pytest.mark.parametrize(("include", "text"), [(False, "ab"), (True, "ab.")])
def test_the_stop_token_is_an_id_but_no_text(include: bool, text: str) -> None:
    params = SamplingParams(stop_token_ids=(ord("."),), include_stop_str_in_output=include)
    deltas = run([Tokens("r", list(b"ab")), Tokens("r", [ord(".")]), Finished("r", "stop", ord("."))], params)
    assert joined(deltas) == (text, list(b"ab."), "stop", ord("."))


def test_a_stop_token_that_did_not_end_the_output_is_text() -> None:
    params = SamplingParams(stop_token_ids=(ord("."),), min_tokens=3)
    events: list[Event] = [Tokens("r", [ord(".")]), Tokens("r", list(b".x")), Finished("r", "length")]
    assert joined(run(events, params)) == ("..x", list(b"..x"), "length", None)


def test_an_unfinished_character_is_replaced_at_the_end() -> None:
    deltas = run([Tokens("r", list("é".encode())[:1]), Finished("r", "length")], SamplingParams())
    assert [delta.text for delta in deltas] == ["", "\ufffd"]


def test_engine_errors_are_raised() -> None:
    with pytest.raises(UserError, match="too long"):
        run([Error("r", "too long", user_fault=True)], SamplingParams())
    with pytest.raises(InternalError, match="broke"):
        run([Error("r", "broke", user_fault=False)], SamplingParams())


def test_without_a_tokenizer_there_are_ids_only() -> None:
    with pytest.raises(UserError, match="stop_token_ids"):
        OutputStream(Add("r", [1], SamplingParams(stop=("a",))), None)
    stream = OutputStream(Add("r", [1], SamplingParams()), None)
    assert stream.push(Tokens("r", [5, 6])) == Delta("", [5, 6])


def test_logprob_tables() -> None:
    assert logprob_table(TokenLogprob(7, -2.0, 3, [(1, -0.5), (2, -1.0)])) == {7: -2.0, 1: -0.5, 2: -1.0}
    row = b"\x00\x00\x80\xbf\x00\x00\x00\xc0"  # -1 and -2 as little-endian float32
    assert logprob_table(TokenLogprob(1, -2.0, 2, [], row)) == {0: -1.0, 1: -2.0}


def test_token_texts() -> None:
    texts = TokenTexts(ByteTokenizer())
    assert (texts(65), texts.bytes(65), texts(0xC3), texts.bytes(0xC3)) == ("A", [65], "\ufffd", [0xC3])
    assert TokenTexts(None)(65) == "token_id:65"
