"""Engines of other makes in a fleet: our own application on real ports stands in for them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import msgspec
import pytest
import zmq

import server.fleet.link
from engine.protocol import GenerateRequest, Grammar, SamplingParams
from kvstore.events.codec import encode_batch
from kvstore.events.messages import BlockStored, EventBatch
from kvstore.keys import PUBLIC_SCOPE, KeyChain
from router.registry.base import WorkerRecord
from router.values import Query
from server.config import RoutingConfig
from server.fleet.fleet import Fleet
from server.fleet.model_pool import ModelPool
from server.foreign.settings import ForeignSettings
from server.health import ServiceState
from tests.support.api_server import serving
from tests.support.fake_engine import FakeEngine, FakeReadiness, Gate
from tests.support.listed_registry import ListedRegistry
from tests.support.tiny_models import CHAT_TEMPLATE
from tests.support.tiny_text import byte_ids, tokenizer_json
from tests.support.until import until

MODEL = "tiny"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A directory with the text of tests/support/tiny_text.py and no weights."""
    (tmp_path / "config.json").write_text('{"vocab_size": 267, "eos_token_id": 2, "max_position_embeddings": 512}')
    (tmp_path / "tokenizer.json").write_bytes(tokenizer_json())
    (tmp_path / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    return tmp_path


@asynccontextmanager
async def fleet_of(record: WorkerRecord, source: Path, registry: ListedRegistry | None = None) -> AsyncIterator[Fleet]:
    registry = registry or ListedRegistry(record)
    fleet = Fleet(registry, RoutingConfig(), foreign=ForeignSettings(tokenizers={MODEL: str(source)}))
    await fleet.start()
    try:
        await fleet.opened.wait()
        yield fleet
    finally:
        await fleet.close()


@contextmanager
def publisher() -> Iterator[tuple[zmq.Socket[bytes], str]]:
    with zmq.Context() as context, context.socket(zmq.PUB) as socket:
        port = socket.bind_to_random_port("tcp://127.0.0.1")
        yield socket, f"tcp://127.0.0.1:{port}"


async def test_kv_events_of_another_make_reach_the_index(source: Path) -> None:
    tokens = byte_ids(b"x" * 128)
    stored = BlockStored(block_hashes=[7, 8], parent_block_hash=None, token_ids=tokens, block_size=64, medium="GPU")
    with publisher() as (socket, address):
        async with serving(FakeEngine()) as server:
            record = WorkerRecord(
                worker_id="w", model=MODEL, http_url=server.url, dialect="openai", events=address, events_topic="kv"
            )
            async with fleet_of(record, source) as fleet:
                pool, number = fleet.pools[MODEL], 0
                keys = tuple(KeyChain(PUBLIC_SCOPE, 64).extend(tokens))
                query = Query(request_id="q", prompt_tokens=128, keys=keys, block_size=64)

                def is_known() -> bool:
                    # Whoever subscribes hears what is published from then on: it is told until it is heard.
                    nonlocal number
                    batch = encode_batch(EventBatch(ts=float(number), events=[stored]))
                    socket.send_multipart([b"kv", number.to_bytes(8, "big"), batch])
                    number += 1
                    return pool.feed.index.lookup(query).get("w/0") is not None

                await until(is_known, "its blocks are known")
                assert pool.feed.index.lookup(query)["w/0"].device == 127, "the last token is computed in any case"


async def test_what_another_make_cannot_do_is_known_beforehand(source: Path) -> None:
    async with serving(FakeEngine()) as server:
        record = WorkerRecord(worker_id="w", model=MODEL, http_url=server.url, dialect="auto")
        async with fleet_of(record, source) as fleet:
            (link,) = fleet.links
            plain = GenerateRequest(request_id="r", prompt_ids=[5], sampling=SamplingParams(max_tokens=3))
            resumed = msgspec.structs.replace(plain, grammar=Grammar("regex", "a"), resume_ids=[6])
            assert [link.takes(one) for one in (plain, resumed)] == [True, False]
            (model,) = fleet.served()
            assert model.info.max_model_len == 512
            assert link.digest is not None


async def test_a_server_that_is_away_keeps_nobody_busy(source: Path) -> None:
    state = FakeReadiness()
    async with serving(FakeEngine(), state=state) as server:
        record = WorkerRecord(worker_id="w", model=MODEL, http_url=server.url, dialect="openai")
        async with fleet_of(record, source) as fleet:
            (link,) = fleet.links
            await until(lambda: link.engine.is_ready, "it serves")
            state.become(ServiceState("restarting"))
            await until(lambda: link.engine.state().state == "dead", "it is gone")
            changes: list[object] = []
            link._on_change = lambda *about: changes.append(about)  # type: ignore[attr-defined]
            for _ in range(100):
                await asyncio.sleep(0)
            assert len(changes) <= 1, "nothing has changed since"


@pytest.mark.parametrize("silent", [False, True], ids=["speaks", "silent"])
async def test_a_server_that_is_no_longer_listed_ends_what_it_has(
    source: Path, silent: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unless it is silent: then its streams are not waited for any longer."""
    monkeypatch.setattr(server.fleet.link, "RETIRE_SILENT_LOOKS", 3 if silent else 10_000)
    engine = FakeEngine()
    engine.gate = Gate(after=2)
    async with serving(engine) as server_of_others:
        record = WorkerRecord(worker_id="w", model=MODEL, http_url=server_of_others.url, dialect="openai")
        registry = ListedRegistry(record)
        async with fleet_of(record, source, registry) as fleet:
            pool = fleet.pools[MODEL]
            (link,) = fleet.links
            await until(lambda: link.engine.is_ready, "it serves")
            request = GenerateRequest(
                request_id="r", prompt_ids=byte_ids(b"hello"), sampling=SamplingParams(max_tokens=4, seed=1)
            )
            stream = asyncio.create_task(_tokens(pool, request))
            await asyncio.wait_for(engine.gate.reached.wait(), 60)
            registry.list()
            await until(lambda: fleet.links == [], "nothing new goes there")
            if silent:
                await until(lambda: not engine.running, "its stream was left")
                stream.cancel()
                return
            assert not stream.done()
            engine.gate.opened.set()
            assert await asyncio.wait_for(stream, 60) == engine.echo(request)[:4]


async def _tokens(pool: ModelPool, request: GenerateRequest) -> list[int]:
    return [token async for output in pool.supervisor.generate(request) for token in output.token_ids]


async def test_without_a_tokenizer_it_is_told_that_one_is_needed(caplog: pytest.LogCaptureFixture) -> None:
    async with serving(FakeEngine()) as server:
        record = WorkerRecord(worker_id="w", model=MODEL, http_url=server.url, dialect="openai")
        fleet = Fleet(ListedRegistry(record), RoutingConfig())
        await fleet.start()
        try:
            await until(lambda: "Give --tokenizer" in caplog.text, "it is told")
            assert fleet.pools[MODEL].links == {}
        finally:
            await fleet.close()
