"""What an API process is started with. Apart from it, so that the launcher writes the line without an HTTP server."""

from __future__ import annotations

import msgspec

from router.registry.base import GatewayRecord, WorkerRecord
from server.access.credentials import Credentials
from server.config import ServeConfig
from server.fleet.discovery import Discovery


class ApiSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One line of JSON on stdin. `listen_fd` is a listening socket, shared by all API processes of one server, as are
    `credentials`. Several processes have a `metrics_dir`, for metrics that are summed over them, and a `usage_file`, by
    which they count together what API keys use.
    `workers` are the launcher's own engines; `discovery` tells a gateway how to find others. `gateways` are all API
    processes of this server, which tell each other what they dispatch; this one is number `index`.
    """

    config: ServeConfig
    listen_fd: int
    workers: tuple[WorkerRecord, ...] = ()
    discovery: Discovery | None = None
    gateways: tuple[GatewayRecord, ...] = ()
    index: int = 0
    credentials: Credentials = msgspec.field(default_factory=Credentials)
    metrics_dir: str | None = None
    usage_file: str | None = None
