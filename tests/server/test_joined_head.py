"""In which pieces an answer is handed to the system."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from server.joined_head import JoinedHead

HEAD = b"HTTP/1.1 200 OK\r\n\r\n"


class Notes(asyncio.Transport):
    """Notes what it is told, each call an entry."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[bytes] = []
        self.closed = False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        assert not self.closed, "nothing is written behind the end"
        self.calls.append(bytes(data))

    def writelines(self, list_of_data: Iterable[bytes | bytearray | memoryview]) -> None:
        self.write(b"".join(list_of_data))

    def close(self) -> None:
        self.closed = True

    def is_closing(self) -> bool:
        return self.closed


async def test_a_head_goes_out_with_what_is_written_behind_it() -> None:
    notes = Notes()
    answer = JoinedHead(notes, asyncio.get_running_loop())
    for part in (HEAD, b"first", b"second"):
        answer.write(part)
    assert notes.calls == [HEAD + b"first", b"second"]
    await asyncio.sleep(0)
    assert len(notes.calls) == 2


async def test_a_head_that_nothing_follows_waits_for_one_turn_of_the_loop() -> None:
    notes = Notes()
    answer = JoinedHead(notes, asyncio.get_running_loop())
    answer.write(HEAD)
    assert notes.calls == []
    await asyncio.sleep(0)
    assert notes.calls == [HEAD]
    answer.write(b"first")
    assert notes.calls == [HEAD, b"first"]


async def test_two_heads_keep_their_order() -> None:
    """The first one is that of 100 Continue."""
    notes = Notes()
    answer = JoinedHead(notes, asyncio.get_running_loop())
    go_on = b"HTTP/1.1 100 Continue\r\n\r\n"
    for part in (go_on, HEAD, b"first"):
        answer.write(part)
    assert b"".join(notes.calls) == go_on + HEAD + b"first"


async def test_an_answer_that_is_closed_has_its_head_and_one_that_is_cut_has_nothing() -> None:
    notes, cut = Notes(), Notes()
    answer, lost = (JoinedHead(one, asyncio.get_running_loop()) for one in (notes, cut))
    answer.write(HEAD)
    lost.write(HEAD)
    answer.close()
    cut.close()
    assert answer.is_closing()
    assert lost.is_closing()
    await asyncio.sleep(0)
    assert (notes.calls, cut.calls) == ([HEAD], [])
