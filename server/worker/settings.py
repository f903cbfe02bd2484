"""The settings of `headrace worker`: its own, and those of the engine and the logs that `headrace serve` has too."""

from __future__ import annotations

from server.config import WorkerConfig
from server.serve_settings import SETTINGS
from server.setting import WORKER, Setting

_SHARED = (
    "cores.unready_after_s",
    "cores.restart_after_s",
    "drain_timeout_s",
    "admin_key_file",
    "log_level",
    "log_format",
)

OWN_SETTINGS: tuple[Setting, ...] = (
    Setting(
        name="listen",
        field="listen",
        section=WORKER,
        config=WorkerConfig,
        help="Where gateways reach the first rank: tcp://HOST:PORT or ipc://PATH; further ranks take the next ports.",
        metavar="ADDRESS",
    ),
    Setting(
        name="events-listen",
        field="events_listen",
        section=WORKER,
        config=WorkerConfig,
        help="Where the first rank publishes KV events, with their replay on the next port; free ports unless set.",
        metavar="ADDRESS",
    ),
    Setting(
        name="advertise",
        field="advertise",
        section=WORKER,
        config=WorkerConfig,
        help="The host by which other machines reach this one; taken from --listen unless set.",
        metavar="HOST",
    ),
    Setting(
        name="register",
        field="register",
        section=WORKER,
        config=WorkerConfig,
        help="The registry that tells gateways of this worker: redis://..., k8s:...; none unless set.",
        metavar="SPEC",
    ),
    Setting(
        name="worker-id",
        field="worker_id",
        section=WORKER,
        config=WorkerConfig,
        help="The name of this worker in its registry; host and port unless set.",
        metavar="ID",
    ),
    Setting(
        name="dp",
        field="dp",
        section=WORKER,
        config=WorkerConfig,
        help="Engines to run, each with the whole model and a process of its own.",
        low=1,
        high=64,
    ),
    Setting(
        name="role",
        field="role",
        section=WORKER,
        config=WorkerConfig,
        help="What gateways may use it for.",
    ),
    Setting(
        name="http-host",
        field="http_host",
        section=WORKER,
        config=WorkerConfig,
        help="Address of the port for health, metrics and admin.",
        metavar="ADDRESS",
    ),
    Setting(
        name="http-port",
        field="http_port",
        section=WORKER,
        config=WorkerConfig,
        help="That port; 0 takes a free one.",
        low=0,
        high=65535,
    ),
    Setting(
        name="wire-key-file",
        field="wire_key_file",
        section=WORKER,
        config=WorkerConfig,
        help="The worker's key pair, of `headrace keys pair`: connections are encrypted and clients known.",
        metavar="FILE",
    ),
    Setting(
        name="wire-clients-file",
        field="wire_clients_file",
        section=WORKER,
        config=WorkerConfig,
        help="Public keys of the gateways that may connect, one a line; read again when it changes.",
        metavar="FILE",
    ),
    Setting(
        name="insecure",
        field="insecure",
        section=WORKER,
        config=WorkerConfig,
        help="Let anybody connect from other machines, without keys and in the clear.",
    ),
)

WORKER_SETTINGS: tuple[Setting, ...] = (
    *(setting for setting in SETTINGS if setting.field.startswith("engine.")),
    *OWN_SETTINGS,
    *(setting for setting in SETTINGS if setting.field in _SHARED),
)
