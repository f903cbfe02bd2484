"""Real text through the packaged model's tokenizer and back, token by token."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.text.machine import TextMachine
from engine.text.stops import StopStrings
from tests.support.smollm2 import codec

TEXTS = [
    "The quick brown fox jumps over 13 lazy dogs.\n\n\tIndented, twice.",
    "👨‍👩‍👧‍👦 family, 🇩🇪 flag, 👍🏽 skin tone, 🏳️‍🌈",
    "日本語のテキスト、中文文本，한국어 텍스트",
    "e\u0301 a\u0308 n\u0303 combining; Z̸̡̛a̶l̷g̸o̴",
    "हिन्दी العربية עברית ไทย",
    "\u0000\u0001\u007f\u0085\u200b\ufeff",
    "",
]


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("size", [1, 2, 3, 1000])
def test_deltas_put_together_are_the_text(text: str, size: int) -> None:
    ids = codec().encode(text, parse_special=True)
    machine = TextMachine(codec())
    deltas = [machine.push(ids[i : i + size]) for i in range(0, len(ids), size)]
    deltas.append(machine.end("length"))
    assert "".join(delta.text for delta in deltas) == text == codec().decode(ids)


@pytest.mark.parametrize("text", TEXTS[:-1])
def test_no_delta_holds_half_a_character(text: str) -> None:
    machine = TextMachine(codec())
    shown = ""
    for token_id in codec().encode(text, parse_special=True):
        shown += machine.push([token_id]).text
        assert text.startswith(shown)
        assert "\ufffd" not in shown
    assert shown == text


@settings(max_examples=200)
@given(st.text(st.characters(codec="utf-8", exclude_categories=["Cc", "Cn", "Co"]), min_size=1), st.data())
def test_any_substring_is_found_as_a_stop(text: str, data: st.DataObject) -> None:
    start = data.draw(st.integers(0, len(text) - 1))
    stop = text[start : data.draw(st.integers(start + 1, len(text)))]
    machine = TextMachine(codec(), stop=StopStrings([stop]))
    shown = ""
    for token_id in codec().encode(text, parse_special=False):
        delta = machine.push([token_id])
        shown += delta.text
        if delta.stop:
            break
    assert machine.ended
    assert shown == text[: text.index(stop)]


@settings(max_examples=200)
@given(st.lists(st.integers(0, 49151), max_size=30))
def test_any_ids_stream_as_they_decode(ids: list[int]) -> None:
    machine = TextMachine(codec())
    text = "".join(machine.push([token_id]).text for token_id in ids) + machine.end("length").text
    assert text == codec().decode(ids)
