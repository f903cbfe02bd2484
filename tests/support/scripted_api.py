"""A stand-in for the API process, for tests of the launcher: `python -m tests.support.scripted_api`.

Speaks a line protocol on the inherited socket: a client sends "seed count", and gets a token per line, then "end".
"pid" answers the process id, "engine" the engine's incarnation, any GET a success. SIGTERM ends it after its streams.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
import uuid

import msgspec

from engine.errors import HeadraceError
from engine.protocol import GenerateRequest, SamplingParams
from engine.wire.client import RemoteEngine
from router.supervisor import Supervisor
from server.api_spec import ApiSpec
from tests.support.static_pool import StaticPool, StaticTarget


class ScriptedApi:
    def __init__(self, spec: ApiSpec) -> None:
        self.engines = [RemoteEngine(worker.ranks[0].wire) for worker in spec.workers]
        self.supervisor = Supervisor(StaticPool([StaticTarget(engine.address, engine) for engine in self.engines]))
        self.listener = socket.socket(fileno=spec.listen_fd)
        self.drain_timeout_s = spec.config.drain_timeout_s
        self.running: set[asyncio.Task[None]] = set()
        self.stop = asyncio.Event()

    async def run(self) -> None:
        for engine in self.engines:
            engine.open()
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, self.stop.set)
        server = await asyncio.start_server(self.serve, sock=self.listener)
        await self.stop.wait()
        server.close()
        if self.running:
            await asyncio.wait(self.running, timeout=self.drain_timeout_s)
        os._exit(0)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self.running.add(task)
        try:
            match (await reader.readline()).split():
                case [b"pid"]:
                    writer.write(f"{os.getpid()}\n".encode())
                case [b"engine"]:
                    writer.write(f"{(await self.engines[0].wait_ready()).incarnation}\n".encode())
                case [b"GET", *_]:
                    writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
                case [seed, count]:
                    await self.stream(int(seed), int(count), writer)
        finally:
            writer.close()
            self.running.discard(task)

    async def stream(self, seed: int, count: int, writer: asyncio.StreamWriter) -> None:
        for engine in self.engines:
            await engine.wait_ready()
        sampling = SamplingParams(seed=seed, max_tokens=count)
        request = GenerateRequest(request_id=uuid.uuid4().hex, prompt_ids=[1], sampling=sampling)
        try:
            async for output in self.supervisor.generate(request):
                writer.write(b"".join(b"%d\n" % token for token in output.token_ids))
                await writer.drain()
            writer.write(b"end\n")
        except HeadraceError as error:
            writer.write(f"{type(error).__name__}\n".encode())


async def main() -> None:
    await ScriptedApi(msgspec.json.decode(sys.stdin.readline(), type=ApiSpec)).run()


if __name__ == "__main__":
    asyncio.run(main())
