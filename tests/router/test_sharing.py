"""Gateways that tell each other their leases, over real sockets and from real processes."""

from __future__ import annotations

import asyncio
import random
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest
import zmq

from router.decision import Decision, Option
from router.dispatcher import Dispatcher
from router.dispatches import MAX_SHARED_KEYS
from router.index import PrefixIndex
from router.own_leases import OwnLeases
from router.peer_leases import OutOfOrderError, PeerLeases
from router.policies.simple import LeastTokens
from router.sharing import DispatchSharing, PeerAddress
from router.sharing_messages import (
    MAX_EVENTS,
    SHARING_VERSION,
    Ask,
    Changes,
    Dispatched,
    Follow,
    Released,
    Snapshot,
    TellerMessage,
    Told,
)
from router.values import Candidate, Query, Score
from tests.support.remote_leases import RemoteLeases, Teller, dispatch
from tests.support.until import until

LISTEN = "tcp://127.0.0.1:*"


@asynccontextmanager
async def gateways(count: int) -> AsyncIterator[list[tuple[DispatchSharing, RemoteLeases]]]:
    """Processes in one: each with a receiver for the pool "tiny", all following all."""
    opened = []
    for _ in range(count):
        sharing, leases = DispatchSharing(LISTEN), RemoteLeases()
        sharing.attach("tiny", leases)
        sharing.open()
        opened.append((sharing, leases))
    everybody = [PeerAddress(sharing.address) for sharing, _ in opened]
    for sharing, _ in opened:
        sharing.set_peers(everybody)
    for sharing, _ in opened:
        await asyncio.wait_for(sharing.wait_synced(), 30)
    try:
        yield opened
    finally:
        for sharing, _ in opened:
            sharing.close()


async def test_everybody_learns_of_every_lease() -> None:
    async with gateways(3) as ((a, seen_by_a), (b, seen_by_b), (_, seen_by_c)):
        mine, other = a.observer("tiny"), a.observer("unknown to the others")
        keys = tuple(bytes([i]) * 32 for i in range(20))
        mine.dispatched(dispatch(1, keys=keys))
        other.dispatched(dispatch(1))
        b.observer("tiny").dispatched(dispatch(1, tokens=7))
        await until(lambda: seen_by_b.tokens == 100 and seen_by_c.tokens == 107, "dispatches arrive")
        assert seen_by_b.live == {(a.peer_id, 1): dispatch(1, keys=keys)}
        assert seen_by_a.live == {(b.peer_id, 1): dispatch(1, tokens=7)}
        mine.first_output(1)
        await until(lambda: seen_by_b.answered == {(a.peer_id, 1)}, "the first output arrives")
        mine.released(1)
        await until(lambda: not seen_by_b.live and seen_by_c.tokens == 7, "the release arrives")
        assert not seen_by_b.answered


def decision(number: int = 0, *, passed_over: int = 0) -> Decision:
    return Decision(
        request_id=f"cmpl-{number}",
        policy="prefix",
        target_id=f"w{number}/0",
        at_s=float(number),
        prompt_tokens=10,
        predicted_tokens=0,
        num_candidates=1,
        options=(Option(candidate=Candidate(target_id="w/0"), score=Score(target_id="w/0", cost=1.0)),),
        passed_over={f"worker-{one}/0": "draining" for one in range(passed_over)},
    )


@pytest.fixture
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.sharing.EXPLAIN_S", 30.0)


@pytest.mark.usefixtures("patience")
async def test_who_routed_a_request_tells_why_whoever_is_asked() -> None:
    async with gateways(3) as ((a, _), (b, _), (c, _)):
        known = {"cmpl-0": [decision()], "cmpl-1": [decision(number) for number in range(3)]}
        a.find_decisions = lambda request_id: known.get(request_id, ())
        b.find_decisions = lambda request_id: ()
        for asking in (b, c):
            assert await asking.explain("cmpl-0") == (known["cmpl-0"], 0)
            assert await asking.explain("cmpl-1") == (known["cmpl-1"], 0)
            assert await asking.explain("cmpl-2") == ([], 0)
            assert await asking.explain("x" * 10_000) == ([], 0)
        assert await a.explain("cmpl-0") == ([], 0), "one asks the others"
        both = await asyncio.gather(*(b.explain(f"cmpl-{number % 3}") for number in range(30)))
        assert [len(decisions) for decisions, _ in both] == [1, 3, 0] * 10


@pytest.mark.usefixtures("patience")
async def test_what_has_no_room_in_one_message_is_told_in_several() -> None:
    async with gateways(2) as ((a, _), (b, _)):
        many = [decision(number, passed_over=200) for number in range(100)]
        a.find_decisions = lambda request_id: many
        assert await b.explain("cmpl") == (many, 0)
        huge = [decision(0), decision(1, passed_over=20_000), decision(2)]
        a.find_decisions = lambda request_id: huge
        assert await b.explain("cmpl") == ([huge[0], decision(1), huge[2]], 0)


@pytest.mark.usefixtures("patience")
async def test_who_does_not_answer_is_counted_and_keeps_nobody_from_knowing(monkeypatch: pytest.MonkeyPatch) -> None:
    async with gateways(2) as ((a, _), (b, _)):
        stopped = Teller(1)
        try:
            itself = PeerAddress(b.address.replace("127.0.0.1", "localhost"))
            b.set_peers([PeerAddress(a.address), stopped.address, itself])
            await asyncio.wait_for(b.wait_synced(), 30)
            await until(lambda: len(b.peers) == 2, "both are followed")
            stopped.process.send_signal(signal.SIGSTOP)
            a.find_decisions = lambda request_id: [decision()] if request_id == "cmpl-0" else []
            assert await b.explain("cmpl-0") == ([decision()], 0)
            monkeypatch.setattr("router.sharing.EXPLAIN_S", 0.05)
            assert (await b.explain("cmpl-2"))[1] >= 1
            stopped.kill()
            await until(lambda: list(b.peers) == [a.peer_id], "it is given up")
            monkeypatch.setattr("router.sharing.EXPLAIN_S", 30.0)
            assert await b.explain("cmpl-2") == ([], 1), "nobody knows what it had"
            b.set_peers([PeerAddress(a.address)])
            assert await b.explain("cmpl-2") == ([], 0)
        finally:
            stopped.kill()


async def test_who_does_not_follow_is_told_nothing() -> None:
    async with gateways(1) as ((a, _),):
        a.find_decisions = lambda request_id: [decision()]
        context: zmq.Context[Any] = zmq.Context.instance()
        with context.socket(zmq.DEALER) as stranger:
            stranger.set(zmq.LINGER, 0)
            stranger.connect(a.address)
            stranger.send(msgspec.msgpack.encode(Ask(1, "cmpl-0", 0)))
            stranger.send(msgspec.msgpack.encode(Follow(SHARING_VERSION, 1)))
            for skip in (0, -5, 5):
                stranger.send(msgspec.msgpack.encode(Ask(2, "cmpl-0", skip)))
            told: list[Told] = []

            def read_all() -> bool:
                while stranger.poll(0):
                    message = msgspec.msgpack.decode(stranger.recv(), type=TellerMessage)
                    if isinstance(message, Told):
                        told.append(message)
                return len(told) == 3

            await until(read_all, "a follower is answered")
            assert told == [Told(2, [decision()], 0), Told(2, [decision()], 0), Told(2, [], 0)]


async def test_who_joins_learns_of_what_is_under_way_before_it_is_synced() -> None:
    async with gateways(1) as ((old, _),):
        observer = old.observer("tiny")
        count = 2 * MAX_EVENTS + 5
        for lease_id in range(1, count + 1):
            observer.dispatched(dispatch(lease_id, keys=(b"k" * 32,)))
            if lease_id % 2:
                observer.first_output(lease_id)
        for lease_id in range(1, 11):
            observer.released(lease_id)
        joiner, seen = DispatchSharing(LISTEN), RemoteLeases()
        joiner.attach("tiny", seen)
        joiner.open()
        joiner.set_peers([PeerAddress(old.address)])
        await asyncio.wait_for(joiner.wait_synced(), 30)
        assert joiner.peers == {old.peer_id: count - 10}
        assert len(seen.live) == count - 10
        assert len(seen.answered) == (count - 10 + 1) // 2
        assert not seen.keys, "what was dispatched long ago is in the index by now"
        observer.released(11)
        await until(lambda: len(seen.live) == count - 11, "the stream goes on behind the snapshot")
        joiner.close()


async def test_a_peer_that_is_not_there_delays_nobody_for_long() -> None:
    sharing = DispatchSharing(LISTEN)
    sharing.open()
    sharing.set_peers([PeerAddress("tcp://127.0.0.1:1")])
    await asyncio.wait_for(sharing.wait_synced(), 30)
    assert sharing.peers == {}
    sharing.close()


async def test_the_leases_of_a_killed_peer_vanish_and_those_of_a_stopped_one_come_again() -> None:
    sharing, seen = DispatchSharing(LISTEN), RemoteLeases()
    sharing.attach("tiny", seen)
    sharing.open()
    killed, stopped = Teller(3), Teller(4)
    try:
        sharing.set_peers([killed.address, stopped.address])
        await until(lambda: len(seen.live) == 7, "both are followed")
        killed.kill()
        stopped.process.send_signal(signal.SIGSTOP)
        await until(lambda: not seen.live, "both are forgotten")
        stopped.process.send_signal(signal.SIGCONT)
        await until(lambda: len(seen.live) == 4, "the one that woke up is followed again")
        stopped.release_one()
        await until(lambda: len(seen.live) == 3, "it goes on")
        sharing.set_peers([])
        assert not seen.live, "who is no longer listed is forgotten at once"
    finally:
        killed.kill()
        stopped.kill()
        sharing.close()


async def test_a_storm_of_leases_ends_with_none() -> None:
    rng = random.Random(1)
    async with gateways(3) as opened:
        under_way: list[set[int]] = [set(), set(), set()]
        for number in range(1, 3001):
            index = rng.randrange(3)
            observer = opened[index][0].observer("tiny")
            observer.dispatched(dispatch(number))
            under_way[index].add(number)
            if rng.random() < 0.5:
                observer.first_output(number)
            while len(under_way[index]) > 50:
                observer.released(under_way[index].pop())
            if number % 50 == 0:
                await asyncio.sleep(0)
        total = sum(map(len, under_way))
        for index, (_, seen) in enumerate(opened):
            wanted = total - len(under_way[index])
            await until(lambda seen=seen, wanted=wanted: len(seen.live) == wanted, "all is told")  # type: ignore[misc]
        for index, (sharing, _) in enumerate(opened):
            for lease_id in under_way[index]:
                sharing.observer("tiny").released(lease_id)
        await until(lambda: not any(seen.live for _, seen in opened), "all is released")
        assert not any(sharing.counters["resyncs"] for sharing, _ in opened)


async def test_one_peer_under_two_addresses_counts_once() -> None:
    async with gateways(2) as ((a, _), (b, seen_by_b)):
        a.observer("tiny").dispatched(dispatch(1))
        twice = [PeerAddress(a.address), PeerAddress(a.address.replace("127.0.0.1", "localhost"))]
        b.set_peers([*twice, PeerAddress(b.address.replace("127.0.0.1", "localhost"))])
        await asyncio.wait_for(b.wait_synced(), 30)
        await until(lambda: len(seen_by_b.live) == 1, "it is followed")
        assert seen_by_b.total == 1


async def test_a_pool_that_comes_later_learns_of_everything() -> None:
    async with gateways(2) as ((a, _), (b, _)):
        a.observer("late").dispatched(dispatch(5))
        late = RemoteLeases()
        b.attach("late", late)
        await until(lambda: len(late.live) == 1, "the lease is told again")


async def test_hostile_frames_are_counted_and_harm_nobody() -> None:
    async with gateways(2) as ((a, _), (_, seen_by_b)):
        context: zmq.Context[Any] = zmq.Context.instance()
        rng = random.Random(2)
        with context.socket(zmq.DEALER) as stranger:
            stranger.set(zmq.LINGER, 0)
            stranger.connect(a.address)
            good = msgspec.msgpack.encode(Follow(SHARING_VERSION, 1))
            for _ in range(200):
                stranger.send(rng.randbytes(rng.randint(0, 60)))
            stranger.send(b"\x91" * 1000)
            stranger.send_multipart([good, good])
            await until(lambda: a.counters["malformed_frames"] >= 200, "they are counted")
            a.observer("tiny").dispatched(dispatch(1))
            await until(lambda: len(seen_by_b.live) == 1, "all goes on")
        with context.socket(zmq.DEALER) as old:
            old.set(zmq.LINGER, 0)
            old.connect(a.address)
            old.send(msgspec.msgpack.encode(Follow(SHARING_VERSION + 1, 1)))
            await until(lambda: bool(old.poll(0)), "it is told which version is spoken here")


async def test_a_peer_without_a_possible_address_delays_nobody() -> None:
    async with gateways(2) as ((a, _), (b, seen_by_b)):
        a.observer("tiny").dispatched(dispatch(1))
        b.set_peers([PeerAddress("tcp://127.0.0.1:99999"), PeerAddress("nonsense"), PeerAddress(a.address)])
        await b.wait_synced()
        await until(lambda: len(seen_by_b.live) == 1, "it learns of the others")


async def test_a_peer_that_talks_nonsense_is_followed_anew() -> None:
    context: zmq.Context[Any] = zmq.Context.instance()
    sharing, seen = DispatchSharing(LISTEN), RemoteLeases()
    sharing.attach("tiny", seen)
    sharing.open()
    with context.socket(zmq.ROUTER) as liar:
        liar.set(zmq.LINGER, 0)
        liar.bind(LISTEN)
        sharing.set_peers([PeerAddress(liar.get_string(zmq.LAST_ENDPOINT))])
        for gap in (2, 1):  # a lost message, and none
            await until(lambda: bool(liar.poll(0)), "it is asked")
            identity, frame = liar.recv_multipart()
            stream = msgspec.msgpack.decode(frame, type=Follow).stream
            liar.send_multipart([identity, b"\xc1"])
            for message in (
                Snapshot(stream, 0, "liar", [Dispatched("tiny", dispatch(1))], True),
                Changes(stream, gap, [Dispatched("tiny", dispatch(2))]),
            ):
                liar.send_multipart([identity, msgspec.msgpack.encode(message)])
            await until(lambda gap=gap: len(seen.live) == (2 if gap == 1 else 0) and seen.total > 0, "it is taken")  # type: ignore[misc]
    assert sharing.counters["resyncs"] == 1
    assert sharing.counters["malformed_frames"] == 2
    sharing.close()


@pytest.mark.parametrize(
    "messages",
    [
        [Changes(1, 0, [])],
        [Snapshot(1, 1, "p", [], True)],
        [Snapshot(1, 0, "", [], True)],
        [Snapshot(1, 0, "p", [], True), Snapshot(1, 1, "p", [], True)],
        [Snapshot(1, 0, "p", [Released("tiny", 1)], True)],
        [Snapshot(1, 0, "p", [Dispatched("tiny", dispatch(1)), Dispatched("tiny", dispatch(1))], True)],
        [Snapshot(1, 0, "p", [Dispatched("tiny", dispatch(-1))], True)],
        [Snapshot(1, 0, "p", [Dispatched("t" * 1000, dispatch(1))], True)],
        [Snapshot(1, 0, "p", [Dispatched("tiny", dispatch(1, keys=(b"k" * 100,)))], True)],
        [Snapshot(1, 0, "p", [Dispatched("tiny", dispatch(1, tokens=-2))], True)],
    ],
)
def test_what_cannot_be_is_noticed(messages: list[Snapshot | Changes]) -> None:
    leases = PeerLeases({"tiny": RemoteLeases()})
    *before, last = messages
    for message in before:
        leases.take(message)
    with pytest.raises(OutOfOrderError):
        leases.take(last)


async def test_an_address_that_is_taken_is_told_and_keeps_no_process_from_ending() -> None:
    first = DispatchSharing("tcp://127.0.0.1:0")
    first.open()
    context: zmq.Context[Any] = zmq.Context()
    second = DispatchSharing(first.address, context=context)
    with pytest.raises(zmq.ZMQError):
        second.open()
    second.close()
    first.close()
    await asyncio.wait_for(asyncio.to_thread(context.term), 60)


def test_own_changes_are_bounded_by_telling_them_in_time() -> None:
    told = []
    leases = OwnLeases(lambda is_full: told.append(len(leases.take_changes())) if is_full else None)
    observer = leases.observer("tiny")
    keys = tuple(b"k" * 32 for _ in range(MAX_SHARED_KEYS * 2))
    for lease_id in range(1, 200):
        observer.dispatched(dispatch(lease_id, keys=keys))
    for lease_id in range(200, 10_000):
        observer.dispatched(dispatch(lease_id))
    assert max(told) <= MAX_EVENTS
    assert told[0] < 64, "keys count as well"
    for lease_id in range(1, 10_001):  # one too many: ignored
        observer.released(lease_id)
    assert len(leases) == 0


def idle_dispatcher() -> Dispatcher:
    dispatcher = Dispatcher(LeastTokens(), PrefixIndex(1_000, time.monotonic), time.monotonic, random.Random(0))
    for number in range(2):
        dispatcher.add_target(f"w{number}/0")
    return dispatcher


async def test_two_gateways_balance_as_one() -> None:
    """Each sends to where the other has not: as many leases on either target, and none when all is released."""
    dispatchers = [idle_dispatcher(), idle_dispatcher()]
    sharings = [DispatchSharing(LISTEN), DispatchSharing(LISTEN)]
    for dispatcher, sharing in zip(dispatchers, sharings, strict=True):
        dispatcher.observer = sharing.observer("tiny")
        sharing.attach("tiny", dispatcher)
        sharing.open()
    for sharing in sharings:
        sharing.set_peers(PeerAddress(one.address) for one in sharings)
        await asyncio.wait_for(sharing.wait_synced(), 30)
    leases = []
    for number in range(10):
        lease = dispatchers[number % 2].choose(Query(request_id=f"r{number}", prompt_tokens=100))
        assert lease is not None
        leases.append(lease)
        total = number + 1
        await until(
            lambda total=total: all(sum(one.in_flight.values()) == total for one in dispatchers),  # type: ignore[misc]
            "both know of all leases",
        )
        counts = dispatchers[0].in_flight
        assert counts == dispatchers[1].in_flight
        assert max(counts.values()) - min(counts.values()) <= 1
    for lease in leases:
        lease.release("ok")
    await until(lambda: not any(any(one.in_flight.values()) for one in dispatchers), "all is released")
    for dispatcher, sharing in zip(dispatchers, sharings, strict=True):
        dispatcher.check_integrity()
        sharing.close()
