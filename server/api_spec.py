"""What an API process is started with. Apart from it, so that the launcher writes the line without an HTTP server."""

from __future__ import annotations

import msgspec

from server.access.credentials import Credentials
from server.config import ServeConfig


class ApiSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One line of JSON on stdin. `listen_fd` is a listening socket, shared by all API processes of one server, as are
    `credentials` and `metrics_dir`, which several processes need for metrics that are summed over them.
    `core_addresses` are the wire's, one an engine.
    """

    config: ServeConfig
    listen_fd: int
    core_addresses: tuple[str, ...]
    credentials: Credentials = msgspec.field(default_factory=Credentials)
    metrics_dir: str | None = None
