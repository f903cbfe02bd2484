"""`OpenAIWorker` in front of our own server, over real HTTP: token ids in, token ids out."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import aiohttp
import msgspec
import pytest

from engine.errors import (
    ConfigError,
    DeadlineError,
    DrainingError,
    EngineDiedError,
    EngineError,
    EngineSilentError,
    HeadraceError,
    LoadingError,
    PressureError,
    RequestError,
    UnsupportedError,
)
from engine.protocol import GenerateRequest, Grammar, SamplingParams, TokenOutput
from router.supervisor import Supervisor
from server.foreign.errors import error_of_answer, error_of_body
from server.foreign.facts import PROBE_TEXTS, learn
from server.foreign.info import foreign_info
from server.foreign.openai_ids import OpenAIIds
from server.foreign.registry import detect, dialect_named
from server.foreign.settings import tokenizers_of
from server.foreign.worker import OpenAIWorker
from server.health import ServiceState
from tests.support.api_server import ApiServer, serving
from tests.support.fake_engine import FakeEngine, FakeReadiness, Gate
from tests.support.static_pool import StaticPool, StaticTarget
from tests.support.tiny_text import EOS_ID, VOCAB_SIZE, byte_ids
from tests.support.until import until


def tiny_foreign_info(engine: FakeEngine, dialect: str = "openai"):  # type: ignore[no-untyped-def]  # noqa: ANN201
    text = engine.info.text
    return foreign_info("tiny", dialect, text, max_model_len=512, vocab_size=VOCAB_SIZE, eos_ids=(EOS_ID,))


def request(request_id: str = "r", **fields: object) -> GenerateRequest:
    sampling = {"seed": 1, "max_tokens": 100} | {
        name: fields.pop(name) for name in list(fields) if name in SamplingParams.__struct_fields__
    }
    plain: dict[str, object] = {"prompt_ids": byte_ids(b"Hi there"), "sampling": SamplingParams(**sampling)}  # type: ignore[arg-type]
    return GenerateRequest(request_id=request_id, **{**plain, **fields})  # type: ignore[arg-type]


@asynccontextmanager
async def worker_for(engine: FakeEngine, url: str) -> AsyncIterator[OpenAIWorker]:
    worker = OpenAIWorker(url, OpenAIIds(), tiny_foreign_info(engine), engine.assets)
    worker.open()
    try:
        yield worker
    finally:
        await worker.close()


@asynccontextmanager
async def both() -> AsyncIterator[tuple[FakeEngine, ApiServer, OpenAIWorker]]:
    engine = FakeEngine()
    async with serving(engine) as server, worker_for(engine, server.url) as worker:
        await worker.wait_ready()
        yield engine, server, worker


async def outputs_of(worker: OpenAIWorker, asked: GenerateRequest) -> list[TokenOutput]:
    return [output async for output in worker.generate(asked)]


def ids_of(outputs: list[TokenOutput]) -> list[int]:
    offsets = [output.offset for output in outputs]
    assert offsets == sorted(offsets)
    return [token for output in outputs for token in output.token_ids]


async def test_token_ids_pass_unchanged_whatever_text_they_make() -> None:
    async with both() as (engine, _, worker):
        said = byte_ids("é中🙂 text".encode()) + byte_ids(b"\xff\xfe half a \xf0\x9f")
        engine.reply = lambda asked: said
        for cuts in ([1], [2, 3], [100]):
            engine.cuts = cuts
            outputs = await outputs_of(worker, request())
            assert ids_of(outputs) == [*said, EOS_ID]
            assert (outputs[-1].finish_reason, outputs[-1].stop_token) == ("stop", EOS_ID)
            assert outputs[0].cached is not None
        assert engine.seen[-1].prompt_ids == byte_ids(b"Hi there")
        outputs = await outputs_of(worker, request(max_tokens=3))
        assert ids_of(outputs) == said[:3]
        assert (outputs[-1].finish_reason, outputs[-1].stop_token) == ("length", None)
        load = await worker.load()
        assert load.requests_total == {"stop": 3, "length": 1}
        assert (load.running, load.output_tokens_total) == (0, 3 * (len(said) + 1) + 3)


async def test_sampling_parameters_arrive() -> None:
    async with both() as (engine, _, worker):
        asked = request(
            temperature=0.5,
            top_p=0.9,
            top_k=7,
            min_p=0.1,
            seed=-5,
            max_tokens=9,
            min_tokens=2,
            stop_token_ids=(40, 41),
            ignore_eos=True,
            presence_penalty=0.5,
            frequency_penalty=-0.5,
            repetition_penalty=1.5,
            logit_bias={42: -1.5},
            allowed_token_ids=(40, 41, 42),
        )
        await outputs_of(worker, asked)
        assert engine.seen[-1].sampling == asked.sampling
        plain = request(temperature=0.0)
        await outputs_of(worker, plain)
        assert engine.seen[-1].sampling == plain.sampling
        await outputs_of(worker, request(grammar=Grammar("choice", '["a", "b"]'), priority=3, cache_scope=b"s" * 32))
        seen = engine.seen[-1]
        assert (seen.grammar, seen.priority) == (Grammar("choice", '["a", "b"]'), 3)
        assert seen.cache_scope != plain.cache_scope


@pytest.mark.parametrize("alternatives", [0, 3])
async def test_logprobs_come_by_ids(alternatives: int) -> None:
    async with both() as (engine, _, worker):
        said = byte_ids("a🙂b".encode())
        engine.reply = lambda asked: said
        outputs = await outputs_of(worker, request(logprobs=alternatives))
        assert ids_of(outputs) == [*said, EOS_ID]
        told = [entry for output in outputs for entry in output.logprobs or ()]
        expected = [engine.logprobs(token, alternatives) for token in [*said, EOS_ID]]
        # Streams of other servers do not tell ranks.
        assert told == [msgspec.structs.replace(entry, rank=None) for entry in expected]
        assert -math.inf not in [entry.logprob for entry in told]


async def test_resumed_tokens_are_prompt_to_the_server_and_output_to_us() -> None:
    async with both() as (engine, _, worker):
        engine.reply = lambda asked: byte_ids(b"rest")
        outputs = await outputs_of(
            worker, request(resume_ids=byte_ids(b"begun "), max_tokens=8, min_tokens=7, attempt=2)
        )
        assert outputs[0].offset == 6
        assert ids_of(outputs) == byte_ids(b"re")
        assert {output.attempt for output in outputs} == {2}
        seen = engine.seen[-1]
        assert seen.prompt_ids == byte_ids(b"Hi therebegun ")
        assert (seen.sampling.max_tokens, seen.sampling.min_tokens) == (2, 1)


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt_logprobs": 1},
        {"bad_words": ((5,),)},
        {"mode": "prefill_only"},
        {"max_tokens": 0},
        {"resume_ids": [5], "grammar": Grammar("regex", "a")},
        {"resume_ids": [5], "presence_penalty": 1.0},
    ],
)
async def test_what_cannot_be_asked_for_is_refused(fields: dict[str, object]) -> None:
    async with both() as (engine, _, worker):
        with pytest.raises(UnsupportedError):
            await outputs_of(worker, request(**fields))
        assert not engine.seen


async def test_ends_from_this_side_close_the_connection() -> None:
    async with both() as (engine, _, worker):
        engine.reply = lambda asked: byte_ids(b"abcdef")
        engine.gate = Gate(after=2)
        # Left, aborted, finished, and out of time.
        stream = worker.generate(request("left"))
        await anext(stream)
        await stream.aclose()  # type: ignore[attr-defined]
        for name, end, reason in (
            ("aborted", worker.abort("aborted"), "abort"),
            ("finished", worker.finish("finished", 1), "stop"),
        ):
            stream = worker.generate(request(name))
            first = await anext(stream)
            waiting = asyncio.create_task(anext(stream))
            second = None
            while second is None or second.finish_reason is None:
                if not waiting.done():
                    await end
                second = await waiting
                waiting = asyncio.create_task(anext(stream))
            assert second.finish_reason == reason
            assert first.finish_reason is None
            with pytest.raises(StopAsyncIteration):
                await waiting
        with pytest.raises(DeadlineError):
            await outputs_of(worker, request("late", deadline_unix_s=time.time() + 0.3))
        await engine.until(lambda: not engine.running)
        assert len(engine.aborted) == 4
        load = await worker.load()
        assert load.running == 0
        await worker.abort("unknown")


async def test_pressure_is_told_apart_from_faults_and_from_the_clients_errors() -> None:
    async with both() as (engine, _, worker):
        engine.failure = PressureError("full", retry_after_s=7)
        with pytest.raises(PressureError) as pressure:
            await outputs_of(worker, request("a"))
        assert pressure.value.retry_after_s == 7
        engine.failure = EngineDiedError("gone")
        with pytest.raises(PressureError):  # our server asks to come again: it restarts its engine itself
            await outputs_of(worker, request("b"))
        engine.failure = None
        with pytest.raises(RequestError) as refused:
            await outputs_of(worker, request("c", prompt_ids=[VOCAB_SIZE + 5]))
        assert type(refused.value) is RequestError
        assert "token" in str(refused.value)
        engine.failure, engine.fail_at = EngineDiedError("gone"), 2
        with pytest.raises(EngineDiedError):
            await outputs_of(worker, request("d"))
        engine.failure = None
        assert await outputs_of(worker, request("e"))


async def test_a_server_that_goes_away_ends_streams_and_comes_back() -> None:
    engine = FakeEngine()
    engine.reply = lambda asked: byte_ids(b"abcdef")
    engine.gate = Gate(after=2)
    async with serving(engine) as server, worker_for(engine, server.url) as worker:
        await worker.wait_ready()
        stream = worker.generate(request())
        await anext(stream)
        for connection in list(server.server.server_state.connections):
            connection.transport.abort()
        with pytest.raises(EngineDiedError):
            async for _ in stream:
                pass
        engine.gate.opened.set()
        assert ids_of(await outputs_of(worker, request("next")))[:6] == byte_ids(b"abcdef")
    async with worker_for(engine, "http://127.0.0.1:1") as nobody:
        assert not nobody.is_ready
        with pytest.raises(LoadingError):
            await nobody.describe()
        with pytest.raises(EngineDiedError):
            await outputs_of(nobody, request())


async def test_drained_workers_take_nothing_new() -> None:
    async with both() as (_, _, worker):
        await worker.drain()
        assert not worker.is_ready
        with pytest.raises(DrainingError):
            await outputs_of(worker, request())


async def test_closing_ends_what_runs() -> None:
    engine = FakeEngine()
    engine.gate = Gate(after=1)
    async with serving(engine) as server:
        async with worker_for(engine, server.url) as worker:
            await worker.wait_ready()
            running = asyncio.create_task(outputs_of(worker, request()))
            await engine.gate.reached.wait()
        with pytest.raises(EngineDiedError):
            await running


async def test_a_broken_stream_goes_on_at_another_server() -> None:
    """The point of token ids: greedy streams continue where they broke, with nothing lost or told twice."""
    one, two = FakeEngine(), FakeEngine()
    story = byte_ids(b"It was a dark and stormy night; the rain fell in torrents.")
    prompt = byte_ids(b"Tell")
    for engine in (one, two):
        engine.reply = lambda asked: story[len(asked.prompt_ids) - len(prompt) :]
    async with AsyncExitStack() as stack:
        targets = []
        for name, engine in (("one/0", one), ("two/0", two)):
            server = await stack.enter_async_context(serving(engine))
            worker = await stack.enter_async_context(worker_for(engine, server.url))
            await worker.wait_ready()
            targets.append(StaticTarget(name, worker))
        supervisor = Supervisor(StaticPool(targets))
        one.failure, one.fail_at = EngineDiedError("killed"), 9
        asked = request(prompt_ids=prompt, temperature=0.0, max_tokens=200)
        outputs = [output async for output in supervisor.generate(asked)]
    assert ids_of(outputs) == [*story, EOS_ID]
    assert supervisor.counters["resumed"] == 1
    assert len(two.seen) == 1


async def test_our_server_is_recognised() -> None:
    engine = FakeEngine()
    async with serving(engine) as server, aiohttp.ClientSession() as session:
        assert await detect(session, server.url, "tiny") == "openai"
        assert await detect(session, server.url, "another model") == "text"
    assert dialect_named("openai").name == "openai"
    with pytest.raises(ConfigError):
        dialect_named("esperanto")


async def test_assets_come_from_here() -> None:
    engine = FakeEngine()
    async with worker_for(engine, "http://127.0.0.1:1") as worker:
        digest = engine.info.text.tokenizer.digest
        assert await worker.fetch_asset(digest) == engine.assets[digest]
        with pytest.raises(RequestError):
            await worker.fetch_asset("0")


@pytest.mark.parametrize(
    ("status", "retry_after", "body", "kind"),
    [
        (400, None, b'{"error":{"message":"no","param":"top_p","code":"invalid_value"}}', RequestError),
        (422, None, b'{"detail":"no"}', RequestError),
        (404, None, b'{"object":"error","message":"no such model","code":404}', EngineError),
        (401, None, b"", EngineError),
        (429, "3", b'{"error":{"message":"slow down","code":429}}', PressureError),
        (503, "Wed, 21 Oct 2026 07:28:00 GMT", b"<html>", PressureError),
        (503, "inf", b'{"error":{"message":"x","code":"server_is_draining"}}', DrainingError),
        (500, None, b"\xff" * 100, EngineDiedError),
        (302, None, b"", EngineDiedError),
        (502, None, b"[" * 100_000, EngineDiedError),
    ],
)
def test_statuses(status: int, retry_after: str | None, body: bytes, kind: type[HeadraceError]) -> None:
    error = error_of_answer(status, retry_after, body)
    assert isinstance(error, kind)
    assert isinstance(error, EngineDiedError) == (kind is EngineDiedError)
    assert "\n" not in str(error)
    if isinstance(error, PressureError):
        assert 0 <= error.retry_after_s <= 600


def test_errors_within_streams() -> None:
    assert isinstance(error_of_body(b'{"error":{"message":"m","code":"deadline_exceeded"}}'), DeadlineError)
    assert isinstance(error_of_body(b'{"error":{"message":"m","code":"engine_died"}}'), EngineDiedError)
    assert isinstance(error_of_body(b'{"error":{"message":"m","code":400}}'), RequestError)
    assert error_of_body(b'{"error":{"message":"m","code":"odd"}}').code == "odd"


async def test_a_worker_of_a_server_that_is_not_ready_waits() -> None:
    engine = FakeEngine()
    async with worker_for(engine, "http://127.0.0.1:1") as worker:
        waiting = asyncio.create_task(worker.wait_ready())
        await until(lambda: not worker.is_ready, "it is looked at")
        assert not waiting.done()
        waiting.cancel()


async def test_a_server_that_drains_or_comes_back_is_known_by_its_health() -> None:
    engine, state = FakeEngine(), FakeReadiness()
    async with serving(engine, state=state) as server:
        worker = OpenAIWorker(server.url, OpenAIIds(), tiny_foreign_info(engine), engine.assets, health_interval_s=0.02)
        worker.open()
        try:
            await worker.wait_ready()
            state.become(ServiceState("draining"))
            await until(lambda: worker.state().state == "draining", "it drains")
            state.become(ServiceState("restarting"))
            await until(lambda: worker.state().state == "dead", "it is gone")
            state.become(ServiceState("ready"))
            await worker.wait_ready()
            assert worker.state().incarnation == "2"
            worker.withdraw()
            assert not worker.is_ready, "it may be another model now"
        finally:
            await worker.close()
        assert worker.state().state == "dead"


async def test_a_silent_server_loses_its_streams_and_serves_again_once_it_answers() -> None:
    async with both() as (engine, _, worker):
        engine.gate = Gate(after=1)
        stream = worker.generate(request())
        await anext(stream)
        heard = worker.frames_received
        worker.give_up("It is silent.")
        assert not worker.is_ready
        with pytest.raises(EngineSilentError):
            await anext(stream)
        engine.gate.opened.set()
        await worker.wait_ready()
        assert worker.frames_received > heard
        assert ids_of(await outputs_of(worker, request("next")))


async def test_a_server_tells_what_it_is() -> None:
    engine = FakeEngine()
    async with serving(engine) as server, aiohttp.ClientSession() as session:
        facts = await learn(session, server.url, "tiny", "openai")
        assert (facts.models, facts.max_model_len) == (("tiny",), 512)
        assert facts.probe == tuple(tuple(engine.codec.encode(text, parse_special=True)) for text in PROBE_TEXTS)
        assert facts.load_reader is not None
        assert facts.load_reader.read((await server.client.get("/metrics")).content) is not None


def test_tokenizers_are_named_for_all_models_or_each() -> None:
    assert tokenizers_of(None) == {}
    assert tokenizers_of("org/model") == {"": "org/model"}
    assert tokenizers_of("a=/x/y, b=org/model") == {"a": "/x/y", "b": "org/model"}
    with pytest.raises(ConfigError):
        tokenizers_of("a=,b=c")
