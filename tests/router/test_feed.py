"""Publisher, subscriber and index over real sockets: late readers, lost messages, new publishers, stuck readers."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from time import monotonic

import msgspec
import pytest
import zmq

from kvstore.events import subscriber
from kvstore.events.digest import Digest
from kvstore.events.messages import DUMP_PART_KEYS, END_NUMBER, BlockStored, DumpPart
from kvstore.events.publisher import EventPublisher
from kvstore.events.subscriber import EventSubscriber, Socket
from kvstore.keys import PUBLIC_SCOPE, KeyChain
from router.feed import IndexFeed, TargetView
from router.index import PrefixIndex
from router.values import Hit, Query
from tests.support.event_world import BLOCK_SIZE, CacheOfKeys, numbered_key, removed, stored
from tests.support.lossy_relay import LossyRelay
from tests.support.until import until

ANY = "tcp://127.0.0.1:*"


@pytest.fixture
def context() -> Iterator[zmq.Context[Socket]]:
    with zmq.Context[Socket]() as context:
        yield context


@pytest.fixture
async def feed(context: zmq.Context[Socket]) -> AsyncIterator[IndexFeed]:
    feed = IndexFeed(PrefixIndex(60_000, monotonic), context=context)
    yield feed
    await feed.close()


class Worker:
    """A cache with a publisher."""

    def __init__(self, seed: int = 0, address: str = ANY, replay_address: str = ANY, **settings: int) -> None:
        self.cache = CacheOfKeys(random.Random(seed))
        self.publisher = EventPublisher(address, replay_address, self.cache.content, heartbeat_s=0.05, **settings)

    def step(self, times: int = 1) -> None:
        for _ in range(times):
            self.publisher.publish(self.cache.step())

    def is_in(self, index: PrefixIndex, target_id: str) -> bool:
        truth = {tier: Digest.of(keys) for tier, keys in self.cache.held.items() if keys}
        return (
            index.digest(target_id) == truth
            and claims(index, target_id, self.cache.made) == self.cache.held["device"].keys()
        )


def claims(index: PrefixIndex, target_id: str, made: int) -> set[bytes]:
    """Return the keys that the index claims for the target's device, out of the first that a cache has made."""
    keys = [numbered_key(number) for number in range(made)]
    return {key for key in keys if index.lookup(ask([key])).get(target_id, Hit()).device}


def ask(keys: list[bytes]) -> Query:
    return Query(request_id="r", prompt_tokens=len(keys) * BLOCK_SIZE + 1, keys=keys, block_size=BLOCK_SIZE)


@contextmanager
def worker(seed: int = 0, **settings: object) -> Iterator[Worker]:
    made = Worker(seed, **settings)  # type: ignore[arg-type]
    try:
        yield made
    finally:
        made.publisher.close()


def read_numbers(socket: Socket, up_to: int) -> int:
    """Read until a batch of this number or a later one; return how many there were."""
    count, number = 0, -1
    while number < up_to:
        assert socket.poll(30_000), "there are heartbeats"
        number = int.from_bytes(socket.recv_multipart()[1], "big")
        count += 1
    return count


def digests_agree(worker: Worker, feed: IndexFeed, target_id: str) -> Callable[[], bool]:
    truth = {tier: Digest.of(keys) for tier, keys in worker.cache.held.items() if keys}
    return lambda: feed.is_synced(target_id) and feed.index.digest(target_id) == truth


async def test_a_reader_that_comes_late_knows_what_was_before(feed: IndexFeed) -> None:
    with worker() as early:
        early.step(300)
        feed.open_target("t", early.publisher.address, early.publisher.replay_address)
        early.step(50)
        await until(digests_agree(early, feed, "t"), "the view of a late reader")
        assert early.is_in(feed.index, "t")


async def test_one_percent_of_events_lost_and_no_wrong_claim_survives(
    feed: IndexFeed, context: zmq.Context[Socket]
) -> None:
    with worker(1) as busy, LossyRelay(context, busy.publisher.address, one_in=100) as relay:
        feed.open_target("t", relay.address, busy.publisher.replay_address)
        await until(lambda: feed.is_synced("t") and relay.passed > 0, "the relay passes on")
        while relay.dropped < 20:
            busy.step(20)
            await until(lambda: not busy.publisher.backlog, "they are sent")
        await until(digests_agree(busy, feed, "t"), "the view behind a lossy link")
        assert busy.is_in(feed.index, "t")
        assert feed.counters["gaps"] > 0
        assert feed.counters["replayed"] > 0


async def test_what_the_replay_buffer_has_lost_comes_by_a_dump(feed: IndexFeed, context: zmq.Context[Socket]) -> None:
    with worker(2, replay_batches=1) as busy, LossyRelay(context, busy.publisher.address, one_in=5) as relay:
        feed.open_target("t", relay.address, busy.publisher.replay_address)
        await until(lambda: feed.is_synced("t"), "the first dump")
        while feed.counters["dumps"] < 4:
            busy.step(20)
            await until(digests_agree(busy, feed, "t"), "the view behind a lossy link")
        assert busy.is_in(feed.index, "t")


async def test_a_dump_of_several_parts(feed: IndexFeed) -> None:
    keys = [numbered_key(number) for number in range(2 * DUMP_PART_KEYS + 5)]
    with worker() as large:
        large.cache.held["ram"].update(dict.fromkeys(keys))
        large.publisher.publish([stored(keys, "ram")])
        feed.open_target("t", large.publisher.address, large.publisher.replay_address)
        await until(digests_agree(large, feed, "t"), "a large view")
        assert feed.index.lookup(ask(keys[-3:])) == {"t": Hit(ram=3 * BLOCK_SIZE)}


async def test_another_publisher_at_the_same_address_voids_what_was_known(feed: IndexFeed, tmp_path: Path) -> None:
    address, replay_address = f"ipc://{tmp_path}/events", f"ipc://{tmp_path}/replay"
    with worker(3, address=address, replay_address=replay_address) as first:
        feed.open_target("t", address, replay_address)
        first.step(100)
        await until(digests_agree(first, feed, "t"), "the first publisher's view")
    with worker(4, address=address, replay_address=replay_address) as second:
        second.step(30)
        await until(digests_agree(second, feed, "t"), "the second publisher's view")
        assert second.is_in(feed.index, "t")


async def test_a_reader_that_is_stuck_stops_nobody_and_finds_its_way_back(
    feed: IndexFeed, context: zmq.Context[Socket], tmp_path: Path
) -> None:
    # Over ipc: what the kernel buffers for TCP is more than this test wants to fill.
    addresses = {"address": f"ipc://{tmp_path}/events", "replay_address": f"ipc://{tmp_path}/replay"}
    stuck = context.socket(zmq.SUB)
    asking = context.socket(zmq.DEALER)
    for socket in (stuck, asking):
        socket.set(zmq.RCVHWM, 1)
        socket.set(zmq.LINGER, 0)
    try:
        with worker(5, unread_batches=100, **addresses) as busy:
            stuck.set(zmq.SUBSCRIBE, b"")
            stuck.connect(busy.publisher.address)
            asking.connect(busy.publisher.replay_address)
            await until(lambda: bool(stuck.poll(0)), "the stuck reader is subscribed")
            for _ in range(20):
                asking.send_multipart((b"", b"dump"))
            feed.open_target("t", busy.publisher.address, busy.publisher.replay_address)
            for _ in range(40):
                busy.step(50)
                await until(lambda: not busy.publisher.backlog, "the publisher goes on")
            await until(digests_agree(busy, feed, "t"), "the view of a reader beside it")
            assert busy.publisher.counters["dropped_batches"] == 0
            assert read_numbers(stuck, up_to=2000) < 2000, "it was not stuck for long enough"
    finally:
        stuck.close(0)
        asking.close(0)


async def test_events_that_the_publisher_has_no_room_for_void_all_views(feed: IndexFeed) -> None:
    with worker(6, queue_batches=4) as flooded:
        feed.open_target("t", flooded.publisher.address, flooded.publisher.replay_address)
        await until(lambda: feed.is_synced("t"), "the first dump")
        while not flooded.publisher.counters["dropped_batches"]:
            flooded.step(50)

        def right() -> bool:
            flooded.publisher.publish(())
            return digests_agree(flooded, feed, "t")()

        await until(right, "the view behind a flood")
        assert flooded.is_in(feed.index, "t")
        assert flooded.publisher.counters["epochs"] > 0


async def test_a_view_that_went_wrong_is_found_by_its_digest(feed: IndexFeed) -> None:
    with worker(7) as calm:
        calm.step(50)
        feed.open_target("t", calm.publisher.address, calm.publisher.replay_address)
        await until(digests_agree(calm, feed, "t"), "the view")
        wrong = calm.cache.made
        feed.index.apply("t", stored=[numbered_key(wrong)])
        feed.check_digest("t")
        await until(digests_agree(calm, feed, "t"), "the view after the digest")
        assert feed.counters["digest_mismatches"] == 1
        assert numbered_key(wrong) not in claims(feed.index, "t", wrong + 1)


async def test_a_publisher_that_falls_silent_is_not_believed(context: zmq.Context[Socket]) -> None:
    index = PrefixIndex(1000, monotonic)
    index.add_target("t")
    with worker(8) as mute:
        mute.step(20)
        subscriber = EventSubscriber(
            mute.publisher.address,
            mute.publisher.replay_address,
            TargetView(index, "t"),
            context=context,
            silence_s=1.0,
        )
        subscriber.open()
        await until(lambda: bool(index.digest("t")), "the view")
    try:
        await until(lambda: not index.digest("t"), "the view of a publisher that is gone")
        assert not subscriber.synced
    finally:
        await subscriber.close()


PART = DumpPart(epoch=1, part=0, parts=1, medium="GPU", keys=bytes(32))
NUMBER = (5).to_bytes(8, "big")


@pytest.mark.parametrize(
    "answer",
    [
        [(NUMBER, PART)],  # without an end
        [(NUMBER, msgspec.structs.replace(PART, parts=2**31)), (END_NUMBER, None)],
        [(NUMBER, msgspec.structs.replace(PART, part=7)), (END_NUMBER, None)],
        [(b"\x01" * 100, PART), (END_NUMBER, None)],
        [(NUMBER, PART)] * 10_000,
        [(END_NUMBER, None)],
        [(b"", None)],
    ],
    ids=["endless", "giant", "elsewhere", "number", "flood", "empty", "nothing"],
)
async def test_answers_that_cannot_be_are_refused_and_a_right_one_is_taken(
    context: zmq.Context[Socket], feed: IndexFeed, monkeypatch: pytest.MonkeyPatch, answer: list[tuple[bytes, DumpPart]]
) -> None:
    monkeypatch.setattr(subscriber, "MAX_ANSWER_BYTES", 100_000)
    monkeypatch.setattr(subscriber, "ANSWER_S", 0.2)
    with context.socket(zmq.PUB) as events, context.socket(zmq.ROUTER) as replay:
        for socket in (events, replay):
            socket.set(zmq.LINGER, 0)
            socket.bind(ANY)
        feed.open_target("t", events.get_string(zmq.LAST_ENDPOINT), replay.get_string(zmq.LAST_ENDPOINT))

        async def reply(messages: list[tuple[bytes, DumpPart]]) -> None:
            await until(lambda: bool(replay.poll(0)), "it asks")
            identity = replay.recv_multipart()[0]
            for number, part in messages:
                payload = b"" if part is None else msgspec.msgpack.encode(part)
                replay.send_multipart([identity, b"", b"", number, payload])

        events.send_multipart([b"", b"\xff" * 100, b"noise"])
        await reply(answer)
        assert not feed.is_synced("t")
        for _ in range(50):  # it asks again, maybe before it has given up the first answer
            if feed.is_synced("t"):
                break
            await reply([(NUMBER, PART), (END_NUMBER, None)])  # type: ignore[list-item]
            await until(lambda: feed.is_synced("t") or bool(replay.poll(0)), "it is right, or asks again")
        assert feed.is_synced("t")
        assert feed.index.digest("t") == {"device": Digest.of([bytes(32)])}


async def test_a_foreign_publisher_without_replay_is_known_from_its_next_event_on(
    feed: IndexFeed, context: zmq.Context[Socket]
) -> None:
    tokens = list(range(12))
    keys = KeyChain(PUBLIC_SCOPE, BLOCK_SIZE).extend(tokens)
    event = BlockStored(block_hashes=[1, 2, 3], parent_block_hash=None, token_ids=tokens, block_size=BLOCK_SIZE)
    with context.socket(zmq.XPUB) as publisher:
        port = publisher.bind_to_random_port("tcp://127.0.0.1")
        feed.open_target("t", f"tcp://127.0.0.1:{port}", None, foreign=True)
        await until(lambda: bool(publisher.poll(0)), "it subscribes")
        for number, batch in ((7, [event]), (8, [removed([]), {"type": "Other"}]), (9, [["BlockRemoved", [3]]])):
            payload = msgspec.msgpack.encode([float(number), batch, 0])
            publisher.send_multipart((b"kv@x", number.to_bytes(8, "big"), payload))
        publisher.send(b"nonsense")
        await until(lambda: feed.counters["malformed"] == 1, "everything was read")
        assert feed.index.lookup(ask(keys)) == {"t": Hit(device=2 * BLOCK_SIZE)}
        publisher.send_multipart(
            (b"kv@x", (11).to_bytes(8, "big"), msgspec.msgpack.encode([11.0, [stored([b"x" * 32])]]))
        )
        await until(lambda: not feed.index.lookup(ask(keys)), "a gap without replay takes back all claims")
        publisher.close(0)


async def test_with_keys_only_who_has_the_publishers_key_reads(context: zmq.Context[Socket]) -> None:
    public_key, secret_key = zmq.curve_keypair()
    stranger_key, _ = zmq.curve_keypair()
    own_public, own_secret = zmq.curve_keypair()

    def serve_with_key(socket: Socket) -> None:
        socket.set(zmq.CURVE_SERVER, 1)
        socket.set(zmq.CURVE_SECRETKEY, secret_key)

    def connect_with_key(socket: Socket, server_key: str) -> None:
        socket.set(zmq.CURVE_SERVERKEY, server_key.encode())
        socket.set(zmq.CURVE_PUBLICKEY, own_public)
        socket.set(zmq.CURVE_SECRETKEY, own_secret)

    cache = CacheOfKeys(random.Random(9))
    publisher = EventPublisher(ANY, ANY, cache.content, secure=serve_with_key, heartbeat_s=0.05)
    feed = IndexFeed(PrefixIndex(1000, monotonic), context=context, secure=connect_with_key)
    try:
        publisher.publish(cache.step())
        for target, key in (("stranger", stranger_key), ("friend", public_key)):
            feed.open_target(target, publisher.address, publisher.replay_address, public_key=key.decode())
        await until(lambda: bool(feed.index.digest("friend")), "the one with the right key reads")
        assert not feed.is_synced("stranger")
    finally:
        await feed.close()
        publisher.close()


async def test_what_each_target_did_is_counted_once_also_when_it_is_gone(feed: IndexFeed) -> None:
    with worker() as one, worker() as other:
        for name, source in (("one", one), ("other", other)):
            source.step(20)
            feed.open_target(name, source.publisher.address, source.publisher.replay_address)
        await until(lambda: feed.is_synced("one") and feed.is_synced("other"), "both are read")
        counted = feed.take_counts()
        assert not feed.take_counts()
        for _ in range(2):
            await feed.close_target("one")
            feed.open_target("one", one.publisher.address, one.publisher.replay_address)
            await until(lambda: feed.is_synced("one"), "it is read again")
        await feed.close_target("one")
        again = feed.take_counts()
        assert counted["one", "dumps"] >= 1
        assert counted["other", "dumps"] >= 1
        assert again["one", "dumps"] >= 2
        total: Counter[str] = Counter()
        for (_, kind), count in (counted + again).items():
            total[kind] += count
        assert total == +Counter(feed.counters)
