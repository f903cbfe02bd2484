"""What simulated clients ask: a trace of block hashes, or conversations drawn at random."""

from __future__ import annotations

import heapq
import random
from collections.abc import Iterator, Sequence
from hashlib import blake2b
from itertools import islice, pairwise
from pathlib import Path

import msgspec

from engine.errors import ConfigError

TRACE_BLOCK_TOKENS = 512
"""Tokens of one hash of the Mooncake traces."""


class SimRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One request. `keys` name the full blocks of its prompt, each together with all before it."""

    request_id: str
    arrival_s: float
    prompt_tokens: int
    output_tokens: int
    keys: tuple[bytes, ...]
    session_id: str | None = None


class _TraceRow(msgspec.Struct):
    """`timestamp` is in ms. Each of `hash_ids` names a block together with all before it; the last may be short."""

    timestamp: float
    input_length: int
    output_length: int
    hash_ids: list[int]


def read_trace(
    path: Path,
    *,
    speed: float = 1.0,
    limit: int | None = None,
    spread_seed: int | None = None,
    block_tokens: int = TRACE_BLOCK_TOKENS,
) -> list[SimRequest]:
    """Read a trace in the format of the Mooncake traces (JSON lines), `speed` times as fast as it was recorded.

    Recorded times are rounded down to some seconds, so that requests come in bursts; with a `spread_seed` they are
    drawn evenly from the time up to the next burst. Raises ConfigError where it cannot be read.
    """
    decoder = msgspec.json.Decoder(_TraceRow)
    try:
        with path.open("rb") as lines:
            rows = [decoder.decode(line) for line in islice(lines, limit) if line.strip()]
    except (OSError, msgspec.DecodeError) as error:
        raise ConfigError(f"The trace {path} cannot be read: {error}") from None
    rows.sort(key=lambda row: row.timestamp)
    if rows and spread_seed is not None:
        _spread(rows, random.Random(spread_seed))
    return [
        SimRequest(
            request_id=f"r{number}",
            arrival_s=row.timestamp / 1e3 / speed,
            prompt_tokens=max(1, row.input_length),
            output_tokens=max(1, row.output_length),
            keys=tuple(_key(one) for one in row.hash_ids[: row.input_length // block_tokens]),
            # Conversations are not named in the trace. All share the first block, few the second.
            session_id=str(row.hash_ids[min(1, len(row.hash_ids) - 1)]) if row.hash_ids else None,
        )
        for number, row in enumerate(rows)
    ]


def _spread(rows: Sequence[_TraceRow], rng: random.Random) -> None:
    """Draw the times of rows that were recorded at the same time anew; rows stay in their order."""
    times = sorted({row.timestamp for row in rows})
    steps = {time: later - time for time, later in pairwise(times)}
    # How long the last step was is not recorded: as long as the one before it.
    steps[times[-1]] = steps[times[-2]] if len(times) > 1 else 0.0
    drawn = sorted(row.timestamp + rng.random() * steps[row.timestamp] for row in rows)
    for row, time in zip(rows, drawn, strict=True):
        row.timestamp = time


class Conversations(msgspec.Struct, frozen=True, kw_only=True):
    """Conversations begin as a Poisson process of `rate` requests/s in all. Each has a geometric number of `turns` in
    the mean; a turn's prompt is all that was said before and a new question, and comes `think_s` (exponential) after
    the last answer could have been read. `groups` system prompts of `shared_tokens` begin them, chosen by Zipf's law.
    """

    rate: float = 8.0
    requests: int = 2000
    turns: float = 4.0
    groups: int = 16
    shared_tokens: int = 2048
    question_tokens: int = 1024
    output_tokens: int = 256
    think_s: float = 10.0
    block_tokens: int = TRACE_BLOCK_TOKENS

    def draw(self, seed: int) -> list[SimRequest]:
        """Return the requests in the order of their arrival. The same seed draws the same."""
        rng = random.Random(seed)
        heads = [f"group {number}".encode() for number in range(self.groups)]
        weights = [1 / (1 + number) for number in range(self.groups)]
        streams = self._streams(rng, heads, weights)
        rows = list(islice(heapq.merge(*streams, key=lambda row: row[0]), self.requests))
        return [self._request(number, *row) for number, row in enumerate(rows)]

    def _streams(
        self, rng: random.Random, heads: Sequence[bytes], weights: Sequence[float]
    ) -> list[Iterator[tuple[float, str, bytes, int, int]]]:
        begin_s, streams = 0.0, []
        # Enough for the wanted number, also if all were of one turn.
        for number in range(self.requests):
            begin_s += rng.expovariate(self.rate / self.turns)
            head = rng.choices(heads, weights)[0]
            streams.append(iter(self._turns(random.Random(rng.random()), begin_s, f"s{number}", head)))
        return streams

    def _turns(
        self, rng: random.Random, at_s: float, session: str, head: bytes
    ) -> list[tuple[float, str, bytes, int, int]]:
        tokens, turns = self.shared_tokens, []
        while True:
            tokens += _around(rng, self.question_tokens)
            output = _around(rng, self.output_tokens)
            turns.append((at_s, session, head, tokens, output))
            tokens += output
            at_s += 0.02 * output + rng.expovariate(1 / self.think_s)
            if rng.random() < 1 / self.turns:
                return turns

    def _request(self, number: int, at_s: float, session: str, head: bytes, tokens: int, output: int) -> SimRequest:
        shared = self.shared_tokens // self.block_tokens
        names = (
            head + index.to_bytes(4, "big") if index < shared else session.encode() + index.to_bytes(4, "big")
            for index in range(tokens // self.block_tokens)
        )
        return SimRequest(
            request_id=f"r{number}",
            arrival_s=at_s,
            prompt_tokens=tokens,
            output_tokens=output,
            keys=tuple(blake2b(name, digest_size=32).digest() for name in names),
            session_id=session,
        )


def _around(rng: random.Random, mean: int) -> int:
    """Draw a length: exponential, at least 1."""
    return max(1, round(rng.expovariate(1 / mean)))


def _key(hash_id: int) -> bytes:
    return blake2b(hash_id.to_bytes(8, "big"), digest_size=32).digest()
