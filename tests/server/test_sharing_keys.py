"""Dispatches are told to gateways whose keys are listed, and to nobody else."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import zmq

from engine.wire.curve import KeyPair
from router.sharing import DispatchSharing, PeerAddress, peers_of
from server.sharing_keys import SharingKeys
from tests.support.registries import gateway
from tests.support.remote_leases import RemoteLeases, dispatch
from tests.support.until import until

LISTEN = "tcp://127.0.0.1:*"


@contextmanager
def keyed(keys: KeyPair | None, clients_file: Path | None = None) -> Iterator[DispatchSharing]:
    """A process's own context, gate and sharing."""
    context: zmq.Context[Any] = zmq.Context()
    sharing = DispatchSharing(
        LISTEN, context=context, keys=None if keys is None else SharingKeys(context, keys, clients_file)
    )
    sharing.open()
    try:
        yield sharing
    finally:
        sharing.close()
        context.term()


async def test_only_listed_gateways_hear_anything(tmp_path: Path) -> None:
    ours, friend, stranger = KeyPair.new(), KeyPair.new(), KeyPair.new()
    clients = tmp_path / "gateways"
    clients.write_text(f"{friend.public} the other gateway\n")
    with (
        keyed(ours, clients) as teller,
        keyed(friend) as listed,
        keyed(stranger) as unlisted,
        keyed(None) as plain,
        keyed(friend) as careless,
    ):
        teller.observer("tiny").dispatched(dispatch(1))
        (peer,) = peers_of([gateway(dispatches=teller.address, public_key=ours.public)])
        receivers = []
        for follower in (listed, unlisted, plain, careless):
            receivers.append(RemoteLeases())
            follower.attach("tiny", receivers[-1])
            # A peer without a key is not followed by who has one.
            follower.set_peers([PeerAddress(peer.address) if follower is careless else peer])
        await until(lambda: len(receivers[0].live) == 1, "the listed one hears")
        for follower in (listed, unlisted, plain, careless):
            await asyncio.wait_for(follower.wait_synced(), 30)
        assert [len(seen.live) for seen in receivers] == [1, 0, 0, 0]
