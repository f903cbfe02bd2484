"""A relay in threads that passes on what a server says at a few bytes a second, or cuts it: for callers that block."""

from __future__ import annotations

import socket
import threading

TICK_S = 0.02


class SlowRelay:
    """`port` leads to `upstream_port` of this machine. `bytes_per_s` None is full speed. `cut_after` is how many
    bytes of answers a connection passes on before it is closed, None for all."""

    def __init__(self, upstream_port: int) -> None:
        self._upstream_port = upstream_port
        self.bytes_per_s: int | None = None
        self.cut_after: int | None = None
        self._pace = threading.Event()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._sockets: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def close(self) -> None:
        self._pace.set()
        self._listener.shutdown(socket.SHUT_RDWR)
        self._threads[0].join()
        self._listener.close()
        for sock in self._sockets:
            _shut(sock)
        for thread in self._threads[1:]:
            thread.join()
        for sock in self._sockets:
            sock.close()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            far = socket.create_connection(("127.0.0.1", self._upstream_port))
            self._sockets += [near, far]
            for pair, is_answer in (((near, far), False), ((far, near), True)):
                self._threads.append(threading.Thread(target=self._pump, args=(*pair, is_answer)))
                self._threads[-1].start()

    def _pump(self, source: socket.socket, sink: socket.socket, is_answer: bool) -> None:
        answered = 0
        try:
            while data := source.recv(65536):
                answered += len(data)
                if is_answer and self.cut_after is not None and answered > self.cut_after:
                    sink.sendall(data[: self.cut_after])
                    return
                while data:
                    now, data = self._portion(data) if is_answer else (data, b"")
                    sink.sendall(now)
        except OSError:
            return  # one end has gone
        finally:
            _shut(source)
            _shut(sink)

    def _portion(self, data: bytes) -> tuple[bytes, bytes]:
        rate = self.bytes_per_s
        if rate is None or self._pace.wait(TICK_S):
            return data, b""
        count = max(1, int(rate * TICK_S))
        return data[:count], data[count:]


def _shut(sock: socket.socket) -> None:
    try:
        sock.shutdown(socket.SHUT_RDWR)
    except OSError:
        return  # it is shut already
