"""The prompt as it is shown in front of an answer (`echo`), and where in it each token begins."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from engine.text.machine import TextMachine
from engine.text.tokenizer import TextCodec


@dataclass(frozen=True, slots=True)
class Echo:
    """`offsets` are characters of `text` in front of each prompt token."""

    text: str
    offsets: tuple[int, ...]


def echo_of(codec: TextCodec, prompt: str | list[int], ids: Sequence[int]) -> Echo:
    """A text is shown as it was sent; token ids are shown as their text, special tokens by name.

    Tokenising may add to a text, in front of it (a BOS token, a space): offsets count from the text's own start.
    """
    machine = TextMachine(codec, show_special=True, with_offsets=True)
    parts = [machine.push(ids), machine.end("length")]
    decoded = "".join(part.text for part in parts)
    offsets = [offset for part in parts for offset in part.offsets]
    if not isinstance(prompt, str):
        return Echo(decoded, tuple(offsets))
    added = max(0, decoded.find(prompt))
    return Echo(prompt, tuple(min(max(0, offset - added), len(prompt)) for offset in offsets))
