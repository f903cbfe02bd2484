"""What a relayed token costs below the HTTP layer: `python -m benchmarks.gateway_relay`, a RelayTask as JSON on stdin.

Answers every line with one of JSON: CPU seconds and tokens. "fleet" is all that a gateway has below its HTTP layer:
registry, links, pool, policy, supervisor. "frames" reads the same messages from the same engines with as little as can
be: a socket, the decoder and a sum.
"""

from __future__ import annotations

import asyncio
import sys
import time
from typing import Literal

import msgspec
import uvloop
import zmq

from engine.protocol import GenerateRequest, SamplingParams
from engine.wire import messages as wire
from router.registry.base import RankAddress, WorkerRecord
from server.config import RoutingConfig
from server.fleet.fleet import Fleet
from server.fleet.local import LocalRegistry

MODEL = "fake"
PROMPT_TOKENS = 450


class RelayTask(msgspec.Struct, frozen=True, kw_only=True):
    """`streams` at once, `tokens` each, from the engines at `addresses`."""

    kind: Literal["fleet", "frames"]
    addresses: tuple[str, ...]
    streams: int
    tokens: int


class Spent(msgspec.Struct, frozen=True, kw_only=True):
    """CPU seconds of the whole process, and how many of them the kernel used for it."""

    cpu_s: float
    elapsed_s: float
    tokens: int


def records_at(addresses: tuple[str, ...]) -> tuple[WorkerRecord, ...]:
    return tuple(
        WorkerRecord(
            worker_id=f"engine-{number}",
            incarnation="local",
            model=MODEL,
            ranks=(RankAddress(dp_rank=0, wire=address),),
        )
        for number, address in enumerate(addresses)
    )


def _request(task: RelayTask, number: int) -> GenerateRequest:
    prompt_ids = [1000 + (number * 7919 + index) % 40_000 for index in range(PROMPT_TOKENS)]
    sampling = SamplingParams(temperature=0.0, max_tokens=task.tokens, ignore_eos=True)
    return GenerateRequest(request_id=f"{time.monotonic_ns()}-{number}", prompt_ids=prompt_ids, sampling=sampling)


async def _through_fleet(task: RelayTask) -> Spent:
    fleet = Fleet(LocalRegistry(records_at(task.addresses)), RoutingConfig())
    await fleet.start()
    try:
        await fleet.opened.wait()
        for link in fleet.links:
            await link.engine.wait_ready()
        supervisor = fleet.pools[MODEL].supervisor

        async def read(request: GenerateRequest) -> int:
            return sum([len(output.token_ids) async for output in supervisor.generate(request)])

        requests = [_request(task, number) for number in range(task.streams)]
        begun_s, began_s = time.process_time(), time.monotonic()
        counts = await asyncio.gather(*(read(request) for request in requests))
        return Spent(cpu_s=time.process_time() - begun_s, elapsed_s=time.monotonic() - began_s, tokens=sum(counts))
    finally:
        await fleet.close()


def _frames_alone(task: RelayTask) -> Spent:
    """Blocking sockets and no loop: nothing that reads these messages in Python takes less."""
    encode, decode = msgspec.msgpack.Encoder().encode, msgspec.msgpack.Decoder(wire.EngineMessage).decode
    with zmq.Context() as context:
        sockets = [context.socket(zmq.DEALER) for _ in task.addresses]
        poller = zmq.Poller()
        for socket, address in zip(sockets, task.addresses, strict=True):
            socket.connect(address)
            socket.send(encode(wire.Hello(wire.WIRE_VERSION, 1024)))
            poller.register(socket, zmq.POLLIN)
            while not isinstance(decode(socket.recv()), wire.Status):
                pass
        requests = [_request(task, number) for number in range(task.streams)]
        begun_s, began_s, tokens, ended = time.process_time(), time.monotonic(), 0, 0
        for number, request in enumerate(requests):
            sockets[number % len(sockets)].send(encode(wire.Submit(request)))
        while ended < task.streams:
            for socket, _ in poller.poll():
                message = decode(socket.recv())
                if isinstance(message, wire.Outputs):
                    socket.send(encode(wire.Credit(1)))
                    tokens += sum(len(output.token_ids) for output in message.batch)
                    ended += sum(output.finish_reason is not None for output in message.batch)
        spent = Spent(cpu_s=time.process_time() - begun_s, elapsed_s=time.monotonic() - began_s, tokens=tokens)
        for socket in sockets:
            socket.close(0)
    return spent


def main() -> None:
    decoder, out = msgspec.json.Decoder(RelayTask), sys.stdout.buffer
    for line in sys.stdin.buffer:
        task = decoder.decode(line)
        if task.kind == "frames":
            spent = _frames_alone(task)
        else:
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                spent = runner.run(_through_fleet(task))
        out.write(msgspec.json.encode(spent) + b"\n")
        out.flush()


if __name__ == "__main__":
    main()
