"""Workers behind a Kubernetes service: the cluster tells their addresses, each tells its record over HTTP.

Kubernetes knows which pods there are and which of them are being ended; what a worker is and whether it can serve, it
says itself. So nothing is announced here: a pod that runs is on the list.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Generic, TypeVar

import msgspec

from router.registry.background import Background
from router.registry.base import Dialect, GatewayRecord, Record, WorkerRecord
from router.registry.board import Board
from router.registry.endpoints import POLL_INTERVAL_S, Endpoints, open_http
from router.registry.kubernetes_access import KubernetesAccess
from router.registry.kubernetes_slices import Address, ApiError, SliceWatch
from router.registry.records import Sieve

R = TypeVar("R", WorkerRecord, GatewayRecord)


@dataclass(frozen=True)
class Service:
    """`port` is the name or number of the HTTP port in the service's slices, `dialect` what the pods speak."""

    namespace: str
    name: str
    port: str = "http"
    dialect: Dialect = "headrace"


class KubernetesRegistry:
    """`gateways` None: this installation's gateways do not look for each other here."""

    def __init__(
        self, workers: Service, gateways: Service | None = None, access: KubernetesAccess | None = None
    ) -> None:
        self._access = access or KubernetesAccess.in_cluster(os.environ)
        self._workers = _ServiceReader(self._access, workers, WorkerRecord)
        self._gateways = _ServiceReader(self._access, gateways, GatewayRecord)

    def watch(self) -> AsyncIterator[tuple[WorkerRecord, ...]]:
        return self._workers.watch()

    def watch_gateways(self) -> AsyncIterator[tuple[GatewayRecord, ...]]:
        return self._gateways.watch()

    async def announce(self, record: Record) -> KubernetesAnnouncement:
        return KubernetesAnnouncement()

    async def close(self) -> None:
        await self._workers.close()
        await self._gateways.close()


class KubernetesAnnouncement:
    """The pod's own HTTP port tells the record; there is nothing else to tell."""

    async def update(self, record: Record) -> None:
        return

    async def close(self) -> None:
        return


class _ServiceReader(Generic[R]):
    """Keeps the list of one kind up to date, from the first watch on."""

    def __init__(self, access: KubernetesAccess, service: Service | None, kind: type[R]) -> None:
        self._service = service
        self._board: Board[R] = Board()
        self._sieve = Sieve()
        self._session = open_http()
        self._endpoints: Endpoints[R] = Endpoints(self._session, kind)
        self._moved = asyncio.Event()
        self._is_listed = False
        self._tasks: list[Background] = []
        self._watch = None
        if service is not None:
            self._watch = SliceWatch(
                self._session, access, service.namespace, service.name, service.port, self._note_addresses
            )

    def watch(self) -> AsyncIterator[tuple[R, ...]]:
        if self._service is None:
            self._board.post(())
        elif not self._tasks:
            import aiohttp

            outages = (aiohttp.ClientError, TimeoutError, OSError, ApiError)
            what = f"the service {self._service.namespace}/{self._service.name} in Kubernetes"
            self._tasks = [Background(what, outages, self._follow), Background(what, outages, self._poll)]
        return self._board.watch()

    async def close(self) -> None:
        for task in self._tasks:
            await task.close()
        await self._session.close()
        self._board.close()

    async def _follow(self) -> None:
        assert self._watch is not None
        await self._watch.follow(self._tasks[0].healthy)

    async def _poll(self) -> None:
        """Ask every address for its record, on every change and once an interval."""
        assert self._watch is not None
        try:
            async with asyncio.timeout(POLL_INTERVAL_S):
                await self._moved.wait()
        except TimeoutError:
            if not self._is_listed:
                return  # the cluster has not told yet; an empty list would be a claim
        self._moved.clear()
        assert self._service is not None
        prefix = "" if self._service.dialect == "headrace" else f"{self._service.dialect}+"
        addresses = {f"{prefix}http://{address.authority}": address for address in self._watch.addresses}
        told = await self._endpoints.poll(addresses)
        self._board.post(self._sieve.unique((url, _as_seen(record, addresses[url])) for url, record in told))

    def _note_addresses(self) -> None:
        self._is_listed = True
        self._moved.set()


def _as_seen(record: R, address: Address) -> R:
    """A pod that is being ended takes nothing new, whether or not it knows already."""
    if isinstance(record, WorkerRecord) and address.terminating and record.state in ("starting", "ready"):
        return msgspec.structs.replace(record, state="draining")
    return record
