"""From the bytes of a streamed answer to its record: events, text chunks with their arrival, usage, errors.

Pure: it is fed bytes and clock readings. Knows no HTTP.
"""

from __future__ import annotations

import msgspec

from server.bench.serve_records import RequestRecord

_LONGEST_LINE_BYTES = 4 << 20
_LONGEST_MESSAGE = 300


class Delta(msgspec.Struct):
    """Reasoning comes under two names."""

    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[object] | None = None


class Choice(msgspec.Struct):
    text: str | None = None
    delta: Delta | None = None
    finish_reason: str | None = None


class PromptDetails(msgspec.Struct):
    cached_tokens: int | None = None


class StreamUsage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: PromptDetails | None = None


class Chunk(msgspec.Struct):
    """What is read of a chunk, or of a whole answer, of either endpoint."""

    choices: list[Choice] = []
    usage: StreamUsage | None = None
    error: object = None


_decode_chunk = msgspec.json.Decoder(Chunk).decode


class EventLines:
    """Cuts a body into the data of its server-sent events. What OpenAI's servers send has one data line an event."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, body: bytes) -> list[bytes]:
        """Return the data lines that are complete now. Raises ValueError for a line without end."""
        *lines, self._rest = (self._rest + body).split(b"\n")
        if len(self._rest) > _LONGEST_LINE_BYTES:
            raise ValueError("an event is longer than 4 MiB")
        return [line[5:].strip() for line in lines if line.startswith(b"data:")]


class AnswerReader:
    """Fills one record. `done` says that the answer is over, whatever the body still has."""

    def __init__(self, record: RequestRecord) -> None:
        self._record = record
        self._lines = EventLines()
        self._pieces: list[str] = []
        self.done = False

    @property
    def text(self) -> str:
        return "".join(self._pieces)

    def feed(self, body: bytes, now_s: float) -> None:
        """Take what arrived at `now_s`. Raises ValueError where it is not a stream of chunks."""
        for data in self._lines.feed(body):
            if self.done:
                return
            if data == b"[DONE]":
                self._finish(now_s)
            else:
                self._take(_decode_chunk(data), now_s)

    def fail(self, kind: str, message: str) -> None:
        """Nothing more comes. An answer that was there already stays one."""
        if not self.done and self._record.error is None:
            self._record.error, self._record.message = kind, message

    def end(self, now_s: float) -> None:
        """The body is over. Some servers leave out [DONE]: a finish reason says as much."""
        if self._record.finish_reason is None:
            self.fail("cut stream", "The stream ended in the middle of the answer.")
        if not self.done:
            self._finish(now_s)

    def _finish(self, now_s: float) -> None:
        self._record.end_s = now_s
        self.done = True

    def _take(self, chunk: Chunk, now_s: float) -> None:
        if chunk.error is not None:
            self.fail("error event", error_message(msgspec.json.encode(chunk.error)))
            self._finish(now_s)
            return
        for choice in chunk.choices:
            piece, has_more = _text_of(choice)
            if piece or has_more:
                self._record.text_s.append(now_s)
                self._pieces.append(piece)
            if choice.finish_reason:
                self._record.finish_reason = choice.finish_reason
        if chunk.usage is not None:
            take_usage(self._record, chunk.usage)


def take_usage(record: RequestRecord, usage: StreamUsage) -> None:
    """Running usage comes with every chunk: the last one holds."""
    record.prompt_tokens = usage.prompt_tokens
    record.completion_tokens = usage.completion_tokens
    if usage.prompt_tokens_details is not None:
        record.cached_tokens = usage.prompt_tokens_details.cached_tokens


def prompt_tokens_of(answer: bytes) -> int | None:
    """Read the prompt's length from a whole answer. Raises ValueError where it is no answer."""
    usage = _decode_chunk(answer).usage
    return None if usage is None else usage.prompt_tokens


def error_message(body: bytes) -> str:
    """Return the message of an OpenAI error body, or what stands there instead, in one line."""
    text = body.decode(errors="replace")
    try:
        error = msgspec.json.decode(body)
        inner = error.get("error", error) if isinstance(error, dict) else error
        text = str(inner.get("message", inner)) if isinstance(inner, dict) else str(inner)
    except ValueError:
        pass
    return " ".join(text.split())[:_LONGEST_MESSAGE]


def _text_of(choice: Choice) -> tuple[str, bool]:
    """The answer's text in a choice, and whether there is more that tokens were spent on: reasoning, tool calls."""
    if choice.delta is None:
        return choice.text or "", False
    delta = choice.delta
    return delta.content or "", bool(delta.reasoning_content or delta.reasoning or delta.tool_calls)
