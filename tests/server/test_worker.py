"""`headrace worker` as real processes with scripted engines: restarts, drain, admin, keys, and its record."""

from __future__ import annotations

import asyncio
import random
import signal
import socket
from collections.abc import AsyncIterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from engine.config import EngineConfig
from engine.errors import DrainingError, EngineDiedError
from engine.protocol import TokenOutput
from engine.wire.client import REFUSED_MESSAGE, RemoteEngine
from engine.wire.curve import KeyPair
from engine.wire.merge import merge_outputs
from router.registry.open import open_registry
from server.config import CoresConfig, WorkerConfig
from tests.support.holdable import COMPUTE, HOLD, LET_GO
from tests.support.scripted_engine import scripted_tokens
from tests.support.until import until
from tests.support.wire_requests import collect, request
from tests.support.worker_process import connections, worker_process

ENDLESS = 1_000_000
SCRIPT = EngineConfig(model="ok", max_running=4096)


def config(**fields: object) -> WorkerConfig:
    free: dict[str, object] = {"engine": SCRIPT, "listen": "tcp://127.0.0.1:0", "http_port": 0}
    return WorkerConfig(**{**free, **fields})  # type: ignore[arg-type]


async def rest_of(stream: AsyncIterator[TokenOutput]) -> list[TokenOutput]:
    return [output async for output in stream]


async def test_a_killed_core_comes_back_at_its_address_and_the_other_rank_goes_on(tmp_path: Path) -> None:
    with worker_process(tmp_path, config(dp=2)) as worker:
        before = await worker.ready_ranks(2)
        assert [rank.dp_rank for rank in before.ranks] == [0, 1]
        with connections(before) as engines:
            await asyncio.gather(*(engine.wait_ready() for engine in engines))
            streams = [engine.generate(request(f"r{n}", seed=n, count=ENDLESS)) for n, engine in enumerate(engines)]
            outputs = [[await anext(stream)] for stream in streams]
            rests = [asyncio.create_task(rest_of(stream)) for stream in streams]
            worker.cores[0].kill()
            (ended,), _ = await asyncio.wait(rests, return_when=asyncio.FIRST_COMPLETED)
            assert isinstance(ended.exception(), EngineDiedError)
            lost = rests.index(ended)
            kept = 1 - lost
            await engines[kept].finish(f"r{kept}", 0)
            whole = merge_outputs([*outputs[kept], *await rests[kept]])
            assert whole.finish_reason == "stop"
            assert whole.token_ids == scripted_tokens(kept, len(whole.token_ids))

            after = await worker.ready_ranks(2)
            await engines[lost].wait_ready()
            assert (await collect(engines[lost], request(seed=5))).token_ids == scripted_tokens(5, 20)
        assert after.incarnation == before.incarnation
        assert after.ranks[kept] == before.ranks[kept]
        assert after.ranks[lost].wire == before.ranks[lost].wire
        assert after.ranks[lost].incarnation != before.ranks[lost].incarnation
        assert "starting it again" in worker.text


STRICT = CoresConfig(unready_after_s=1.0, restart_after_s=2.0)


@pytest.mark.parametrize("harm", [HOLD, signal.SIGSTOP], ids=["stuck", "stopped"])
async def test_a_core_whose_loop_does_not_move_makes_it_unready_and_is_replaced(
    tmp_path: Path, harm: signal.Signals
) -> None:
    with worker_process(tmp_path, config(cores=STRICT)) as worker:
        before = await worker.ready_ranks(1)
        with connections(before) as (engine,):
            await engine.wait_ready()
            stream = asyncio.create_task(collect(engine, request(count=ENDLESS)))
            await until(lambda: engine.num_running == 1, "it runs")
            worker.cores[0].send_signal(harm)

            async def is_unready() -> bool:
                return (await worker.get("/ready"))[0] == 503

            await until(is_unready, "it says that it cannot serve")
            with pytest.raises(EngineDiedError):
                await stream
            after = await worker.ready_ranks(1)
            assert (await worker.get("/ready"))[0] == 200
            assert after.ranks[0].wire == before.ranks[0].wire
            assert after.ranks[0].incarnation != before.ranks[0].incarnation
            await engine.wait_ready()
            assert (await collect(engine, request(seed=5))).token_ids == scripted_tokens(5, 20)
        assert "is stuck: it is killed" in worker.text


async def test_a_core_that_gets_on_by_itself_is_ready_again(tmp_path: Path) -> None:
    cores = CoresConfig(unready_after_s=1.0, restart_after_s=None)
    with worker_process(tmp_path, config(cores=cores)) as worker:
        before = await worker.ready_ranks(1)
        (core,) = worker.cores
        for harm, wake in ((HOLD, LET_GO), (signal.SIGSTOP, signal.SIGCONT)):
            core.send_signal(harm)
            await worker.ready_ranks(0)
            assert (await worker.record()).state == "starting"
            core.send_signal(wake)
            await worker.ready_ranks(1)
        assert (await worker.record()).ranks == before.ranks


async def test_long_steps_and_a_suspended_machine_are_no_fault(tmp_path: Path) -> None:
    """Each lasts longer than a core may be stuck."""
    lasting_s = 3.0
    with worker_process(tmp_path, config(cores=STRICT)) as worker:
        before = await worker.ready_ranks(1)
        (core,) = worker.cores
        core.send_signal(COMPUTE)
        await asyncio.sleep(lasting_s)  # the step is as long as that: nothing is expected to have happened
        assert (await worker.get("/ready"))[0] == 200
        core.send_signal(LET_GO)
        for process in (worker.process, core):
            process.send_signal(signal.SIGSTOP)
        await asyncio.sleep(lasting_s)
        for process in (core, worker.process):
            process.send_signal(signal.SIGCONT)
        with connections(before) as (engine,):
            await engine.wait_ready()
            assert (await collect(engine, request(seed=5))).token_ids == scripted_tokens(5, 20)
        assert (await worker.record()).ranks == before.ranks
        assert "has not answered" not in worker.text


async def test_sigterm_lets_what_runs_finish_and_the_record_says_so(tmp_path: Path) -> None:
    with worker_process(tmp_path, config(role="decode", drain_timeout_s=600)) as worker:
        record = await worker.ready_ranks(1)
        assert (record.state, record.role) == ("ready", "decode")
        assert record.compatibility
        assert record.pid == worker.process.pid
        with connections(record) as (engine,):
            await engine.wait_ready()
            stream = engine.generate(request(count=ENDLESS))
            outputs = [await anext(stream)]
            worker.terminate()
            await until(lambda: engine.state().state == "draining", "the engine drains")
            assert (await worker.record()).state == "draining"
            assert (await worker.get("/ready"))[0] == 503
            assert (await worker.get("/health"))[0] == 200
            with pytest.raises(DrainingError):
                await collect(engine, request("late"))
            await engine.finish("r", 0)
            outputs += await rest_of(stream)
            assert outputs[-1].finish_reason == "stop"
            whole = merge_outputs(outputs).token_ids
            assert whole == scripted_tokens(1, len(whole))
        assert await worker.exit_code() == 0


async def test_a_second_signal_ends_it_at_once(tmp_path: Path) -> None:
    with worker_process(tmp_path, config(drain_timeout_s=3600)) as worker:
        record = await worker.ready_ranks(1)
        with connections(record) as (engine,):
            await engine.wait_ready()
            stream = engine.generate(request(count=ENDLESS))
            await anext(stream)
            worker.terminate()
            await until(lambda: engine.state().state == "draining", "the engine drains")
            worker.terminate()
            assert await worker.exit_code() == 128 + signal.SIGTERM
            with pytest.raises(EngineDiedError):
                await rest_of(stream)


async def test_an_operator_drains_it_and_resets_caches_over_http(tmp_path: Path) -> None:
    with worker_process(tmp_path, config(dp=2)) as worker:
        await worker.ready_ranks(2)
        assert (await worker.post("/admin/reset_prefix_cache"))[0] == 200
        assert (await worker.get("/admin/drain"))[0] == 405
        assert (await worker.post("/nothing"))[0] == 404
        assert (await worker.post("/admin/drain"))[0] == 200
        assert (await worker.record()).state == "draining"
        worker.cores[0].kill()

        await until(lambda: "starting it again" in worker.text, "the core is missed")
        with connections(await worker.record()) as engines:
            await until(
                lambda: all(engine.state().state == "draining" for engine in engines), "the core that is new drains too"
            )
        assert (await worker.record()).state == "draining"


async def test_a_model_that_cannot_be_loaded_ends_the_worker_with_its_reason(tmp_path: Path) -> None:
    with worker_process(tmp_path, config(engine=EngineConfig(model="bad-model"), dp=2)) as worker:
        assert await worker.exit_code() == 1  # the command line makes 2 of a ModelError
        assert "failed: The file weights.bin ends too early." in worker.text


async def test_garbage_and_silent_connections_at_all_ports_harm_nobody(tmp_path: Path) -> None:
    rng = random.Random(5)
    with worker_process(tmp_path, config()) as worker, ExitStack() as strangers:
        record = await worker.ready_ranks(1)
        (rank,) = record.ranks
        (core,) = worker.cores
        places = [rank.wire, rank.events, rank.events_replay, record.http_url]
        ports = [int(place.rpartition(":")[2]) for place in places if place is not None]
        greeting = b"\xff\x00\x00\x00\x00\x00\x00\x00\x01\x7f\x03\x01NULL".ljust(64, b"\0")
        for port in ports:
            for number in range(20):
                stranger = strangers.enter_context(socket.create_connection(("127.0.0.1", port)))
                if number % 4:  # the others say nothing at all
                    stranger.sendall((greeting if number % 2 else b"") + rng.randbytes(rng.randint(1, 2000)))
                if number % 3:
                    stranger.close()
        with connections(record) as (engine,):
            await engine.wait_ready()
            assert (await collect(engine, request())).token_ids == scripted_tokens(1, 20)
        assert (await worker.get("/ready"))[0] == 200
        assert worker.cores == [core]


async def test_with_keys_only_listed_gateways_reach_it(tmp_path: Path) -> None:
    own, gateway, stranger = KeyPair.new(), KeyPair.new(), KeyPair.new()
    own.write(tmp_path / "worker.key")
    (tmp_path / "clients").write_text(f"{gateway.public} gateway\n", encoding="ascii")
    secured = config(wire_key_file=str(tmp_path / "worker.key"), wire_clients_file=str(tmp_path / "clients"))
    with worker_process(tmp_path, secured) as worker:
        record = await worker.ready_ranks(1)
        assert record.public_key == own.public
        with connections(record, gateway) as (friend,), connections(record, stranger) as (other,):
            await friend.wait_ready()
            assert (await collect(friend, request())).token_ids == scripted_tokens(1, 20)
            await until(lambda: other.state().message == REFUSED_MESSAGE, "the stranger is refused")
            assert other.latest_load is None
            nobody = RemoteEngine(record.ranks[0].wire)
            nobody.open()
            try:
                await until(lambda: nobody.state().message == REFUSED_MESSAGE, "who has no key is refused")
            finally:
                nobody.close()

            async def is_counted() -> bool:
                text = (await worker.get("/metrics"))[1]
                line = 'headrace_wire_total{dp_rank="0",event="refused_keys"} '
                return any(sample.startswith(line) and not sample.endswith(" 0.0") for sample in text.splitlines())

            await until(is_counted, "refusals are counted")
        assert own.secret not in worker.text


async def test_a_registry_that_knows_its_port_finds_all_about_it(tmp_path: Path) -> None:
    with worker_process(tmp_path, config(worker_id="w1")) as worker:
        registry = open_registry(f"static:{await worker.url()}")
        try:
            async for records in registry.watch():
                if records and records[0].state == "ready":
                    break
            assert records[0].worker_id == "w1"
            with connections(records[0]) as (engine,):
                await engine.wait_ready()
                assert (await collect(engine, request())).token_ids == scripted_tokens(1, 20)
        finally:
            await registry.close()
