"""The reader's state machine against a real log, over a link that loses, repeats, and sees the publisher begin anew."""

from __future__ import annotations

import random

import hypothesis.strategies as st
import msgspec
from hypothesis import given

from kvstore.events.codec import decode_batch
from kvstore.events.log import EventLog, Frames
from kvstore.events.media import tier_of
from kvstore.events.messages import DIGEST, DUMP, END_NUMBER, DumpPart
from kvstore.events.stream import EventStream
from tests.support.event_world import CacheOfKeys, KeysView, numbered_key, removed, stored


class Link:
    """A log and a stream without sockets between them. What is asked for is answered when `answer` is called."""

    def __init__(self, seed: int, replay_batches: int = 8) -> None:
        self.rng = random.Random(seed)
        self.cache = CacheOfKeys(self.rng, most=20)
        self.log = EventLog(replay_batches=replay_batches)
        self.view = KeysView()
        self.stream = EventStream(self.view)
        self.log.begin({})

    def deliver(self, frames: Frames) -> None:
        self.stream.offer(int.from_bytes(frames[1], "big"), decode_batch(frames[2]))

    def ask(self, question: bytes) -> list[tuple[int, bytes]]:
        answer = self.log.answer(question)
        assert answer is not None
        *messages, end = answer
        assert end[1] == END_NUMBER
        return [(int.from_bytes(number, "big"), payload) for _, number, payload in messages]

    def answer(self) -> None:
        while self.stream.need is not None:
            if self.stream.need == "replay":
                for number, payload in self.ask(self.stream.next_number.to_bytes(8, "big")):
                    self.stream.replay(number, decode_batch(payload))
                self.stream.end_replay()
                continue
            self.view.clear()
            messages = self.ask(DUMP)
            for _, payload in messages:
                part = msgspec.msgpack.decode(payload, type=DumpPart)
                keys = [part.keys[at : at + 32] for at in range(0, len(part.keys), 32)]
                tier = tier_of(part.medium)
                assert tier is not None
                self.view.apply([stored(keys, tier)])
            self.stream.end_dump(part.epoch, messages[0][0])


@given(seed=st.integers(0, 2**32), loss=st.sampled_from([0.0, 0.01, 0.3, 0.9]), replay=st.sampled_from([1, 8, 1000]))
def test_whatever_is_lost_the_view_is_right_once_the_publisher_is_heard(seed: int, loss: float, replay: int) -> None:
    link = Link(seed, replay)
    link.answer()
    for _ in range(60):
        fate = link.rng.random()
        if fate < 0.03:
            frames = link.log.begin(link.cache.content())  # events were dropped before they were numbered
        elif fate < 0.05:
            link.cache, link.log = CacheOfKeys(link.rng, most=20), EventLog(replay_batches=replay)
            frames = link.log.begin({})  # another process
        else:
            frames = link.log.add(link.cache.step())
        if link.rng.random() >= loss:
            link.deliver(frames)
            if link.rng.random() < 0.1:
                link.deliver(frames)
        if link.rng.random() < 0.5:
            link.answer()
    link.answer()
    link.deliver(link.log.beat())
    link.answer()
    assert link.view.shows(link.cache)
    assert link.stream.counters["digest_mismatches"] == 0


def test_a_wrong_view_is_found_by_its_digest_and_made_right() -> None:
    link = Link(1)
    link.answer()
    link.deliver(link.log.add([stored([numbered_key(1), numbered_key(2)])]))
    link.view.apply([removed([numbered_key(2)])])
    ((number, payload),) = link.ask(DIGEST)
    link.stream.check(number, decode_batch(payload))
    assert link.stream.counters["digest_mismatches"] == 1
    assert link.stream.need == "dump"
    link.answer()
    assert link.view.keys.by_tier == {"device": {numbered_key(1), numbered_key(2)}}


def test_a_digest_of_another_moment_means_nothing() -> None:
    link = Link(1)
    link.answer()
    lost = link.log.add([stored([numbered_key(1)])])
    ((number, payload),) = link.ask(DIGEST)
    link.stream.check(number, decode_batch(payload))
    assert link.stream.need is None
    link.deliver(lost)
    link.stream.check(number, decode_batch(payload))
    assert link.stream.need is None


def test_a_publisher_without_epochs_that_begins_again_is_not_taken_for_old_news() -> None:
    view = KeysView()
    stream = EventStream(view)
    stream.begin_anywhere()
    for number in range(5):
        stream.offer(number, decode_batch(msgspec.msgpack.encode([10.0 + number, [stored([numbered_key(number)])]])))
    assert len(view.keys) == 5
    old = decode_batch(msgspec.msgpack.encode([11.0, [stored([numbered_key(1)])]]))
    stream.offer(1, old)
    assert stream.need is None
    new = decode_batch(msgspec.msgpack.encode([20.0, [stored([numbered_key(9)])]]))
    stream.offer(1, new)
    assert stream.need == "dump"
    assert len(view.keys) == 0
