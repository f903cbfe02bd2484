"""What becomes of an object's bytes on their way into a tier and out of it. Nothing, unless it is encrypted
(kvstore/encryption.py)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from kvstore.block_format import Arrived, check
from kvstore.object_key import ObjectKey


class ObjectCodec(Protocol):
    """Called from all of a tier's threads at once."""

    def seal(self, key: ObjectKey, parts: Sequence[memoryview]) -> Sequence[memoryview]:
        """Return what is kept instead of `parts`, which has the same size and is good until this thread calls again.
        Raises CorruptObjectError for what is no object."""
        ...

    def open(self, data: memoryview, key: ObjectKey, arrived: Arrived | None = None) -> None:
        """Turn what was kept into the object of `key`, in place, every byte of it checked. With `arrived` it may still
        be on its way. Raises CorruptObjectError, and then `data` may hold anything, and what `arrived` raises."""
        ...


class PlainCodec:
    """Keeps objects as they are."""

    def seal(self, key: ObjectKey, parts: Sequence[memoryview]) -> Sequence[memoryview]:
        return parts

    def open(self, data: memoryview, key: ObjectKey, arrived: Arrived | None = None) -> None:
        check(data, key, arrived=arrived)
