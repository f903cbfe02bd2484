"""The real engine process with a real, tiny model: it is killed in the middle of streams, and nobody can tell."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path

import pytest

from engine.config import EngineConfig
from engine.errors import ModelError, PromptTooLongError
from engine.grammar.pool import THREADS as COMPILERS
from engine.protocol import GenerateRequest, Grammar, SamplingParams, TokenOutput
from engine.wire.client import RemoteEngine
from engine.wire.merge import merge_outputs
from router.supervisor import Supervisor
from tests.support.scripted_engine import engine_process
from tests.support.static_pool import StaticPool, StaticTarget
from tests.support.tiny_models import write_tiny_llama
from tests.support.until import until

MODULE = "server.core_process"
STREAMS = 3


def request(number: int, attempt_of: str) -> GenerateRequest:
    return GenerateRequest(
        request_id=f"{attempt_of}{number}",
        prompt_ids=[10 + number, *range(20, 60 + 7 * number)],
        sampling=SamplingParams(seed=number, max_tokens=120, temperature=0.9, top_p=0.95, ignore_eos=True, logprobs=2),
    )


async def collect(engine: Supervisor | RemoteEngine, wanted: GenerateRequest) -> list[TokenOutput]:
    return [output async for output in engine.generate(wanted)]


async def test_a_killed_engine_resumes_with_the_tokens_of_an_undisturbed_run(tmp_path: Path) -> None:
    config = EngineConfig(
        model=str(write_tiny_llama(tmp_path / "model")),
        numerics="invariant",
        dtype="float32",
        block_size=16,
        max_step_tokens=64,
        kv_cache_memory_bytes=8 << 20,
        threads=1,
    )
    engine = RemoteEngine(f"ipc://{tmp_path}/e")
    engine.open()
    try:
        with engine_process(engine.address, config, MODULE) as process:
            supervisor = Supervisor(StaticPool([StaticTarget("core", engine)]))
            info = await engine.wait_ready()
            for asset in (info.text.tokenizer, info.text.chat_template):
                assert asset is not None
                assert len(await engine.fetch_asset(asset.digest)) == asset.size_bytes

            undisturbed = await asyncio.gather(*(collect(supervisor, request(n, "calm")) for n in range(STREAMS)))
            tasks = [asyncio.create_task(collect(supervisor, request(n, "rough"))) for n in range(STREAMS)]

            async def under_way() -> bool:
                load = await engine.load()
                return load.output_tokens_total > sum(len(calm) for calm in undisturbed) + 10 * STREAMS

            await until(under_way, "every stream has begun")
            process.signal(signal.SIGKILL)
            await process.restart()
            rough = await asyncio.gather(*tasks)

            assert supervisor.counters["resumed"] == STREAMS
            for calm, disturbed in zip(undisturbed, rough, strict=True):
                before, after = merge_outputs(calm), merge_outputs(disturbed)
                assert after.token_ids == before.token_ids
                assert after.logprobs == before.logprobs
                assert after.finish_reason == "length"
                assert [output.offset for output in disturbed if output.cached is not None] == [0]
            await until(lambda: engine.num_running == 0, "all requests ended")
            assert (await engine.load()).running == 0

            with pytest.raises(PromptTooLongError) as caught:
                await collect(engine, GenerateRequest(request_id="long", prompt_ids=[5] * 600))
            assert caught.value.prompt_tokens == 600

            process.signal(signal.SIGTERM)
            assert await process.died() == 0
    finally:
        engine.close()


async def test_grammars_that_wait_to_be_compiled_do_not_outlive_the_engine(tmp_path: Path) -> None:
    """Those that are being compiled when it closes are ended with; the others are never begun."""
    model = write_tiny_llama(tmp_path / "model")
    config = EngineConfig(model=str(model), kv_cache_memory_bytes=8 << 20, threads=1)
    engine = RemoteEngine(f"ipc://{tmp_path}/e")
    engine.open()

    def begun() -> int:
        return len((model / "compiling").read_text().splitlines())

    try:
        with engine_process(engine.address, config, "tests.support.gated_core") as process:
            await engine.wait_ready()
            requests = [
                GenerateRequest(request_id=f"r{n}", prompt_ids=[5], grammar=Grammar("regex", str(n))) for n in range(10)
            ]
            tasks = [asyncio.create_task(collect(engine, one)) for one in requests]

            async def all_wait() -> bool:
                return (await engine.load()).waiting == len(requests) and begun() == COMPILERS

            await until(all_wait, "all threads of the pool have something to compile")
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            process.signal(signal.SIGTERM)
            assert await process.died() == 0
            assert begun() == COMPILERS
    finally:
        engine.close()


async def test_a_model_that_is_not_there_is_told_before_the_process_ends_with_2(tmp_path: Path) -> None:
    engine = RemoteEngine(f"ipc://{tmp_path}/e")
    engine.open()
    try:
        with engine_process(engine.address, EngineConfig(model=str(tmp_path / "nothing")), MODULE) as process:
            assert await process.died() == 2
            await until(lambda: engine.state().error is not None, "the reason came")
            assert isinstance(engine.state().error, ModelError)
            assert "nothing" in engine.state().message
    finally:
        engine.close()
