"""A process that checks objects in another one's arena, and what the two say to each other.

It is told the layouts once, answers that it is ready, and then answers each message of objects with how many of them
are right before the first that is not. It ends with its socket.
"""

from __future__ import annotations

import socket
import struct
import sys
from collections.abc import Sequence

import msgspec

from kvstore.layout import ObjectLayout
from kvstore.quick_check import QuickCheck
from kvstore.ram.arena import map_arena

OBJECT = struct.Struct("<QH80s")
"""Offset in the arena, number of the layout, and the key as `kvstore.quick_check.key_bytes` has it."""

COUNT = struct.Struct("<I")
READY = b"ready"
MAX_OBJECTS = 512
MAX_LAYOUTS_BYTES = 1 << 20


def main(arena_fd: int, socket_fd: int) -> None:
    with socket.socket(fileno=socket_fd) as link:
        arena = map_arena(arena_fd)
        layouts = msgspec.msgpack.decode(link.recv(MAX_LAYOUTS_BYTES), type=list[ObjectLayout])
        checks = [(layout.object_bytes, QuickCheck(layout)) for layout in layouts]
        link.send(READY)
        while message := link.recv(MAX_OBJECTS * OBJECT.size):
            link.send(COUNT.pack(_leading(arena, checks, message)))


def _leading(arena: memoryview, checks: Sequence[tuple[int, QuickCheck]], message: bytes) -> int:
    good = 0
    for offset, number, key in OBJECT.iter_unpack(message):
        size, check = checks[number]
        if not check.matches(arena[offset : offset + size], key):
            break
        good += 1
    return good


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
