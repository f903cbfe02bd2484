"""The contract of a registry: workers and gateways announce records, gateways watch the lists of both.

A registry is for discovery only: load, events and dispatches travel between the processes themselves.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Literal, Protocol

import msgspec

from router.values import Role, TargetState

Dialect = Literal["headrace", "auto", "openai", "sglang", "llama_server", "text"]
"""What a worker speaks: our wire, or one of the languages of engines that are not ours (server/foreign)."""

LISTED = "listed"
"""The incarnation of a worker that somebody else wrote down: which process answers there, only its server knows."""


class RankAddress(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Where one DP rank is reached: `wire` for requests, `events` its KV events (PUB), `events_replay` their replay,
    snapshot and digest (ROUTER). All are ZeroMQ addresses. `incarnation` is of the rank's own process: where only it
    has changed, only what this rank had is gone.
    """

    dp_rank: int
    wire: str
    events: str | None = None
    events_replay: str | None = None
    incarnation: str | None = None


class WorkerRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One worker. `incarnation` is drawn when its process starts: another one means that everything it had is gone.

    `compatibility` is the hex digest of what two workers must share to continue each other's requests
    (router/registry/compat.py); empty until the model is loaded. `numerics` may differ between compatible workers, at
    the price of inexact migration. `public_key` (Z85, CURVE) authenticates the worker's sockets. `pid` is set when the
    worker runs on this machine for a launcher. A worker with another `dialect` than our own is spoken to at `http_url`,
    has no ranks and announces nothing itself: somebody writes its record. `events` and `events_replay` are where such
    a worker publishes KV events, under `events_topic`.
    """

    worker_id: str
    incarnation: str = LISTED
    model: str
    role: Role = "both"
    state: TargetState = "starting"
    ranks: tuple[RankAddress, ...] = ()
    compatibility: str = ""
    numerics: str = ""
    http_url: str | None = None
    public_key: str | None = None
    pid: int | None = None
    dialect: Dialect = "headrace"
    events: str | None = None
    events_replay: str | None = None
    events_topic: str = ""

    @property
    def is_ours(self) -> bool:
        """Whether it speaks our wire."""
        return self.dialect == "headrace"


class GatewayRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One process that routes: a gateway, or one API process of it. `dispatches` is the ZeroMQ address at which it
    tells its dispatches (router/sharing.py)."""

    gateway_id: str
    incarnation: str
    dispatches: str
    public_key: str | None = None


Record = WorkerRecord | GatewayRecord


class Announcement(Protocol):
    """A process's own entry, kept alive until it is closed."""

    async def update(self, record: Record) -> None:
        """Replace the record by another of the same kind and id."""
        ...

    async def close(self) -> None:
        """Withdraw the record."""
        ...


class Registry(Protocol):
    """`watch` and `announce` survive outages of what is behind them: they try again, and a watcher keeps the last
    list that it knows meanwhile. Records that cannot be used are left out with a warning (router/registry/records.py).
    """

    def watch(self) -> AsyncIterator[tuple[WorkerRecord, ...]]:
        """Yield all workers, ordered by id: as soon as they are known, and whenever they change."""
        ...

    def watch_gateways(self) -> AsyncIterator[tuple[GatewayRecord, ...]]:
        """The same for gateways, one's own included."""
        ...

    async def announce(self, record: Record) -> Announcement:
        """Return without waiting for what is behind the registry: the record gets there when that can be reached."""
        ...

    async def close(self) -> None:
        """End all watches and announcements."""
        ...
