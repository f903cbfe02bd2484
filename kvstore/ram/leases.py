"""Claims on memory of the RAM tier: a slot that is being filled, and an object that is being read."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import TracebackType

from kvstore.object_key import ObjectKey


class Lease:
    """`view` is the object's bytes, read-only. They are not reused until `release`, whatever happens to the object.

    `offset` is their place in the arena, for processes that map it, and `address` the one in this process. Released
    exactly once, best as a context manager. `holder` says in logs who forgot to.
    """

    def __init__(
        self,
        key: ObjectKey,
        view: memoryview,
        offset: int,
        address: int,
        holder: str,
        release: Callable[[Lease], None],
    ) -> None:
        self.key, self.view, self.offset, self.address, self.holder = key, view.toreadonly(), offset, address, holder
        self.taken_s = time.monotonic()
        self._release = release

    def release(self) -> None:
        self._release(self)

    def __enter__(self) -> Lease:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


class Slot:
    """Memory for an object that nobody can find yet: fill `view`, which lies at `address`, then either `publish` or
    `abandon` it, once. `offset` is its place in the arena."""

    def __init__(
        self,
        key: ObjectKey,
        view: memoryview,
        offset: int,
        address: int,
        publish: Callable[[Slot, str | None], Lease | None],
        abandon: Callable[[Slot], None],
    ) -> None:
        self.key, self.view, self.offset, self.address = key, view, offset, address
        self._publish, self._abandon = publish, abandon

    def publish(self, holder: str | None = None) -> Lease | None:
        """Make the object findable; with a `holder` return a lease on it. An object of the key that is there already
        stays, and the lease is on that one: both have the same bytes."""
        return self._publish(self, holder)

    def abandon(self) -> None:
        """Give the memory back."""
        self._abandon(self)
