"""Who may use a process's ZeroMQ sockets: its keys, the clients that it lets in, and no open door to other machines."""

from __future__ import annotations

from pathlib import Path

from engine.errors import ConfigError
from engine.wire.curve import KeyPair, read_clients
from server.worker.addresses import is_reachable_from_outside


def read_wire_keys(key_file: str | None, clients_file: str | None) -> KeyPair | None:
    """Return the process's own keys, None where none are configured. Raises ConfigError for files of no use."""
    if key_file is not None:
        if clients_file is not None:
            read_clients(Path(clients_file))
        return KeyPair.read(Path(key_file))
    if clients_file is not None:
        raise ConfigError("--wire-clients-file needs --wire-key-file.", hint="Make one with `headrace keys pair FILE`.")
    return None


def check_not_open(address: str, hint: str) -> None:
    """Raise ConfigError for a socket without keys that other machines can reach."""
    if is_reachable_from_outside(address):
        raise ConfigError(
            f"{address} can be reached from other machines, and nothing would ask who connects.", hint=hint
        )
