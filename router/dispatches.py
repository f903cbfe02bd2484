"""The seam between one process's leases and those of its peers: what is told of a dispatch, to whom, and by whom.

A gateway's pool (or an API process's) calls a `DispatchObserver` for its own leases; router/sharing.py is one. What
peers dispatched arrives at a `RemoteDispatches`; router/in_flight.py is one. Neither waits, blocks or raises: routing
goes on with what is known when peers are away. Everything is called on one event loop (or in one simulated thread).
"""

from __future__ import annotations

from typing import Protocol

import msgspec

MAX_SHARED_KEYS = 1_024
"""Of one dispatch: 64 Ki tokens in blocks of 64. Of what lies behind a peer learns from the target's own events."""


class Dispatch(msgspec.Struct, frozen=True, array_like=True):
    """One request was sent to one target.

    `lease_id` is unique among all leases that one process takes in one pool; it is positive and below 2**63.
    `uncached_tokens` of `prompt_tokens` have to be computed as far as was predicted. `new_keys` are the keys of the
    prompt's full blocks, in order, that the target will hold because of it and is not known to hold yet.
    """

    lease_id: int
    target_id: str
    prompt_tokens: int
    uncached_tokens: int
    new_keys: tuple[bytes, ...] = ()


class DispatchObserver(Protocol):
    """Told of every lease of this process, in this order: `dispatched`, at most one `first_output`, one `released`."""

    def dispatched(self, dispatch: Dispatch) -> None: ...

    def first_output(self, lease_id: int) -> None:
        """The target has computed the prompt."""
        ...

    def released(self, lease_id: int) -> None: ...


class RemoteDispatches(Protocol):
    """Told of the leases of other processes. `peer_id` names one life of one peer: a restarted one has another.

    Events of one lease come in order and once. Ids that are not known are ignored: their dispatch was lost, or the
    peer was forgotten. Targets that are not known are kept or ignored, as the receiver likes.
    """

    def peer_dispatched(self, peer_id: str, dispatch: Dispatch) -> None: ...

    def peer_first_output(self, peer_id: str, lease_id: int) -> None: ...

    def peer_released(self, peer_id: str, lease_id: int) -> None: ...

    def forget_peer(self, peer_id: str) -> None:
        """The peer is gone or is about to tell all of its leases anew: drop those that it told."""
        ...
