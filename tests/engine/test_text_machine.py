"""The text machine against its slow twin: decode everything, then look for the first stop."""

from __future__ import annotations

import codecs
from collections.abc import Sequence

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from engine.errors import RequestError
from engine.text.machine import StopMatch, TextDelta, TextMachine
from engine.text.stops import StopStrings
from tests.support.tiny_codec import codec_of, stream_codec

ALPHABET = "abé日🎉"


def decoded(tokens: Sequence[bytes], *, final: bool) -> str:
    return codecs.getincrementaldecoder("utf-8")("replace").decode(b"".join(tokens), final)


def slow_twin(
    tokens: Sequence[bytes], stops: Sequence[str], min_tokens: int, include_stop: bool
) -> tuple[str, StopMatch | None]:
    text = decoded(tokens, final=True)
    lengths = [len(decoded(tokens[: k + 1], final=False)) for k in range(len(tokens))]
    for end in range(1, len(text) + 1):
        keep = next((k + 1 for k, length in enumerate(lengths) if length >= end), len(tokens))
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found and keep >= min_tokens:
            string = max(found, key=len)
            return text[: end if include_stop else end - len(string)], StopMatch(string, keep)
    return text, None


def run(machine: TextMachine, pushes: Sequence[Sequence[int]]) -> list[TextDelta]:
    deltas = []
    for ids in pushes:
        deltas.append(machine.push(ids))
        if deltas[-1].stop:
            return deltas
    return [*deltas, machine.end("length")]


def text_of(deltas: Sequence[TextDelta]) -> str:
    return "".join(delta.text for delta in deltas)


def stop_of(deltas: Sequence[TextDelta]) -> StopMatch | None:
    return deltas[-1].stop


@st.composite
def cut(draw: st.DrawFn, what: Sequence[object], *, empty: bool = False) -> list[Sequence[object]]:
    """Cut a sequence into pieces at random places."""
    places = sorted(draw(st.lists(st.integers(0, len(what)), max_size=len(what) + 2)))
    pieces = [what[a:b] for a, b in zip([0, *places], [*places, len(what)], strict=True)]
    return pieces if empty else [piece for piece in pieces if len(piece)]


valid_bytes = st.text(ALPHABET, max_size=12).map(str.encode)
any_bytes = st.lists(st.one_of(valid_bytes, st.binary(max_size=3)), max_size=5).map(b"".join)
token_streams = any_bytes.flatmap(cut)
stop_sets = st.lists(st.text(ALPHABET + "\ufffd", min_size=1, max_size=4), min_size=1, max_size=4)


@given(st.data(), token_streams, stop_sets, st.integers(0, 6), st.booleans())
def test_equals_the_slow_twin_for_every_cut(
    data: st.DataObject, tokens: list[bytes], stops: list[str], min_tokens: int, include_stop: bool
) -> None:
    codec, ids = stream_codec(tokens)
    pushes = data.draw(cut(ids, empty=True))
    machine = TextMachine(codec, stop=StopStrings(stops), min_tokens=min_tokens, include_stop=include_stop)
    deltas = run(machine, pushes)
    text, stop = slow_twin(tokens, stops, min_tokens, include_stop)
    assert text_of(deltas) == text
    assert stop_of(deltas) == stop
    assert sum(delta.tokens for delta in deltas) == (stop.keep_tokens if stop else len(tokens))


@given(st.data(), token_streams)
@example(st.data(), [])
def test_without_stops_the_deltas_are_the_decoded_text(data: st.DataObject, tokens: list[bytes]) -> None:
    codec, ids = stream_codec(tokens)
    deltas = run(TextMachine(codec), data.draw(cut(ids)) if ids else [])
    assert text_of(deltas) == b"".join(tokens).decode(errors="replace")
    assert sum(delta.tokens for delta in deltas) == len(tokens)


@given(valid_bytes.flatmap(cut), stop_sets)
def test_holds_back_exactly_what_may_still_become_a_stop(tokens: list[bytes], stops: list[str]) -> None:
    codec, ids = stream_codec(tokens)
    machine = TextMachine(codec, stop=StopStrings(stops))
    shown = ""
    for k, token_id in enumerate(ids):
        delta = machine.push([token_id])
        shown += delta.text
        if delta.stop:
            return
        text = decoded(tokens[: k + 1], final=False)
        begun = [n for stop in stops for n in range(len(stop)) if text.endswith(stop[:n])]
        assert shown == text[: len(text) - max(begun)]


@given(st.data(), token_streams)
def test_offsets_are_the_characters_before_each_token(data: st.DataObject, tokens: list[bytes]) -> None:
    codec, ids = stream_codec(tokens)
    deltas = run(TextMachine(codec, with_offsets=True), data.draw(cut(ids)) if ids else [])
    offsets = [offset for delta in deltas for offset in delta.offsets]
    assert offsets == [len(decoded(tokens[:k], final=False)) for k in range(len(tokens))]
    assert [len(delta.offsets) for delta in deltas] == [delta.tokens for delta in deltas]


@given(st.data(), token_streams, stop_sets)
def test_a_token_is_handed_out_with_the_delta_that_completes_its_text(
    data: st.DataObject, tokens: list[bytes], stops: list[str]
) -> None:
    codec, ids = stream_codec(tokens)
    machine = TextMachine(codec, stop=StopStrings(stops))
    shown = pushed = complete = 0
    for push in data.draw(cut(ids)) if ids else []:
        delta = machine.push(push)
        if delta.stop:
            return
        pushed += len(push)
        shown += len(delta.text)
        complete += delta.tokens
        for k in range(pushed):
            whole = decoded(tokens[: k + 1], final=False)
            partial = decoded(tokens[: k + 1], final=True) != whole
            assert (k < complete) == (len(whole) + partial <= shown)


def play(tokens: Sequence[str | bytes], stops: Sequence[str] = (), **options: bool | int) -> list[TextDelta]:
    raw = [token.encode() if isinstance(token, str) else token for token in tokens]
    codec, ids = stream_codec(raw)
    machine = TextMachine(codec, stop=StopStrings(stops) if stops else None, **options)
    return run(machine, [[i] for i in ids])


def shown_text(deltas: Sequence[TextDelta]) -> list[str]:
    return [delta.text for delta in deltas]


def test_no_piece_of_a_stop_string_is_shown() -> None:
    deltas = play(["Hello", " <", "st", "op", "> more"], ["<stop>"])
    assert shown_text(deltas) == ["Hello", " ", "", "", ""]
    assert stop_of(deltas) == StopMatch("<stop>", 5)


def test_a_begun_stop_string_that_is_not_one_is_shown() -> None:
    deltas = play(["a", "<st", "ar>", "b"], ["<stop>"])
    assert shown_text(deltas) == ["a", "", "<star>", "b", ""]


def test_a_begun_stop_string_is_shown_at_the_end() -> None:
    deltas = play(["a", "<st"], ["<stop>"])
    assert shown_text(deltas) == ["a", "", "<st"]
    assert [delta.tokens for delta in deltas] == [1, 0, 1]


def test_the_stop_string_that_is_complete_first_wins() -> None:
    assert text_of(play(["abcd"], ["abcd", "bc"])) == "a"
    assert stop_of(play(["abcd"], ["abcd", "bc"])) == StopMatch("bc", 1)


def test_of_stop_strings_complete_together_the_longest_wins() -> None:
    for stops in (["bc", "abc"], ["abc", "bc"]):
        deltas = play(["xabc"], stops)
        assert (text_of(deltas), stop_of(deltas)) == ("x", StopMatch("abc", 1))


def test_a_stop_string_that_overlaps_its_own_beginning_is_found() -> None:
    assert text_of(play(["a", "a", "a", "b", "!"], ["aab"])) == "a"
    assert text_of(play(["abab", "ac", "!"], ["abac"])) == "ab"


def test_include_stop_shows_the_string_and_nothing_behind_it() -> None:
    deltas = play(["a", "ST", "OP tail"], ["STOP"], include_stop=True)
    assert shown_text(deltas) == ["a", "", "STOP"]


def test_min_tokens_passes_over_early_stop_strings() -> None:
    deltas = play(["aX", "bX", "cX", "d"], ["X"], min_tokens=3)
    assert text_of(deltas) == "aXbXc"
    assert stop_of(deltas) == StopMatch("X", 3)


def test_a_stop_string_begun_before_min_tokens_counts_when_it_ends_after() -> None:
    deltas = play(["aST", "OP"], ["STOP"], min_tokens=2)
    assert (text_of(deltas), stop_of(deltas)) == ("a", StopMatch("STOP", 2))


def test_a_stop_string_over_character_borders_inside_tokens() -> None:
    raw = "x🎉日y".encode()
    for i in range(1, len(raw)):
        for k in range(i, len(raw)):
            deltas = play([piece for piece in (raw[:i], raw[i:k], raw[k:]) if piece], ["🎉日"])
            assert text_of(deltas) == "x"


def test_a_partial_character_is_held_and_replaced_once_at_the_end() -> None:
    deltas = play(["a", b"\xf0\x9f\x8e"])
    assert shown_text(deltas) == ["a", "", "\ufffd"]
    assert [delta.tokens for delta in deltas] == [1, 0, 1]


def test_invalid_bytes_are_replaced_and_the_stream_goes_on() -> None:
    assert text_of(play([b"\x80", b"\xff", "ok", b"\xe6\x97", "z"])) == "\ufffd\ufffdok\ufffdz"


def test_tokens_after_the_stop_are_ignored() -> None:
    codec, ids = stream_codec([b"a", b"X", b"c"])
    machine = TextMachine(codec, stop=StopStrings(["X"]))
    assert machine.push(ids).stop == StopMatch("X", 2)
    assert machine.ended
    assert machine.push(ids) == TextDelta("", 0)
    assert machine.end("stop") == TextDelta("", 0)


def test_the_engine_s_stop_token_counts_but_is_not_shown() -> None:
    codec, ids = stream_codec([b"a", b"end"])
    machine = TextMachine(codec)
    assert machine.push(ids, stop_token=ids[1]) == TextDelta("a", 2)
    assert machine.end("stop") == TextDelta("", 0)
    machine = TextMachine(codec, include_stop=True)
    assert machine.push(ids, stop_token=ids[1]) == TextDelta("aend", 2)


def test_the_stop_token_s_text_is_not_searched_for_stop_strings() -> None:
    codec, ids = stream_codec([b"a", b"X"])
    machine = TextMachine(codec, stop=StopStrings(["aX"]))
    assert machine.push(ids, stop_token=ids[1]).stop is None
    assert machine.end("stop") == TextDelta("a", 2)


def test_special_tokens_are_shown_on_request_only() -> None:
    codec = codec_of([b"a", b"<|x|>"], special=[1])
    assert TextMachine(codec).push([0, 1, 0]) == TextDelta("aa", 3)
    assert TextMachine(codec, show_special=True).push([0, 1, 0]) == TextDelta("a<|x|>a", 3)


def test_nothing_is_shown_after_an_abort() -> None:
    codec, ids = stream_codec([b"<st"])
    machine = TextMachine(codec, stop=StopStrings(["<stop>"]))
    machine.push(ids)
    assert machine.end("abort") == TextDelta("", 0)


def test_one_stop_set_serves_many_streams_at_once() -> None:
    codec, ids = stream_codec([b"S", b"T"])
    stops = StopStrings(["ST"])
    first, second = TextMachine(codec, stop=stops), TextMachine(codec, stop=stops)
    first.push([ids[0]])
    assert second.push([ids[1]]).text == "T"
    assert first.push([ids[1]]).stop == StopMatch("ST", 2)


@pytest.mark.parametrize("stops", [[], [""], ["a", ""], ["a" * 70_000]])
def test_bad_stop_sets_are_refused_by_name(stops: list[str]) -> None:
    with pytest.raises(RequestError) as caught:
        StopStrings(stops)
    assert caught.value.param == "stop"


def test_stop_strings_of_regular_expression_characters_are_literal() -> None:
    for string in ("^x", "]x", "\\x", "-x", "[x", ".x"):
        assert text_of(play(["a", string, "b"], [string])) == "a"
        assert text_of(play(["ayx"], [string])) == "ayx"
