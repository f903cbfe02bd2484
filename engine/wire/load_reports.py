"""When which peer is told of the engine's load. Knows neither sockets nor what a load is.

A change is reported at once, or LOAD_REPORT_MIN_S after the last report; when nothing changes a report still goes out
every LOAD_REPORT_MAX_S. A peer whose credit is used up misses reports, and gets the newest when it grants more.
"""

from __future__ import annotations

import math

from engine.wire.messages import LOAD_REPORT_MAX_S, LOAD_REPORT_MIN_S
from engine.wire.peers import Peer


class LoadReports:
    """Times are seconds of one monotonic clock."""

    def __init__(self) -> None:
        self._watchers: dict[bytes, Peer] = {}
        self._missed: set[bytes] = set()
        self._last_s = -math.inf
        self._changed = False

    def watch(self, peer: Peer) -> None:
        """The peer has granted credit, maybe for the first time."""
        if peer.identity not in self._watchers or peer.identity in self._missed:
            self._changed = True
        self._watchers[peer.identity] = peer
        self._missed.discard(peer.identity)

    def forget(self, peer: Peer) -> None:
        self._watchers.pop(peer.identity, None)
        self._missed.discard(peer.identity)

    def note_change(self) -> None:
        """Something has happened in the engine."""
        self._changed = True

    def due_in_s(self, now_s: float) -> float:
        """Return how long nobody has to be told anything; infinite when nobody can be told."""
        if not any(peer.load_credit > 0 for peer in self._watchers.values()):
            return math.inf
        pause_s = LOAD_REPORT_MIN_S if self._changed else LOAD_REPORT_MAX_S
        return max(0.0, self._last_s + pause_s - now_s)

    def take_due(self, now_s: float) -> list[Peer]:
        """Return who is to be told now. The others find out when they grant credit."""
        self._last_s, self._changed = now_s, False
        told = [peer for peer in self._watchers.values() if peer.load_credit > 0]
        self._missed = self._watchers.keys() - {peer.identity for peer in told}
        return told
