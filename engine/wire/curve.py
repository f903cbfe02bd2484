"""Who may connect: CURVE keys, the files that hold them, and the gate that asks for them. Knows no messages.

A client proves its key pair and the engine its own, all frames are encrypted, and a client whose public key is not
listed gets nothing but a closed connection. Keys are in Z85: 40 printable characters for 32 bytes.

A key file has the lines `public KEY` and `secret KEY`. A list of clients has one public key a line, with a name behind
it if you like. In both, lines that begin with "# " are comments.
"""

from __future__ import annotations

import logging
import os
import re
import struct
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import zmq
from zmq.utils import z85

from engine.errors import ConfigError

log = logging.getLogger(__name__)

Socket = zmq.Socket[Any]

MAX_FILE_BYTES = 1024 * 1024
MAX_LOGGED_STRANGERS = 100
_KEY = re.compile(r"[0-9a-zA-Z.:+=^!/*?&<>()\[\]{}@%$#-]{40}")
_ZAP_ADDRESS = "inproc://zeromq.zap.01"
_ZAP_DOMAIN = b"headrace"


@dataclass(frozen=True)
class KeyPair:
    """Both in Z85."""

    public: str
    secret: str = field(repr=False)

    @classmethod
    def new(cls) -> KeyPair:
        public, secret = zmq.curve_keypair()
        return cls(public.decode(), secret.decode())

    @classmethod
    def read(cls, path: Path) -> KeyPair:
        """Raises ConfigError, which never shows a key."""
        found = {words[0]: words[1] for words in _lines(path) if len(words) == 2}
        if not all(_is_key(found.get(name, "")) for name in ("public", "secret")):
            raise ConfigError(
                f"{path} holds no pair of keys.", hint="Make one with `headrace keys pair FILE` and keep it secret."
            )
        if zmq.curve_public(found["secret"].encode()).decode() != found["public"]:
            raise ConfigError(f"The two keys in {path} do not belong together.")
        return cls(found["public"], found["secret"])

    def write(self, path: Path) -> None:
        """Create the file, which only this user may read. Raises ConfigError, also where there is one already."""
        try:
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        except OSError as error:
            raise ConfigError(f"The key file {path} cannot be made: {error.strerror or error}.") from None
        with os.fdopen(descriptor, "w", encoding="ascii") as file:
            file.write(f"# Headrace wire keys. Whoever reads the secret one can pass as you.\npublic {self.public}\n")
            file.write(f"secret {self.secret}\n")


def read_clients(path: Path) -> frozenset[bytes]:
    """Return the listed public keys, 32 bytes each. Raises ConfigError."""
    keys = set()
    for words in _lines(path):
        if not _is_key(words[0]):
            raise ConfigError(f"{path}: a line does not begin with a public key.", hint="Write one `KEY NAME` a line.")
        keys.add(z85.decode(words[0]))
    return frozenset(keys)


def _lines(path: Path) -> Iterator[list[str]]:
    try:
        with path.open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"The key file {path} cannot be read: {error.strerror or error}.") from None
    if len(data) > MAX_FILE_BYTES:
        raise ConfigError(f"The key file {path} is larger than {MAX_FILE_BYTES} bytes.")
    for line in data.decode("ascii", errors="replace").splitlines():
        words = line.split()
        if words and words[0] != "#":
            yield words


def _is_key(text: str) -> bool:
    """Whether it is Z85 of 32 bytes: every five characters are a number below 2 ** 32."""
    if not _KEY.fullmatch(text):
        return False
    try:
        return len(z85.decode(text)) == 32
    except struct.error:
        return False


def check_public_key(text: str, source: str) -> str:
    """Return a public key as it is. Raises ConfigError."""
    if not _is_key(text):
        raise ConfigError(f"{source}: this is no public key of 40 characters.")
    return text


def secure_client(socket: Socket, keys: KeyPair, server_key: str) -> None:
    """Prepare a socket, before it connects, to speak with whoever holds the secret of `server_key` (Z85)."""
    socket.set(zmq.CURVE_PUBLICKEY, keys.public.encode())
    socket.set(zmq.CURVE_SECRETKEY, keys.secret.encode())
    socket.set(zmq.CURVE_SERVERKEY, server_key.encode())


class KeyGate:
    """Admits clients to the sockets of one context. `keys` are the engine's own, which may connect as well.

    The list of clients is read again when its file changes; who is connected stays. A version that cannot be used
    changes nothing. `refused` counts handshakes. Its own thread answers libzmq, so that a long step delays nobody.
    """

    def __init__(self, context: zmq.Context[Any], keys: KeyPair, clients_file: Path | None) -> None:
        self.refused = 0
        self._keys = keys
        self._own = z85.decode(keys.public)
        self._file = clients_file
        self._version = None if clients_file is None else _version(clients_file)
        self._clients = frozenset[bytes]() if clients_file is None else read_clients(clients_file)
        self._strangers: set[bytes] = set()
        self._socket = context.socket(zmq.REP)
        self._socket.set(zmq.LINGER, 0)
        self._socket.bind(_ZAP_ADDRESS)
        self._thread = threading.Thread(target=self._answer, name="wire-keys", daemon=True)
        self._thread.start()

    def secure(self, socket: Socket) -> None:
        """Prepare a socket of the same context, before it is bound. With an enforced domain libzmq lets nobody in when
        no gate answers."""
        socket.set(zmq.CURVE_SERVER, 1)
        socket.set(zmq.CURVE_PUBLICKEY, self._keys.public.encode())
        socket.set(zmq.CURVE_SECRETKEY, self._keys.secret.encode())
        socket.set(zmq.ZAP_DOMAIN, _ZAP_DOMAIN)
        socket.set(zmq.ZAP_ENFORCE_DOMAIN, 1)

    def admits(self, key: bytes) -> bool:
        """Whether this public key (32 bytes) is known. Belongs to the gate's thread."""
        self._look()
        return key == self._own or key in self._clients

    def _answer(self) -> None:
        """Serve until the context ends."""
        try:
            while True:
                # RFC 27: version, request id, domain, address, identity, mechanism, credentials.
                frames = self._socket.recv_multipart()
                admitted = len(frames) == 7 and frames[5] == b"CURVE" and self.admits(frames[6])
                if not admitted:
                    self._note_stranger(frames)
                status = (b"200", b"OK") if admitted else (b"400", b"unknown key")
                self._socket.send_multipart((b"1.0", frames[1], *status, b"", b""))
        except zmq.ContextTerminated:
            self._socket.close(0)

    def _note_stranger(self, frames: list[bytes]) -> None:
        self.refused += 1
        key = frames[6] if len(frames) == 7 else b""
        if key not in self._strangers and len(self._strangers) < MAX_LOGGED_STRANGERS:
            self._strangers.add(key)
            log.warning("a client at %s was refused: its key is not listed", frames[3].decode(errors="replace"))

    def _look(self) -> None:
        if self._file is None or (version := _version(self._file)) == self._version:
            return
        self._version = version
        try:
            self._clients = read_clients(self._file)
        except ConfigError as error:
            log.error("the list of clients stays as it was: %s", error)


def _version(path: Path) -> tuple[int, ...]:
    try:
        status = os.stat(path)
    except OSError as error:
        return (-1, error.errno or 0)
    return (status.st_mtime_ns, status.st_size, status.st_ino, status.st_dev)
