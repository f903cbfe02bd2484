"""What peers have probably dispatched and not yet told: in a burst every gateway decides without the others' decisions.

How many that are is measured: how many dispatches of peers arrive that a decision of one's own was made without. Which
targets they went to cannot be known, only agreed: every target is the home of one gateway, by the order of names. A
gateway takes what is untold to be at the others' homes. So it prefers its own by as much as a burst is worth, and by
nearly nothing where requests come one at a time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

WINDOW_S = 0.03
"""A dispatch that is older was told: batches are collected for 20 ms."""

MOST_REQUESTS = 2.0
"""Expected on one target: a peer that joins tells all that it has under way at once, and that is no burst."""

DECAY = 0.995
"""Of what was measured, with each decision: the last few hundred count."""


class Untold:
    """`own_id` is the name by which peers know this process; while it is empty there is nobody who could tell."""

    def __init__(self) -> None:
        self.own_id = ""
        self._peers: set[str] = set()
        self._recent: deque[float] = deque()
        self._decisions = self._tokens = self._missed = 0.0

    def note_own(self, uncached_tokens: int, now_s: float) -> None:
        """This process dispatched a request."""
        self._recent.append(now_s)
        self._forget_old(now_s)
        self._decisions = self._decisions * DECAY + 1
        self._tokens = self._tokens * DECAY + uncached_tokens
        self._missed *= DECAY

    def note_peer(self, peer_id: str, now_s: float) -> None:
        """A peer told of a dispatch: decisions of the last moments were made without it."""
        self._peers.add(peer_id)
        self._forget_old(now_s)
        self._missed += len(self._recent)

    def forget_peer(self, peer_id: str) -> None:
        self._peers.discard(peer_id)

    def expected_tokens(self, target_ids: Sequence[str]) -> list[float] | None:
        """Return the prompt tokens that are probably on their way to each of these targets; None: to none of them."""
        if not self._peers or not self._missed or not self.own_id:
            return None
        gateways = sorted({self.own_id, *self._peers})
        place, order = gateways.index(self.own_id), sorted(range(len(target_ids)), key=target_ids.__getitem__)
        others = [index for rank, index in enumerate(order) if rank % len(gateways) != place]
        if not others:
            return None
        requests = min(MOST_REQUESTS, self._missed / self._decisions / len(others))
        expected = [0.0] * len(target_ids)
        for index in others:
            expected[index] = requests * self._tokens / self._decisions
        return expected

    def _forget_old(self, now_s: float) -> None:
        while self._recent and now_s - self._recent[0] > WINDOW_S:
            self._recent.popleft()
