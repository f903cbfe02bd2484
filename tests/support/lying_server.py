"""A server that speaks RESP, answers whatever opens a tier in good faith, and lies about the rest as it is told to."""

from __future__ import annotations

import socketserver
import threading
from collections.abc import Iterator
from contextlib import contextmanager

HONEST = {
    b"INFO": b"$-1\r\n",
    b"CONFIG": b"-ERR no\r\n",
    b"HGET": b"$-1\r\n",
    b"HGETALL": b"*0\r\n",
    b"UNLINK": b":0\r\n",
}


class LyingServer(socketserver.ThreadingTCPServer):
    """`answers` are by command; what has none is an error. An answer that is an iterator is sent until it ends or the
    client goes away; `cut` closes the connection behind each answer."""

    daemon_threads = True
    allow_reuse_address = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.answers: dict[bytes, bytes | Iterator[bytes]] = {}
        self.cut = False

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.server_address[1]}"


class _Handler(socketserver.StreamRequestHandler):
    server: LyingServer

    def handle(self) -> None:
        try:
            while line := self.rfile.readline():
                arguments = [self._argument() for _ in range(int(line[1:]))]
                self._answer(arguments[0].upper())
                if self.server.cut and arguments[0].upper() in self.server.answers:
                    return
        except OSError:
            return  # the client has had enough

    def _argument(self) -> bytes:
        size = int(self.rfile.readline()[1:])
        return self.rfile.read(size + 2)[:-2]

    def _answer(self, command: bytes) -> None:
        answer = self.server.answers.get(command, HONEST.get(command, b"-ERR not today\r\n"))
        for part in (answer,) if isinstance(answer, bytes) else answer:
            self.wfile.write(part)


@contextmanager
def lying_server() -> Iterator[LyingServer]:
    with LyingServer() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()
