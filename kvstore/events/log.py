"""What a publisher has said in its epoch: numbers, the last batches for replay, and the keys that they add up to.

Makes frames and answers; knows no sockets.
"""

from __future__ import annotations

import secrets
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice

from kvstore.events.codec import encode_batch
from kvstore.events.held import HeldKeys
from kvstore.events.media import MEDIUM_OF, Tier
from kvstore.events.messages import (
    DIGEST,
    DUMP,
    DUMP_PART_KEYS,
    END_NUMBER,
    AllBlocksCleared,
    DumpPart,
    Event,
    EventBatch,
)

Content = Mapping[Tier, Iterable[bytes]]
Frames = tuple[bytes, bytes, bytes]
"""Topic, number, payload."""

REPLAY_BATCHES = 10_000
REPLAY_BYTES = 64 * 1024 * 1024


class EventLog:
    """`begin` comes first. The newest batches are kept up to `replay_batches` and `replay_bytes`."""

    def __init__(
        self,
        topic: bytes = b"",
        dp_rank: int | None = None,
        replay_batches: int = REPLAY_BATCHES,
        replay_bytes: int = REPLAY_BYTES,
    ) -> None:
        self.held = HeldKeys()
        self.epoch = 0
        self._topic, self._dp_rank = topic, dp_rank
        self._replay_batches, self._replay_bytes = replay_batches, replay_bytes
        self._kept: deque[Frames] = deque()
        self._kept_bytes = 0
        self._next_number = 0

    def begin(self, content: Content) -> Frames:
        """Begin an epoch in which `content` is held. Its first batch tells readers that know of no epochs to forget."""
        self.epoch = secrets.randbits(62) + 1
        self.held.replace(content)
        self._kept.clear()
        self._kept_bytes = self._next_number = 0
        return self._keep(EventBatch(time.time(), [AllBlocksCleared()], self._dp_rank, self.epoch))

    def add(self, events: Sequence[Event]) -> Frames:
        self.held.apply(events)
        return self._keep(EventBatch(time.time(), list(events), self._dp_rank, self.epoch))

    def beat(self) -> Frames:
        """Return a batch without events: it shows readers what they have missed, and whether they are right."""
        return self._keep(self._digests())

    def answer(self, question: bytes) -> Iterator[Frames] | None:
        """Return the messages of the answer, None when it is no question."""
        if question == DUMP:
            return self._dump()
        if question == DIGEST:
            return iter((self._frames(self._next_number - 1, encode_batch(self._digests())), self._end()))
        if len(question) == 8:
            return self._replay(int.from_bytes(question, "big"))
        return None

    def _digests(self) -> EventBatch:
        return EventBatch(time.time(), [], self._dp_rank, self.epoch, self.held.digests)

    def _keep(self, batch: EventBatch) -> Frames:
        frames = self._frames(self._next_number, encode_batch(batch))
        self._next_number += 1
        self._kept.append(frames)
        self._kept_bytes += len(frames[2])
        while len(self._kept) > self._replay_batches or self._kept_bytes > self._replay_bytes:
            self._kept_bytes -= len(self._kept.popleft()[2])
        return frames

    def _replay(self, first: int) -> Iterator[Frames]:
        skipped = max(0, first - (self._next_number - len(self._kept)))
        yield from islice(self._kept, skipped, None)
        yield self._end()

    def _dump(self) -> Iterator[Frames]:
        pieces: list[tuple[str, list[bytes]]] = []
        for tier, keys in self.held.by_tier.items():
            listed = list(keys)
            starts = range(0, len(listed), DUMP_PART_KEYS)
            pieces += [(MEDIUM_OF[tier], listed[start : start + DUMP_PART_KEYS]) for start in starts]
        pieces = pieces or [(MEDIUM_OF["device"], [])]
        for part, (medium, keys_of_part) in enumerate(pieces):
            payload = DumpPart(self.epoch, part, len(pieces), medium, b"".join(keys_of_part))
            yield self._frames(self._next_number - 1, encode_batch(payload))
        yield self._end()

    def _frames(self, number: int, payload: bytes) -> Frames:
        return self._topic, number.to_bytes(8, "big"), payload

    def _end(self) -> Frames:
        return self._topic, END_NUMBER, b""
