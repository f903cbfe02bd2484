"""Replies as they come: in any pieces, of any kind, and never more than is allowed."""

from __future__ import annotations

import random
import socket
import threading
from collections.abc import Iterator

import pytest

from kvstore.remote.link import (
    BUFFER_BYTES,
    MAX_SKIPPED_BYTES,
    ErrorReplyError,
    Link,
    LinkBrokenError,
    LinkSlowError,
    command,
)
from kvstore.tier import Deadline
from tests.support.tier_contract import soon

Pair = tuple[Link, socket.socket]


@pytest.fixture
def pair() -> Iterator[Pair]:
    near, far = socket.socketpair()
    link = Link(near, stall_s=60)
    yield link, far
    link.close()
    far.close()


def says(far: socket.socket, data: bytes, rng: random.Random) -> threading.Thread:
    """Send in pieces of any size, from another thread."""

    def run() -> None:
        at = 0
        while at < len(data):
            size = rng.choice([1, 2, 3, 100, 5000, 200_000])
            far.sendall(data[at : at + size])
            at += size

    thread = threading.Thread(target=run)
    thread.start()
    return thread


def test_replies_are_read_however_they_are_cut(pair: Pair) -> None:
    link, far = pair
    rng = random.Random(5)
    for _ in range(30):
        sizes = [rng.choice([0, 1, 10, BUFFER_BYTES - 3, BUFFER_BYTES, 300_000]) for _ in range(4)]
        payloads = [rng.randbytes(size) for size in sizes]
        data = b"".join(b"$%d\r\n%b\r\n:%d\r\n+OK\r\n$-1\r\n" % (len(one), one, -len(one)) for one in payloads)
        data += b"*2\r\n*-1\r\n*2\r\n:1\r\n$2\r\nab\r\n"
        thread = says(far, data, rng)
        for payload in payloads:
            size = link.bulk_size(soon())
            assert size == len(payload)
            if rng.random() < 0.3:
                link.skip(size, soon())
            else:
                target = bytearray(size)
                link.read_into(memoryview(target), soon())
                assert target == payload
            assert [link.reply(soon(), 100), link.reply(soon(), 100)] == [-len(payload), b"OK"]
            assert link.bulk_size(soon()) is None
        assert link.reply(soon(), 100) == [None, [1, b"ab"]]
        thread.join()


def test_commands_are_sent_however_many_pieces_they_have(pair: Pair) -> None:
    link, far = pair
    pieces = [memoryview(bytes([number % 251]) * (number % 7)) for number in range(5000)]
    whole = b"".join(pieces) * 3 + bytes(3 << 20)
    received = bytearray()

    def read() -> None:
        while len(received) < len(whole):
            received.extend(far.recv(1 << 20))

    thread = threading.Thread(target=read)
    thread.start()
    link.send([*pieces, *pieces, *pieces, memoryview(bytes(3 << 20))], soon())
    thread.join()
    assert received == whole
    assert command(b"SET", b"", b"x") == b"*3\r\n$3\r\nSET\r\n$0\r\n\r\n$1\r\nx\r\n"


@pytest.mark.parametrize(
    "reply",
    [
        b"$101\r\n",
        b"*101\r\n",
        b"*3\r\n$40\r\n" + bytes(40) + b"\r\n$40\r\n" + bytes(40) + b"\r\n$40\r\n",
        b"*1\r\n" * 5,
        b"*1\r\n-ERR within\r\n",
        b"*100\r\n" + b":1\r\n" * 100,
        b"$3\r\nabcdef",
        b"%1\r\n",
        b"$x\r\n",
        b"$ 3\r\n",
        b":\r\n",
        b":1_000\r\n",
        b"\r\n",
        b"x" * (BUFFER_BYTES + 1),
    ],
)
def test_replies_out_of_bounds_break_the_link(pair: Pair, reply: bytes) -> None:
    link, far = pair
    far.sendall(reply)
    with pytest.raises(LinkBrokenError):
        link.reply(soon(), 100)


def test_errors_leave_the_link_in_order(pair: Pair) -> None:
    link, far = pair
    far.sendall(b"-OOM no \xff room\r\n:1\r\n-WRONGTYPE it is\r\n+PONG\r\n")
    with pytest.raises(ErrorReplyError) as refused:
        link.reply(soon(), 100)
    assert refused.value.code == "OOM"
    assert link.reply(soon(), 100) == 1
    with pytest.raises(ErrorReplyError, match="WRONGTYPE"):
        link.bulk_size(soon())
    assert link.reply(soon(), 100) == b"PONG"


def test_what_is_not_worth_reading_spends_the_link(pair: Pair) -> None:
    link, far = pair
    far.sendall(b"$%d\r\n" % (MAX_SKIPPED_BYTES + 1))
    size = link.bulk_size(soon())
    assert size is not None
    link.skip(size, soon())
    assert link.is_spent


def test_a_deadline_is_for_the_whole(pair: Pair) -> None:
    """A byte now and then does not put it off, and neither does a full buffer at the other end."""
    link, far = pair
    far.sendall(b"$100\r\n" + bytes(50))
    assert link.bulk_size(soon()) == 100
    with pytest.raises(LinkSlowError):
        link.read_into(memoryview(bytearray(100)), Deadline.after(0.05))
    with pytest.raises(LinkSlowError):
        link.send([bytes(64 << 20)], Deadline.after(0.05))
    with pytest.raises(LinkSlowError):
        link.reply(Deadline.after(-1), 100)


def test_a_server_that_stands_still_is_not_waited_for() -> None:
    near, far = socket.socketpair()
    link = Link(near, stall_s=0.02)
    with far, pytest.raises(LinkSlowError):
        link.reply(soon(), 100)
    link.close()


def test_another_thread_can_end_the_waiting(pair: Pair) -> None:
    link, _ = pair
    threading.Timer(0.01, link.abort).start()
    with pytest.raises(LinkBrokenError):
        link.reply(soon(), 100)
    link.abort()
