"""CURVE for the sockets between gateways: the key pair and the list of clients that the wire has as well."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import zmq

from engine.wire.curve import KeyGate, KeyPair, secure_client


class SharingKeys:
    """`SocketKeys` (router/sharing.py) for the sockets of `context`. A gateway's public key has to be in the list of
    clients of its peers; one's own is admitted without. `clients_file` None admits holders of the same keys only.

    The gate lives until the context is terminated: one for each context.
    """

    def __init__(self, context: zmq.Context[Any], keys: KeyPair, clients_file: Path | None) -> None:
        self.gate = KeyGate(context, keys, clients_file)
        self._keys = keys

    @property
    def public_key(self) -> str:
        """What a gateway's record tells its peers."""
        return self._keys.public

    def secure_server(self, socket: zmq.Socket[Any]) -> None:
        self.gate.secure(socket)

    def secure_client(self, socket: zmq.Socket[Any], server_key: str) -> None:
        secure_client(socket, self._keys, server_key)
