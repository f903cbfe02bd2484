"""What one peer has told of its leases: checks the order of its messages and passes events on. Knows no sockets."""

from __future__ import annotations

from collections.abc import Mapping

from router.dispatches import MAX_SHARED_KEYS, Dispatch, RemoteDispatches
from router.sharing_messages import (
    MAX_ID_BYTES,
    MAX_KEY_BYTES,
    MAX_PEER_LEASES,
    Changes,
    Dispatched,
    Event,
    FirstOutput,
    Snapshot,
)


class OutOfOrderError(Exception):
    """A message is missing or makes no sense: only a new snapshot tells what there is."""


class PeerLeases:
    """One stream of one peer, from its snapshot on. `receivers` are by pool; events of other pools are only counted."""

    def __init__(self, receivers: Mapping[str, RemoteDispatches]) -> None:
        self.peer_id: str | None = None
        self.is_synced = False
        self._receivers = receivers
        self._next = 0
        self._live: dict[tuple[str, int], bool] = {}

    def __len__(self) -> int:
        return len(self._live)

    def take(self, message: Snapshot | Changes) -> None:
        """Raises OutOfOrderError."""
        if message.number != self._next:
            raise OutOfOrderError(f"message {message.number} came instead of {self._next}")
        self._next += 1
        if isinstance(message, Snapshot):
            if self.is_synced or not 0 < len(message.peer_id) <= MAX_ID_BYTES:
                raise OutOfOrderError("a snapshot out of place")
            self.peer_id = message.peer_id
        elif not self.is_synced:
            raise OutOfOrderError("changes without a snapshot")
        for event in message.events:
            self._apply(event)
        if isinstance(message, Snapshot):
            self.is_synced = message.is_last

    def forget(self) -> None:
        """Take back all that was told."""
        pools = {pool for pool, _ in self._live}
        self._live.clear()
        self.is_synced = False
        for pool in pools:
            if (receiver := self._receivers.get(pool)) is not None:
                receiver.forget_peer(self._peer)

    @property
    def _peer(self) -> str:
        assert self.peer_id is not None, "events come after the peer's name"
        return self.peer_id

    def _apply(self, event: Event) -> None:
        if isinstance(event, Dispatched):
            self._dispatched(event.pool, event.dispatch)
            return
        key = (event.pool, event.lease_id)
        answered = self._live.get(key)
        if answered is None:
            raise OutOfOrderError("an event of a lease that was never taken")
        receiver = self._receivers.get(event.pool)
        if isinstance(event, FirstOutput):
            if answered:
                raise OutOfOrderError("a second first output")
            self._live[key] = True
            if receiver is not None:
                receiver.peer_first_output(self._peer, event.lease_id)
        else:
            del self._live[key]
            if receiver is not None:
                receiver.peer_released(self._peer, event.lease_id)

    def _dispatched(self, pool: str, dispatch: Dispatch) -> None:
        key = (pool, dispatch.lease_id)
        if key in self._live or len(self._live) >= MAX_PEER_LEASES or not _is_sound(pool, dispatch):
            raise OutOfOrderError("a dispatch that cannot be")
        self._live[key] = False
        if (receiver := self._receivers.get(pool)) is not None:
            receiver.peer_dispatched(self._peer, dispatch)


def _is_sound(pool: str, dispatch: Dispatch) -> bool:
    return (
        len(pool) <= MAX_ID_BYTES
        and len(dispatch.target_id) <= MAX_ID_BYTES
        and 0 < dispatch.lease_id < 2**63
        and 0 <= dispatch.uncached_tokens <= dispatch.prompt_tokens < 2**40
        and len(dispatch.new_keys) <= MAX_SHARED_KEYS
        and all(len(key) <= MAX_KEY_BYTES for key in dispatch.new_keys)
    )
