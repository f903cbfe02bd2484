"""Processes that route tell each other every dispatch, first output and release, over ZeroMQ.

Each binds one socket, at which it tells of its own leases, and follows all its peers. Nobody waits for anybody: a peer
that is away is routed without, and a follower that does not read is dropped and begins anew with a snapshot. There is
no consensus; what two processes dispatch within the same `BATCH_S`, each learns of a little late. Over the same
connections they ask each other why a request went where it went.
"""

from __future__ import annotations

import asyncio
import secrets
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import zmq

from router.decision import Decision
from router.dispatches import DispatchObserver, RemoteDispatches
from router.own_leases import OwnLeases
from router.registry.base import GatewayRecord
from router.sharing_link import Link
from router.sharing_messages import BATCH_S, MAX_ID_BYTES, MAX_PEERS, PeerAddress
from router.sharing_socket import SocketKeys
from router.sharing_teller import Teller

TICK_S = 0.1

EXPLAIN_S = 2.0
"""How long peers may take to tell what they know of a request."""


class DispatchSharing:
    """`open()` on the loop that uses it, `close()` at the end. `counters` are cumulative.

    `find_decisions` returns what this process has decided about a request, for peers that ask.

    With `keys` every peer must have a public key, and peers without one are not followed. The context is the caller's,
    who may run a gate for CURVE in it; it outlives this object.
    """

    def __init__(self, listen: str, *, context: zmq.Context[Any] | None = None, keys: SocketKeys | None = None) -> None:
        self.peer_id = secrets.token_hex(8)
        self.counters: Counter[str] = Counter()
        self.address = listen
        self._context = context or zmq.Context.instance()
        self._keys = keys
        self.find_decisions: Callable[[str], Sequence[Decision]] = lambda request_id: ()
        self._own = OwnLeases(self._note_change)
        self._receivers: dict[str, RemoteDispatches] = {}
        self._links: dict[PeerAddress, Link] = {}
        self._teller: Teller | None = None
        self._tick: asyncio.TimerHandle | None = None
        self._batch: asyncio.TimerHandle | None = None
        self._progress = asyncio.Event()

    def observer(self, pool: str) -> DispatchObserver:
        """Return what the pool of this name tells its own leases to. The name is the same in all processes."""
        return self._own.observer(pool)

    def attach(self, pool: str, receiver: RemoteDispatches) -> None:
        """Pass on what peers tell of the pool of this name; they are followed anew, so that it learns of everything."""
        self._receivers[pool] = receiver
        for link in self._links.values():
            link.restart()

    def detach(self, pool: str) -> None:
        """The pool of this name is gone: what peers tell of it is only counted."""
        self._receivers.pop(pool, None)

    def open(self) -> None:
        """Bind; `address` then has the port. Raises zmq.ZMQError when the address cannot be had."""
        self._teller = Teller(
            self._context,
            self.address,
            self._own,
            self.peer_id,
            self._keys,
            self.counters,
            lambda request_id: self.find_decisions(request_id),
        )
        self.address = self._teller.address
        self._tick = asyncio.get_running_loop().call_later(TICK_S, self._beat)

    def close(self) -> None:
        """Peers learn of it as of any death."""
        for timer in (self._tick, self._batch):
            if timer is not None:
                timer.cancel()
        self.set_peers(())
        if self._teller is not None:
            self._teller.close()

    def set_peers(self, peers: Iterable[PeerAddress]) -> None:
        """Follow these and no others; one's own address may be among them. Who is no longer listed is forgotten."""
        wanted = [peer for peer in dict.fromkeys(peers) if peer.address != self.address]
        if self._keys is not None:
            wanted = [peer for peer in wanted if peer.public_key is not None]
        listed = dict.fromkeys(wanted[:MAX_PEERS])
        for gone in [peer for peer in self._links if peer not in listed]:
            self._links.pop(gone).close()
        for peer in listed:
            if peer not in self._links:
                self._links[peer] = Link(
                    peer, self._context, self._keys, self._receivers, self._is_known, self.counters
                )
        self._progress.set()

    @property
    def peers(self) -> dict[str, int]:
        """Leases under way by the peers that are followed now (peer id)."""
        links = self._links.values()
        return {link.leases.peer_id: len(link.leases) for link in links if link.leases.peer_id and link.is_synced}

    async def wait_synced(self) -> None:
        """Return when every listed peer has told all that it has under way, or has not answered for `SILENCE_S`."""
        while not all(link.is_settled for link in self._links.values()):
            self._progress.clear()
            await self._progress.wait()

    async def explain(self, request_id: str) -> tuple[list[Decision], int]:
        """Return what the first peer that knows of a request has decided about it, and how many peers did not answer
        within `EXPLAIN_S`. One process has had a request, with all its choices and attempts."""
        if len(request_id.encode()) > MAX_ID_BYTES:
            return [], 0
        pending = {asyncio.create_task(link.explain(request_id)) for link in self._links.values() if not link.is_double}
        silent, end_s = 0, asyncio.get_running_loop().time() + EXPLAIN_S
        try:
            while pending:
                left_s = max(0.0, end_s - asyncio.get_running_loop().time())
                done, pending = await asyncio.wait(pending, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
                if not done:
                    break
                for answer in done:
                    if answer.result():
                        return answer.result() or [], 0
                    silent += answer.result() is None
            return [], silent + len(pending)
        finally:
            for question in pending:
                question.cancel()

    def _is_known(self, peer_id: str, asking: Link) -> bool:
        """Whether a peer is this process itself, or is followed already under another address."""
        others = (link for link in self._links.values() if link is not asking)
        return peer_id == self.peer_id or any(link.leases.peer_id == peer_id for link in others)

    def _note_change(self, is_full: bool) -> None:
        if self._teller is None:
            self._own.take_changes()  # nobody can follow yet
        elif is_full:
            self._flush()
        elif self._batch is None:
            self._batch = asyncio.get_running_loop().call_later(BATCH_S, self._flush)

    def _flush(self) -> None:
        if self._batch is not None:
            self._batch.cancel()
            self._batch = None
        if self._teller is not None:
            self._teller.tell(self._own.take_changes())

    def _beat(self) -> None:
        loop = asyncio.get_running_loop()
        self._tick = loop.call_later(TICK_S, self._beat)
        if self._teller is not None:
            self._teller.beat(loop.time())
        for link in self._links.values():
            link.beat(loop.time())
        self._progress.set()


def peers_of(records: Collection[GatewayRecord]) -> list[PeerAddress]:
    """Return whom to follow of a registry's gateways."""
    return [PeerAddress.of(record) for record in records]
