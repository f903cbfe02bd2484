"""`headrace worker --dp 2` with a real, tiny model, over TCP with keys: tokens, KV events, death, return and drain."""

from __future__ import annotations

import asyncio
from functools import partial
from pathlib import Path

import zmq

from engine.protocol import GenerateRequest, SamplingParams
from engine.wire.client import RemoteEngine
from engine.wire.curve import KeyPair, secure_client
from engine.wire.merge import merge_outputs
from kvstore.events.subscriber import EventSubscriber
from router.supervisor import Supervisor
from tests.support.event_world import KeysView
from tests.support.static_pool import StaticPool, StaticTarget
from tests.support.until import until
from tests.support.wire_requests import collect
from tests.support.worker_process import connections, worker_command

BLOCK_SIZE = 16


def request(name: str, seed: int, count: int = 200) -> GenerateRequest:
    sampling = SamplingParams(seed=seed, max_tokens=count, temperature=0.9, ignore_eos=True)
    return GenerateRequest(request_id=name, prompt_ids=[10 + seed, *range(20, 70)], sampling=sampling)


async def through(supervisor: Supervisor, wanted: GenerateRequest) -> list[int]:
    return merge_outputs([output async for output in supervisor.generate(wanted)]).token_ids


async def test_two_ranks_of_a_real_model_serve_publish_die_and_drain(tmp_path: Path, tiny_model: Path) -> None:
    own, gateway, stranger = KeyPair.new(), KeyPair.new(), KeyPair.new()
    own.write(tmp_path / "key")
    clients = tmp_path / "clients"
    clients.write_text(f"{gateway.public} gateway\n", encoding="ascii")
    flags = {
        "dp": 2,
        "listen": "tcp://127.0.0.1:0",
        "http_port": 0,
        "wire_key_file": tmp_path / "key",
        "wire_clients_file": clients,
        "numerics": "invariant",
        "dtype": "float32",
        "block_size": BLOCK_SIZE,
        "kv_cache_memory": "8MiB",
        "threads": 1,
    }
    with worker_command(tmp_path, str(tiny_model), **flags) as worker:
        record = await worker.ready_ranks(2)
        with connections(record, gateway) as engines, zmq.Context() as context:
            await asyncio.gather(*(engine.wait_ready() for engine in engines))
            outputs = [await collect(engine, request("r", 1)) for engine in engines]
            assert outputs[0].token_ids == outputs[1].token_ids
            await _check_events(record.ranks[0].events, record.ranks[0].events_replay, context, gateway, stranger, own)
            await _check_death(engines, outputs[0].token_ids, worker.cores[0].kill)

            streams = [engine.generate(request("last", 1, 300)) for engine in engines]
            for stream in streams:
                await anext(stream)
            worker.terminate()
            endings = await asyncio.gather(*(_last_reason(stream) for stream in streams))
            assert endings == ["length", "length"]
        assert await worker.exit_code() == 0


async def _last_reason(stream: object) -> str | None:
    reason = None
    async for output in stream:  # type: ignore[attr-defined]
        reason = output.finish_reason
    return reason


async def _check_events(
    address: str | None,
    replay: str | None,
    context: zmq.Context[zmq.Socket[bytes]],
    gateway: KeyPair,
    stranger: KeyPair,
    own: KeyPair,
) -> None:
    """Who is listed learns of the blocks that are cached, and nobody else does."""
    assert address is not None
    views = [KeysView(), KeysView()]
    readers = [
        EventSubscriber(
            address, replay, view, context=context, secure=partial(secure_client, keys=keys, server_key=own.public)
        )
        for view, keys in zip(views, (gateway, stranger), strict=True)
    ]
    for reader in readers:
        reader.open()
    try:
        await until(lambda: readers[0].synced, "the listed reader knows what is held")
        assert len(views[0].keys) >= 250 // BLOCK_SIZE
        assert not readers[1].synced
        assert len(views[1].keys) == 0
    finally:
        for reader in readers:
            await reader.close()


async def _check_death(engines: list[RemoteEngine], calm: list[int], kill: object) -> None:
    """Streams of both ranks end with the tokens of an undisturbed run, although one of the cores is killed."""
    supervisor = Supervisor(StaticPool([StaticTarget(str(n), engine) for n, engine in enumerate(engines)]))
    before = [engine.state().incarnation for engine in engines]
    tasks = [asyncio.create_task(through(supervisor, request(f"rough{n}", 1))) for n in range(4)]
    await until(
        lambda: all(engine.num_running == 2 for engine in engines) or all(task.done() for task in tasks),
        "both ranks have streams",
    )
    kill()  # type: ignore[operator]
    assert await asyncio.gather(*tasks) == [calm] * 4
    await asyncio.gather(*(engine.wait_ready() for engine in engines))
    await until(
        lambda: sum(engine.state().incarnation != old for engine, old in zip(engines, before, strict=True)) == 1,
        "one of them is another process now",
    )
    await asyncio.gather(*(engine.wait_ready() for engine in engines))
