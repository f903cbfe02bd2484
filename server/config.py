"""Settings of the commands: one schema for flags, environment (HEADRACE_*) and YAML. Read once, frozen."""

from __future__ import annotations

import msgspec

from engine.config import EngineConfig
from router.values import Role
from server.logs import LogFormat


class RoutingConfig(msgspec.Struct, frozen=True, kw_only=True):
    """How requests are spread over engines. `policy` is one of router/policies/registry.py. Prompts that the engines
    need longer than `prefill_budget_s` for wait in the router, `max_queued` of them at most and `queue_timeout_s` each.
    `hedge_after_s` asks a second engine when the first one has not answered for so long; None never does. An engine
    that is connected and says nothing for `stall_timeout_s` loses its requests to others; it is longer than a step.
    `index_blocks` bounds what is remembered of the engines' caches, in blocks of one model.
    """

    policy: str = "prefix"
    prefill_budget_s: float = 30.0
    max_queued: int = 1024
    queue_timeout_s: float = 120.0
    hedge_after_s: float | None = None
    stall_timeout_s: float = 10.0
    index_blocks: int = 1_000_000


class CoresConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What becomes of an engine of this machine whose loop does not move (server/loop_watch.py): it is not ready after
    `unready_after_s`, and replaced after `restart_after_s` (None: never)."""

    unready_after_s: float = 10.0
    restart_after_s: float | None = 30.0


class ServeConfig(msgspec.Struct, frozen=True, kw_only=True):
    """`keep_alive_s` is the idle time of HTTP connections, `sse_keep_alive_s` the pause after which a stream sends a
    comment. `drain_timeout_s` bounds how long running streams may go on after SIGTERM. `request_timeout_s` None means
    no limit beyond the client's patience. `max_concurrent_requests` are of the whole server: each API process has its
    share. `requests_per_minute` and `tokens_per_minute` are of an API key that has no limits of its own, None is none.
    `max_prompts` are those of one body, times `n`. `debug_header` tells every client that asks where its request went.
    `replicas` are engines on this machine behind one router.
    Keys and secrets themselves are not in here (server/access/credentials.py).
    """

    engine: EngineConfig = EngineConfig()
    cores: CoresConfig = CoresConfig()
    routing: RoutingConfig = RoutingConfig()
    host: str = "127.0.0.1"
    port: int = 8000
    api_processes: int = 1
    replicas: int = 1
    drain_timeout_s: float = 30.0
    request_timeout_s: float | None = None
    max_body_bytes: int = 16 * 1024 * 1024
    keep_alive_s: float = 120.0
    sse_keep_alive_s: float = 15.0
    max_concurrent_requests: int = 8192
    max_prompts: int = 1024
    strict_params: bool = False
    api_keys_file: str | None = None
    admin_key_file: str | None = None
    scope_secret_file: str | None = None
    open_metrics: bool = True
    debug_header: bool = False
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    log_level: str = "info"
    log_format: LogFormat = "text"
    access_log: str | None = None

    def share(self, limit: int) -> int:
        """One API process's part of a limit of the whole server."""
        return -(-limit // self.api_processes)


class GatewayConfig(ServeConfig, frozen=True, kw_only=True):
    """Of `headrace gateway`, which has no engines of its own. `register` names the registry of its workers;
    `dispatches_listen` is where other gateways learn of its dispatches, None is nowhere; `advertise` the host by which
    they reach it. `wire_key_file` and `wire_clients_file` are as a worker's; with them `insecure` allows workers on
    other machines to be without. `tokenizer` and `engine_key_file` are for
    engines of other makes (server/foreign/settings.py).
    """

    replicas: int = 0
    register: str | None = None
    wire_key_file: str | None = None
    wire_clients_file: str | None = None
    insecure: bool = False
    dispatches_listen: str | None = None
    advertise: str | None = None
    tokenizer: str | None = None
    engine_key_file: str | None = None


class WorkerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Of `headrace worker`. `listen` and `events_listen` are ZeroMQ addresses of the first rank (server/worker/
    addresses.py), `advertise` the host by which others reach them. `register` names a registry, None is none.

    `wire_key_file` and `wire_clients_file` are read by engine/wire/curve.py. `insecure` allows to be without. What
    ServeConfig has as well is the same here.
    """

    engine: EngineConfig = EngineConfig()
    cores: CoresConfig = CoresConfig()
    listen: str = "tcp://127.0.0.1:5570"
    events_listen: str | None = None
    advertise: str | None = None
    register: str | None = None
    worker_id: str | None = None
    dp: int = 1
    role: Role = "both"
    http_host: str = "127.0.0.1"
    http_port: int = 5560
    wire_key_file: str | None = None
    wire_clients_file: str | None = None
    insecure: bool = False
    admin_key_file: str | None = None
    drain_timeout_s: float = 30.0
    log_level: str = "info"
    log_format: LogFormat = "text"
