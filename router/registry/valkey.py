"""Leases in Valkey or Redis: a record lives as long as its process renews it, and at most `LEASE_S` longer.

    {NAMESPACE}:workers        set of ids            {NAMESPACE}:worker:ID     record (JSON), expires after LEASE_S
    {NAMESPACE}:gateways       set of ids            {NAMESPACE}:gateway:ID    record (JSON), expires after LEASE_S
    {NAMESPACE}:epoch          drawn by whoever finds none: another one means that everything was lost
    {NAMESPACE}:changes        channel: something was announced, changed or withdrawn

After an outage, and when the epoch has changed, records that are missing may only not have been renewed yet: they stay
on the list for one lease. At any other time a missing record is a process that has ended.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Awaitable
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast

from engine.errors import ConfigError
from router.registry.background import Background
from router.registry.base import GatewayRecord, Record, WorkerRecord
from router.registry.board import Board
from router.registry.records import MAX_RECORD_BYTES, MAX_RECORDS, Sieve, encode_record, record_id

if TYPE_CHECKING:
    from redis.asyncio import Redis
    from redis.asyncio.client import PubSub

R = TypeVar("R", WorkerRecord, GatewayRecord)

LEASE_S = 5.0
RENEW_INTERVAL_S = LEASE_S / 3
ANSWER_TIMEOUT_S = 2.0
MAX_CONNECTIONS = 64

KIND_NAMES: dict[type[WorkerRecord] | type[GatewayRecord], str] = {WorkerRecord: "worker", GatewayRecord: "gateway"}

# Reads what there is of one kind: bounded in number and size, whoever wrote it, and forgets the ids of expired leases.
READ = """
local epoch = redis.call('GET', KEYS[2])
if not epoch then epoch = ARGV[2]; redis.call('SET', KEYS[2], epoch) end
local found = {epoch}
for _, id in ipairs(redis.call('SRANDMEMBER', KEYS[1], ARGV[3])) do
  local key = ARGV[1] .. id
  if redis.call('EXISTS', key) == 1 then
    found[#found + 1] = id
    found[#found + 1] = redis.call('GETRANGE', key, 0, ARGV[4])
  else
    redis.call('SREM', KEYS[1], id)
  end
end
return found
"""


class ValkeyRegistry:
    """At `url` (redis://HOST:PORT/DB), under the names of `namespace`. Raises ConfigError where the client is missing.

    `redis://` has no time-outs of its own here: every call is given `ANSWER_TIMEOUT_S`.
    """

    def __init__(self, url: str, *, namespace: str = "headrace") -> None:
        self._client = _connect(url)
        # In braces: all of them are on one node of a cluster.
        self.prefix = "{" + namespace + "}:"
        self._workers = _Reader(self, WorkerRecord)
        self._gateways = _Reader(self, GatewayRecord)
        self._announcements: set[ValkeyAnnouncement] = set()

    def watch(self) -> AsyncIterator[tuple[WorkerRecord, ...]]:
        return self._workers.watch()

    def watch_gateways(self) -> AsyncIterator[tuple[GatewayRecord, ...]]:
        return self._gateways.watch()

    async def announce(self, record: Record) -> ValkeyAnnouncement:
        announcement = ValkeyAnnouncement(self, record)
        self._announcements.add(announcement)
        return announcement

    async def close(self) -> None:
        for announcement in list(self._announcements):
            await announcement.close()
        await self._workers.close()
        await self._gateways.close()
        await self._client.aclose()

    def keys_of(self, record: Record) -> tuple[str, str]:
        """Return the set that lists the record's kind, and its own key."""
        kind = KIND_NAMES[type(record)]
        return f"{self.prefix}{kind}s", f"{self.prefix}{kind}:{record_id(record)}"

    @property
    def channel(self) -> str:
        return f"{self.prefix}changes"

    @property
    def client(self) -> Redis:
        return self._client

    def forget(self, announcement: ValkeyAnnouncement) -> None:
        self._announcements.discard(announcement)


class ValkeyAnnouncement:
    """One lease, renewed until it is closed. A change is written at once."""

    def __init__(self, registry: ValkeyRegistry, record: Record) -> None:
        self._registry = registry
        self._record = record
        self._changed = asyncio.Event()
        self._background = Background(f"the registry ({record_id(record)})", _outages(), self._renew)
        self._closed = False

    async def update(self, record: Record) -> None:
        self._record = record
        self._changed.set()

    async def close(self) -> None:
        """Withdraw the record. When the registry cannot be reached its lease ends by itself."""
        if self._closed:
            return
        self._closed = True
        await self._background.close()
        self._registry.forget(self)
        listing, key = self._registry.keys_of(self._record)
        try:
            async with asyncio.timeout(ANSWER_TIMEOUT_S), self._registry.client.pipeline(transaction=True) as pipe:
                pipe.delete(key)
                pipe.srem(listing, record_id(self._record))
                pipe.publish(self._registry.channel, b"")
                await pipe.execute()
        except _outages():
            return  # the promise above: its lease ends by itself

    async def _renew(self) -> None:
        self._changed.clear()
        listing, key = self._registry.keys_of(self._record)
        data = encode_record(self._record)
        async with asyncio.timeout(ANSWER_TIMEOUT_S), self._registry.client.pipeline(transaction=True) as pipe:
            pipe.getrange(key, 0, MAX_RECORD_BYTES)
            pipe.set(key, data, px=int(LEASE_S * 1000))
            pipe.sadd(listing, record_id(self._record))
            before, *_ = await pipe.execute()
            if before != data:
                await self._registry.client.publish(self._registry.channel, b"")
        self._background.healthy()
        try:
            async with asyncio.timeout(RENEW_INTERVAL_S):
                await self._changed.wait()
        except TimeoutError:
            return  # unchanged: renew it


class _Reader(Generic[R]):
    """Keeps the list of one kind up to date, from the first watch on."""

    def __init__(self, registry: ValkeyRegistry, kind: type[R]) -> None:
        self._registry = registry
        self._kind: type[R] = kind
        self._board: Board[R] = Board()
        self._sieve = Sieve()
        self._epoch: bytes | None = None
        self._patient_until = 0.0
        self._was_out = False
        self._background: Background | None = None

    def watch(self) -> AsyncIterator[tuple[R, ...]]:
        if self._background is None:
            self._background = Background(f"the registry's {KIND_NAMES[self._kind]}s", _outages(), self._follow)
        return self._board.watch()

    async def close(self) -> None:
        if self._background is not None:
            await self._background.close()
        self._board.close()

    async def _follow(self) -> None:
        """Read the list on every change, and once an interval to see leases that have ended."""
        try:
            async with self._registry.client.pubsub() as changes:
                async with asyncio.timeout(ANSWER_TIMEOUT_S):
                    await changes.subscribe(self._registry.channel)
                while True:
                    await self._read()
                    if self._background is not None:
                        self._background.healthy()
                    await _next_change(changes)
        except BaseException:
            self._was_out = True
            raise

    async def _read(self) -> None:
        name = KIND_NAMES[self._kind]
        prefix = self._registry.prefix
        async with asyncio.timeout(ANSWER_TIMEOUT_S):
            answer = self._registry.client.eval(
                READ,
                2,
                f"{prefix}{name}s",
                f"{prefix}epoch",
                f"{prefix}{name}:",
                secrets.token_hex(8),
                str(MAX_RECORDS),
                str(MAX_RECORD_BYTES),
            )
            epoch, *found = await cast(Awaitable[list[bytes]], answer)
        if self._was_out or epoch != self._epoch:
            self._patient_until = time.monotonic() + LEASE_S + RENEW_INTERVAL_S
            self._epoch, self._was_out = epoch, False
        self._board.post(self._with_missing(self._decoded(found)))

    def _decoded(self, found: list[bytes]) -> tuple[R, ...]:
        pairs = zip(found[::2], found[1::2], strict=True)
        return self._sieve.listed(((name.decode("utf-8", "replace"), data) for name, data in pairs), self._kind)

    def _with_missing(self, records: tuple[R, ...]) -> tuple[R, ...]:
        """Keep what is missing while that proves nothing."""
        if self._board.records is None or time.monotonic() >= self._patient_until:
            return records
        known: dict[str, R] = {record_id(record): record for record in self._board.records}
        known.update((record_id(record), record) for record in records)
        return self._sieve.unique(known.items())


async def _next_change(changes: PubSub) -> None:
    """Return when something has changed, or after an interval. Several changes at once are one."""
    message = await changes.get_message(ignore_subscribe_messages=True, timeout=RENEW_INTERVAL_S)
    while message is not None:
        message = await changes.get_message(ignore_subscribe_messages=True, timeout=0.0)


def _outages() -> tuple[type[Exception], ...]:
    from redis.exceptions import RedisError

    return (RedisError, OSError, TimeoutError)


def _connect(url: str) -> Redis:
    try:
        from redis.asyncio import Redis
        from redis.asyncio.retry import Retry
        from redis.backoff import NoBackoff
    except ImportError:
        raise ConfigError(
            "The registry needs the package redis, which is not installed.", hint="Run: pip install 'headrace[redis]'"
        ) from None
    settings: dict[str, Any] = {
        "socket_connect_timeout": ANSWER_TIMEOUT_S,
        "max_connections": MAX_CONNECTIONS,
        # Trying again is Background's, with pauses.
        "retry": Retry(NoBackoff(), 0),
    }
    try:
        return Redis.from_url(url, **settings)
    except ValueError as error:
        raise ConfigError(
            f"The registry's address cannot be used: {error}", hint="Give redis://HOST:PORT/DB."
        ) from None
