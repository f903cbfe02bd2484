"""The text machine: one stream's token ids in, text that may be shown out.

    ids -> bytes -> incremental UTF-8 -> (reasoning and tool markers, when there are any) -> stop strings -> deltas

Owns what is held back: the bytes of a character that is not whole, and text that may become a stop string. The deltas
of a stream, put together, are the same text for every way of cutting the stream into tokens and pushes. Knows nothing
of requests, JSON or engines.
"""

from __future__ import annotations

from codecs import utf_8_decode
from collections import deque
from collections.abc import Sequence

import msgspec

from engine.protocol import FinishReason
from engine.text.stops import ROOT, StopStrings
from engine.text.tokenizer import TextCodec


class StopMatch(msgspec.Struct, frozen=True):
    """A stop string was found. `keep_tokens` output tokens count: up to the one that completes the string."""

    string: str
    keep_tokens: int


class TextDelta(msgspec.Struct, frozen=True):
    """What became visible.

    `tokens` output tokens are complete with this delta: all of their text is out, or cut off for good by a stop string.
    Put together, the deltas of a finished stream count every output token once (until the stop), in order, so
    logprobs are handed out by it. `offsets`, kept on demand, are the characters of output (before any cut) in front of
    each of those tokens; a token that goes on with a character begun by another counts from that character.
    """

    text: str
    tokens: int
    stop: StopMatch | None = None
    offsets: tuple[int, ...] = ()


_NOTHING = TextDelta("", 0)


class TextMachine:
    """State of one stream. `push` until the engine's last output, then `end`; a stop string ends the stream early.

    Stop strings are looked for in generated text alone, never in the prompt. With `min_tokens`, one that would leave
    fewer output tokens is passed over and its text shown. `include_stop` shows the stop string, or the text of the
    engine's stop token; `show_special` shows special tokens.
    """

    def __init__(
        self,
        codec: TextCodec,
        *,
        stop: StopStrings | None = None,
        include_stop: bool = False,
        min_tokens: int = 0,
        show_special: bool = False,
        with_offsets: bool = False,
    ) -> None:
        self._bytes = codec.byte_table(show_special=show_special)
        self._stop = stop
        self._include_stop = include_stop
        self._min_tokens = min_tokens
        self._with_offsets = with_offsets
        self._tail = b""  # The bytes of a character that is not whole yet.
        self._held = ""  # Characters that are decoded but not shown: they may become a stop string.
        self._state = ROOT
        self._tokens = 0  # Output tokens pushed.
        self._decoded = 0  # Characters decoded, `_held` included.
        self._waiting: deque[int] = deque()  # For tokens that are not complete: how many characters complete them.
        self._offsets: deque[int] = deque()
        self.ended = False

    def push(self, token_ids: Sequence[int], *, stop_token: int | None = None) -> TextDelta:
        """Take the next output tokens. `stop_token` is the engine's word that the last of them ended the request: it
        counts as a token but is not shown. After the end, tokens are overshoot and are ignored.
        """
        if self.ended:
            return _NOTHING
        shown = ""
        last = len(token_ids) - 1
        for index, token_id in enumerate(token_ids):
            hidden = stop_token is not None and index == last and not self._include_stop
            data = b"" if hidden else self._bytes[token_id]
            if self._tail:
                data = self._tail + data
            text, used = utf_8_decode(data, "replace", False)
            self._tail = tail = data[used:] if used < len(data) else b""
            if self._with_offsets:
                self._offsets.append(self._decoded)
            self._tokens += 1
            self._decoded += len(text)
            # A partial character will be exactly one, whole or U+FFFD.
            self._waiting.append(self._decoded + 1 if tail else self._decoded)
            if self._stop is None:
                shown += text
                continue
            visible, stop = self._check_stop(text, self._stop)
            shown += visible
            if stop is not None:
                return self._finish(shown, stop)
        return self._delta(shown)

    def end(self, finish_reason: FinishReason) -> TextDelta:
        """The stream is over: what was held back is shown after all, a partial character as one U+FFFD.

        That character may still complete a stop string, whatever the engine's reason to end was. After a failure
        nobody reads the text: nothing is shown.
        """
        if self.ended or finish_reason in ("abort", "error"):
            self.ended = True
            return _NOTHING
        text = self._tail.decode(errors="replace")
        self._tail = b""
        self._decoded += len(text)
        stop = None
        if self._stop is not None:
            text, stop = self._check_stop(text, self._stop)
        if stop is None:
            text += self._held
            self._held = ""
        return self._finish(text, stop)

    def _check_stop(self, text: str, stops: StopStrings) -> tuple[str, StopMatch | None]:
        """Return what of the held and the new text may be shown, and the match that ends the stream."""
        at = 0
        state, match = stops.scan(self._state, text)
        while match is not None:
            at += match.end
            if self._tokens >= self._min_tokens:
                buffer = self._held + text[:at]
                self._held = ""
                visible = buffer if self._include_stop else buffer[: len(buffer) - len(match.string)]
                return visible, StopMatch(match.string, self._tokens)
            state, match = stops.scan(state, text[at:])
        self._state = state
        buffer = self._held + text
        shown = len(buffer) - stops.held(state)
        self._held = buffer[shown:]
        return buffer[:shown], None

    def _delta(self, text: str) -> TextDelta:
        """Tokens are complete in order: their ends never fall."""
        visible = self._decoded - len(self._held)
        complete = 0
        waiting = self._waiting
        while waiting and waiting[0] <= visible:
            waiting.popleft()
            complete += 1
        if not text and not complete:
            return _NOTHING
        return TextDelta(text, complete, None, self._take_offsets(complete) if self._with_offsets else ())

    def _finish(self, text: str, stop: StopMatch | None) -> TextDelta:
        self.ended = True
        complete = len(self._waiting)
        self._waiting.clear()
        return TextDelta(text, complete, stop, self._take_offsets(complete) if self._with_offsets else ())

    def _take_offsets(self, count: int) -> tuple[int, ...]:
        return tuple(self._offsets.popleft() for _ in range(count))
