"""The contract of a registry: workers announce records, gateways watch the list of all.

A registry is for discovery only: load, events and dispatches travel between the processes themselves.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Protocol

import msgspec

from router.values import Role, TargetState


class RankAddress(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Where one DP rank is reached: `wire` for requests, `events` its KV events (PUB), `events_replay` their replay,
    snapshot and digest (ROUTER). All are ZeroMQ addresses.
    """

    dp_rank: int
    wire: str
    events: str | None = None
    events_replay: str | None = None


class WorkerRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One worker. `incarnation` is drawn when its process starts: another one means that everything it had is gone.

    `compatibility` is the hex digest of what two workers must share to continue each other's requests; empty until the
    model is loaded. `numerics` may differ between compatible workers, at the price of inexact migration. `public_key`
    (Z85, CURVE) authenticates the worker's sockets. `pid` is set when the worker runs on this machine for a launcher.
    """

    worker_id: str
    incarnation: str
    model: str
    role: Role = "both"
    state: TargetState = "starting"
    ranks: tuple[RankAddress, ...] = ()
    compatibility: str = ""
    numerics: str = ""
    http_url: str | None = None
    public_key: str | None = None
    pid: int | None = None


class Announcement(Protocol):
    """A worker's own entry, kept alive until it is closed."""

    async def update(self, record: WorkerRecord) -> None: ...

    async def close(self) -> None:
        """Withdraw the record."""
        ...


class Registry(Protocol):
    """`watch` and `announce` survive outages of what is behind them: they try again, and a watcher keeps the last
    list that it knows meanwhile.
    """

    def watch(self) -> AsyncIterator[tuple[WorkerRecord, ...]]:
        """Yield all records: now, and whenever they change."""
        ...

    async def announce(self, record: WorkerRecord) -> Announcement: ...

    async def close(self) -> None: ...
