"""A list that somebody wrote: in the registry's own name, or in a file that is watched for changes.

An entry is the base URL of a worker's or a gateway's HTTP port, which tells the record, or a whole record. Behind a
dialect and a plus the URL is of an engine of another make.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import msgspec
import yaml

from engine.errors import ConfigError
from router.registry.background import Background
from router.registry.base import GatewayRecord, Record, WorkerRecord
from router.registry.board import Board
from router.registry.endpoints import POLL_INTERVAL_S, Endpoints, open_http, require_http
from router.registry.records import RecordError, Sieve, convert_record, is_http_url, is_worker_url, record_id

if TYPE_CHECKING:
    import aiohttp

R = TypeVar("R", WorkerRecord, GatewayRecord)

MAX_FILE_BYTES = 16 * 1024 * 1024


class Entries(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a file holds, before its records are looked at."""

    workers: list[object] = []
    gateways: list[object] = []


def read_entries(path: Path) -> Entries:
    """Read a list of workers, or a mapping of `workers` and `gateways` in YAML or JSON. Raises RecordError, OSError."""
    with path.open("rb") as file:
        data = file.read(MAX_FILE_BYTES + 1)
    if len(data) > MAX_FILE_BYTES:
        raise RecordError(f"the file is larger than {MAX_FILE_BYTES} bytes")
    try:
        content = yaml.safe_load(data)
        if isinstance(content, list):
            content = {"workers": content}
        return msgspec.convert(content or {}, Entries)
    except (yaml.YAMLError, msgspec.ValidationError, RecursionError, ValueError) as error:
        raise RecordError(f"the file is no list of workers: {str(error)[:200]}") from None


class StaticRegistry:
    """What a process announces here is seen by its own watchers alone: others read the list.

    Raises ConfigError for a list that cannot be used. A file may do so later: then the list before it stays.
    """

    def __init__(self, *, urls: Sequence[str] = (), path: Path | None = None) -> None:
        self._path = path
        self._stamp: tuple[int, ...] | None = None
        self._entries = Entries(workers=list(urls))
        self._own: dict[StaticAnnouncement, Record] = {}
        self._sieve = Sieve()
        self._workers: Board[WorkerRecord] = Board()
        self._gateways: Board[GatewayRecord] = Board()
        self._session: aiohttp.ClientSession | None = None
        self._worker_urls: Endpoints[WorkerRecord] | None = None
        self._gateway_urls: Endpoints[GatewayRecord] | None = None
        self._told_workers: tuple[tuple[str, WorkerRecord], ...] = ()
        self._told_gateways: tuple[tuple[str, GatewayRecord], ...] = ()
        self._background: Background | None = None
        if path is None:
            for url in urls:
                if not is_worker_url(url):
                    raise ConfigError(f"{url[:200]!r} is no base URL of a worker.", hint="Give http://HOST:PORT.")
        else:
            try:
                self._stamp = _stamp(path)
                self._entries = read_entries(path)
            except (OSError, RecordError) as error:
                raise ConfigError(f"The registry {path} cannot be read: {error}") from None
        if any(isinstance(entry, str) for entry in (*self._entries.workers, *self._entries.gateways)):
            require_http()

    def watch(self) -> AsyncIterator[tuple[WorkerRecord, ...]]:
        self._start()
        return self._workers.watch()

    def watch_gateways(self) -> AsyncIterator[tuple[GatewayRecord, ...]]:
        self._start()
        return self._gateways.watch()

    async def announce(self, record: Record) -> StaticAnnouncement:
        announcement = StaticAnnouncement(self)
        await announcement.update(record)
        return announcement

    async def close(self) -> None:
        if self._background is not None:
            await self._background.close()
        if self._session is not None:
            await self._session.close()
        self._workers.close()
        self._gateways.close()

    def _start(self) -> None:
        if self._background is None:
            self._background = Background("the list of workers", (), self._look)

    async def _look(self) -> None:
        if self._path is not None:
            await self._reread(self._path)
        urls = [entry for entry in self._entries.workers if isinstance(entry, str)]
        gateway_urls = [entry for entry in self._entries.gateways if isinstance(entry, str)]
        if urls or gateway_urls or self._session is not None:
            await self._ask(urls, gateway_urls)
        self._publish()
        await asyncio.sleep(POLL_INTERVAL_S)

    async def _reread(self, path: Path) -> None:
        """Keep the list when the file is away or half written: somebody is at it."""
        try:
            stamp = await asyncio.to_thread(_stamp, path)
            if stamp != self._stamp:
                self._entries = await asyncio.to_thread(read_entries, path)
                self._stamp = stamp
        except (OSError, RecordError) as error:
            self._sieve.complain(str(path), error)

    async def _ask(self, urls: Sequence[str], gateway_urls: Sequence[str]) -> None:
        if self._session is None or self._worker_urls is None or self._gateway_urls is None:
            self._session = open_http()
            self._worker_urls = Endpoints(self._session, WorkerRecord)
            self._gateway_urls = Endpoints(self._session, GatewayRecord)
        self._told_workers, self._told_gateways = await asyncio.gather(
            self._worker_urls.poll(filter(is_worker_url, urls)),
            self._gateway_urls.poll(filter(is_http_url, gateway_urls)),
        )

    def publish_own(self, announcement: StaticAnnouncement, record: Record | None) -> None:
        if record is None:
            self._own.pop(announcement, None)
        else:
            self._own[announcement] = record
        self._publish()

    def _publish(self) -> None:
        workers = self._written(self._entries.workers, WorkerRecord)
        gateways = self._written(self._entries.gateways, GatewayRecord)
        own = [(record_id(record), record) for record in self._own.values()]
        own_workers = [(name, record) for name, record in own if isinstance(record, WorkerRecord)]
        own_gateways = [(name, record) for name, record in own if isinstance(record, GatewayRecord)]
        self._workers.post(self._sieve.unique([*own_workers, *workers, *self._told_workers]))
        self._gateways.post(self._sieve.unique([*own_gateways, *gateways, *self._told_gateways]))

    def _written(self, entries: Sequence[object], kind: type[R]) -> list[tuple[str, R]]:
        records: list[tuple[str, R]] = []
        for number, entry in enumerate(entries, start=1):
            source = f"entry {number}"
            if isinstance(entry, str):
                if not (is_worker_url if kind is WorkerRecord else is_http_url)(entry):
                    self._sieve.complain(source, "it is no base URL")
                continue
            try:
                records.append((source, convert_record(entry, kind)))
            except RecordError as error:
                self._sieve.complain(source, error)
        return records


class StaticAnnouncement:
    """A record that only its own process knows."""

    def __init__(self, registry: StaticRegistry) -> None:
        self._registry = registry

    async def update(self, record: Record) -> None:
        self._registry.publish_own(self, record)

    async def close(self) -> None:
        self._registry.publish_own(self, None)


def _stamp(path: Path) -> tuple[int, ...]:
    """What differs when the file was written or replaced."""
    status = os.stat(path)
    return (status.st_mtime_ns, status.st_size, status.st_ino)
