"""What a host keeps of each client: its credits, the requests it has running, and outputs that wait for credit.

Knows no sockets. Memory per peer is bounded by the outputs of its live requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from engine.protocol import GenerateRequest, TokenOutput
from engine.wire.merge import merge_outputs

MERGE_AT_OUTPUTS = 32
"""An output of one token is ten times as large as the token: what waits long is kept in one piece."""


@dataclass(slots=True)
class Peer:
    """One connection of one client. `identity` is ZeroMQ's name of it, never used twice."""

    identity: bytes
    number: int
    credit: int
    load_credit: int = 0
    submits: int = 0
    asset_bytes: int = 0
    running: dict[str, Route] = field(default_factory=dict)
    pending: dict[Route, list[TokenOutput]] = field(default_factory=dict)

    def hold(self, route: Route, output: TokenOutput) -> None:
        held = self.pending.setdefault(route, [])
        held.append(output)
        if len(held) >= MERGE_AT_OUTPUTS:
            held[:] = [merge_outputs(held)]

    def take_pending(self) -> list[TokenOutput]:
        """Return what waits, one output per request, and forget it."""
        batch = [merge_outputs(outputs) for outputs in self.pending.values()]
        self.pending.clear()
        return batch


@dataclass(slots=True, eq=False)
class Route:
    """One running request: `key` is its name inside the engine, `request_id` its name at the peer."""

    key: str
    peer: Peer
    request_id: str
    attempt: int
    next_offset: int


class Routes:
    """From the engine's request names to the peers and back. Two peers may use the same id, and one may use it again.

    A route ends with its terminal output or with its abort; whatever the engine still says of it then has no route.
    """

    def __init__(self) -> None:
        self._by_key: dict[str, Route] = {}
        self._opened = 0

    def __len__(self) -> int:
        return len(self._by_key)

    def open(self, peer: Peer, request: GenerateRequest) -> tuple[Route, GenerateRequest]:
        """Return the route and the request as the engine is to see it."""
        self._opened += 1
        key = f"{request.request_id}#{self._opened}"
        route = Route(key, peer, request.request_id, request.attempt, len(request.resume_ids))
        self._by_key[key] = route
        peer.running[request.request_id] = route
        group = None if request.group_id is None else f"{request.group_id}#peer{peer.number}"
        return route, msgspec.structs.replace(request, request_id=key, group_id=group)

    def close(self, route: Route) -> None:
        self._by_key.pop(route.key, None)
        if route.peer.running.get(route.request_id) is route:
            del route.peer.running[route.request_id]

    def translate(self, outputs: Sequence[TokenOutput]) -> list[tuple[Route, TokenOutput]]:
        """Return the outputs under their peers' names, without those that nobody waits for; close what has ended."""
        replace, routed = msgspec.structs.replace, []
        for output in outputs:
            route = self._by_key.get(output.request_id)
            if route is None:
                continue
            route.next_offset = output.offset + len(output.token_ids)
            routed.append((route, replace(output, request_id=route.request_id)))
            if output.finish_reason is not None:
                self.close(route)
        return routed
