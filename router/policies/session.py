"""One conversation, one target: consistent hashing with bounded load.

Targets are ordered by a hash of (session, target), highest first (rendezvous hashing): without a ring, a target that
goes moves only its own sessions, each to another place. A target whose requests under way exceed `bound` times the mean
is passed over until it has fewer (Mirrokni, Thorup, Zadimoghaddam: Consistent Hashing with Bounded Loads, 2018).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from hashlib import blake2b

from router.policies.simple import LeastTokens
from router.values import Candidate, Query, Score


class Session:
    """Requests without a session go where the fewest tokens are queued."""

    name = "session"

    def __init__(self, bound: float = 1.25) -> None:
        self._bound = bound
        self._without_session = LeastTokens()

    def score(self, query: Query, candidates: Sequence[Candidate]) -> list[Score]:
        if query.session_id is None:
            return self._without_session.score(query, candidates)
        session = query.session_id.encode()
        weights = {one.target_id: _weight(session, one.target_id) for one in candidates}
        order = sorted(weights, key=lambda target_id: weights[target_id], reverse=True)
        places = {target_id: place for place, target_id in enumerate(order)}
        # With this request; at least one target is below it, as not all can exceed the mean.
        most = math.ceil(self._bound * (1 + sum(one.in_flight for one in candidates)) / len(candidates))
        return [_score(one, places[one.target_id], most, len(candidates)) for one in candidates]


def _score(candidate: Candidate, place: int, most: int, count: int) -> Score:
    is_over = candidate.in_flight >= most
    return Score(
        target_id=candidate.target_id,
        cost=float(place + count * is_over),
        reasons={"place": float(place), "in_flight": float(candidate.in_flight), "most": float(most)},
    )


def _weight(session: bytes, target_id: str) -> bytes:
    digest = blake2b(session, digest_size=8)
    digest.update(b"\0" + target_id.encode())
    return digest.digest()
