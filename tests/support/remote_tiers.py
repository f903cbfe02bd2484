"""Remote tiers and servers for tests: with times that only a hang reaches, so that a busy machine changes nothing."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from redis import Redis

from kvstore.remote.names import server_name
from kvstore.remote.tier import RemoteTier
from tests.support.kv_objects import key_of
from tests.support.tier_contract import LIMIT_S, soon
from tests.support.valkey_server import ValkeyServer, valkey_server


@contextmanager
def running_server(**options: object) -> Iterator[ValkeyServer]:
    """A server that answers, also on the unix socket `socket_of`. Its directory has a short path for that."""
    with tempfile.TemporaryDirectory(prefix="kv") as directory:
        socket = Path(directory) / "s"
        with valkey_server(Path(directory), unixsocket=socket, **options) as server:
            asyncio.run(server.wait_ready())
            yield server


def socket_of(server: ValkeyServer) -> Path:
    return Path(str(server.options["unixsocket"]))


def open_remote(url: str, **options: object) -> RemoteTier:
    patient = dict.fromkeys(("connect_s", "probe_s", "stall_s", "meeting_s"), LIMIT_S)
    return RemoteTier(url, **{**patient, **options})  # type: ignore[arg-type]


@contextmanager
def remote_tier(url: str, **options: object) -> Iterator[RemoteTier]:
    tier = open_remote(url, **options)
    try:
        yield tier
    finally:
        tier.close(soon())


def client_of(server: ValkeyServer) -> Redis:
    """Another client, that is not ours."""
    return Redis.from_url(server.url)


def name_of(number: int, epoch: int = 0) -> bytes:
    """What the server calls an object."""
    return server_name(key_of(number), epoch)
