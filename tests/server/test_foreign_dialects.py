"""Languages of other engines, spoken by small servers of the tests' own that answer in the documented shapes."""

from __future__ import annotations

import asyncio
import json
from contextlib import aclosing

import aiohttp
import pytest

from engine.errors import EngineDiedError, EngineError, RequestError, RequestFailedError, UnsupportedError
from engine.protocol import (
    AssetRef,
    CachedTokens,
    GenerateRequest,
    Grammar,
    SamplingParams,
    TextAssets,
    TokenLogprobs,
    TokenOutput,
)
from server.foreign.dialect import Dialect
from server.foreign.info import foreign_info
from server.foreign.llama_server import LlamaServer
from server.foreign.openai_ids import OpenAIIds
from server.foreign.outputs import MAX_PART_BYTES
from server.foreign.registry import detect
from server.foreign.sglang import SGLang
from server.foreign.worker import OpenAIWorker
from tests.support.other_server import OtherServer, other_server

INFO = foreign_info(
    "m", "any", TextAssets(tokenizer=AssetRef("0", 0)), max_model_len=100, vocab_size=1000, eos_ids=(2,)
)


async def ask(server: OtherServer, dialect: Dialect, **fields: object) -> list[TokenOutput]:
    sampling = {"seed": 7, "max_tokens": 10} | {
        name: fields.pop(name) for name in list(fields) if name in SamplingParams.__struct_fields__
    }
    asked = GenerateRequest(
        request_id="r",
        prompt_ids=[5, 6],
        sampling=SamplingParams(**sampling),  # type: ignore[arg-type]
        **fields,  # type: ignore[arg-type]
    )
    worker = OpenAIWorker(server.url, dialect, INFO, {}, api_key="k")
    worker.open()
    try:
        async with aclosing(worker.generate(asked)) as stream:  # type: ignore[type-var]
            return [output async for output in stream]
    finally:
        await worker.close()


def ids_of(outputs: list[TokenOutput]) -> list[int]:
    return [token for output in outputs for token in output.token_ids]


def sglang_event(ids: list[int], total: int, reason: object = None, **meta: object) -> dict[str, object]:
    told = {"prompt_tokens": 2, "completion_tokens": total, "cached_tokens": 1, "finish_reason": reason, **meta}
    return {"text": "x", "output_ids": ids, "meta_info": told}


@pytest.mark.parametrize("cumulative", [True, False])
async def test_sglang_tells_all_ids_or_the_new_ones(cumulative: bool) -> None:
    parts = [[11], [12, 13], [2]]
    events: list[object] = []
    so_far: list[int] = []
    for part in parts:
        so_far = so_far + part
        reason = {"type": "stop", "matched": 2} if part == [2] else None
        entries = [[-float(token), token, None] for token in (so_far if cumulative else part)]
        tops = [[entry, [-99.0, 1, None]] for entry in entries]
        meta = {"output_token_logprobs": entries, "output_top_logprobs": tops}
        events.append(sglang_event(so_far if cumulative else part, len(so_far), reason, **meta))
    async with other_server(events=[*events, b"[DONE]"]) as server:
        outputs = await ask(server, SGLang(), logprobs=2, grammar=Grammar("regex", "a+"), stop_token_ids=(9,))
        assert ids_of(outputs) == [11, 12, 13, 2]
        assert (outputs[-1].finish_reason, outputs[-1].stop_token) == ("stop", 2)
        assert outputs[0].cached is not None
        assert outputs[0].cached.total == 1
        told = [entry for output in outputs for entry in output.logprobs or ()]
        assert told == [TokenLogprobs(-float(token), [token, 1], [-float(token), -99.0]) for token in (11, 12, 13, 2)]
        (body,) = server.seen
        assert body["input_ids"] == [5, 6]
        assert body["sampling_params"]["regex"] == "a+"
        assert body["sampling_params"]["max_new_tokens"] == 10
        assert (body["return_logprob"], body["top_logprobs_num"]) == (True, 2)


async def test_sglang_failures() -> None:
    for events, kind in (
        ([sglang_event([1], 1), sglang_event([1], 5)], EngineDiedError),
        ([sglang_event([1], 1, {"type": "abort", "message": "out of memory"})], EngineDiedError),
        ([sglang_event([1], 1)], EngineDiedError),
        ([{"error": {"message": "too long", "code": 400}}], RequestError),
        ([{"text": "words"}], EngineError),
        ([b"nonsense"], EngineDiedError),
    ):
        async with other_server(events=events) as server:
            with pytest.raises(kind):
                await ask(server, SGLang())
    async with other_server() as server:
        with pytest.raises(UnsupportedError):
            await ask(server, SGLang(), allowed_token_ids=(1,))


def llama_event(ids: list[int], **fields: object) -> dict[str, object]:
    return {"index": 0, "content": "x", "tokens": ids, "stop": False, "id_slot": 0, "tokens_predicted": 1, **fields}


def probability(token: int) -> dict[str, object]:
    top = [{"id": token, "token": "x", "bytes": [1], "logprob": -0.5}, {"id": 1, "logprob": -3.0}]
    return {"id": token, "token": "x", "bytes": [1], "logprob": -0.5, "top_logprobs": top}


async def test_llama_server_tells_tokens() -> None:
    last = {"content": "", "tokens": [], "stop": True, "stop_type": "eos", "timings": {"cache_n": 1, "prompt_n": 1}}
    events = [llama_event([token], completion_probabilities=[probability(token)]) for token in (11, 12)]
    async with other_server(events=[*events, last]) as server:
        outputs = await ask(server, LlamaServer(), logprobs=1, seed=-1, cache_scope=b"s" * 32, logit_bias={3: 1.0})
        assert ids_of(outputs) == [11, 12]
        assert (outputs[-1].finish_reason, outputs[-1].stop_token) == ("stop", None)
        told = [entry for output in outputs for entry in output.logprobs or ()]
        assert told == [TokenLogprobs(-0.5, [11], [-0.5]), TokenLogprobs(-0.5, [12], [-0.5])]
        (body,) = server.seen
        assert (body["prompt"], body["n_predict"], body["seed"]) == ([5, 6], 10, 2**32 - 1)
        assert (body["return_tokens"], body["cache_prompt"], body["logit_bias"]) == (True, False, [[3, 1.0]])
    for events, kind in (
        ([llama_event([11])], EngineDiedError),
        ([llama_event([])], EngineError),
        ([{**last, "stop_type": "none"}], EngineDiedError),
        ([{"error": {"code": 500, "message": "slot failed", "type": "server_error"}}], RequestFailedError),
    ):
        async with other_server(events=events) as server:
            with pytest.raises(kind):
                await ask(server, LlamaServer())
    for fields in ({"stop_token_ids": (1,)}, {"min_tokens": 3}, {"grammar": Grammar("regex", "a")}):
        async with other_server() as server:
            with pytest.raises(UnsupportedError):
                await ask(server, LlamaServer(), **fields)


def completion(**choice: object) -> dict[str, object]:
    return {"id": "c", "object": "text_completion", "choices": [{"index": 0, "text": "x", **choice}]}


async def test_completions_in_other_shapes() -> None:
    usage = {"choices": [], "usage": {"prompt_tokens": 2, "prompt_tokens_details": None}}
    good = [completion(token_ids=[11], prompt_token_ids=[5, 6]), completion(token_ids=[2], finish_reason="stop"), usage]
    async with other_server(events=[*good, b"[DONE]"]) as server:
        outputs = await ask(server, OpenAIIds())
        assert ids_of(outputs) == [11, 2]
        assert all(output.cached is None for output in outputs), "nothing is claimed of a cache that nobody told of"
    usage = {"choices": [], "usage": {"prompt_tokens": 2, "prompt_tokens_details": {"cached_tokens": 1}}}
    for last in ([usage, b"[DONE]"], [usage]):
        async with other_server(events=[*good[:-1], *last]) as server:
            outputs = await ask(server, OpenAIIds())
            assert ids_of(outputs) == [11, 2]
            assert [output.finish_reason for output in outputs].count("stop") == 1
            assert outputs[-1].cached == CachedTokens(device=1), "what is told behind the end counts"
    by_text = {"tokens": ["x"], "token_logprobs": [-1.0], "top_logprobs": [{"x": -1.0}]}
    for events, kind in (
        ([completion()], EngineError),
        ([completion(token_ids=[1], finish_reason="abort")], EngineDiedError),
        ([completion(token_ids=[1, 3], logprobs=by_text)], EngineDiedError),
        ([{"error": {"message": "boom", "code": None}}], RequestFailedError),
        ([b"x" * (5 << 20)], EngineDiedError),
        ([b"[" * 100_000], EngineDiedError),
        ([], EngineDiedError),
    ):
        async with other_server(events=events) as server:
            with pytest.raises(kind):
                await ask(server, OpenAIIds(), logprobs=1)


async def test_ids_that_a_stream_of_llama_server_leaves_out_are_asked_for() -> None:
    events = [llama_event([5], tokens_predicted=1), llama_event([7], tokens_predicted=3)]
    parts = [
        json.dumps({"content": "y", "tokens": [6, 7], "stop": True, "stop_type": "limit"}).encode(),
        json.dumps({"content": "z", "tokens": [8, 2], "stop": True, "stop_type": "eos"}).encode(),
    ]
    async with other_server(events=events, parts=parts) as server:
        outputs = await ask(server, LlamaServer(), max_tokens=10)
        assert ids_of(outputs) == [5, 6, 7, 8, 2]
        assert [output.offset for output in outputs] == [0, 1, 3]
        assert (outputs[-1].finish_reason, outputs[-1].stop_token) == ("stop", 2)
        assert [(one["prompt"], one["n_predict"], one["stream"]) for one in server.seen] == [
            ([5, 6], 10, True),
            ([5, 6, 5], 9, False),
            ([5, 6, 5, 6, 7], 7, False),
        ]
    end = llama_event([], tokens_predicted=3, stop=True, stop_type="limit")
    part = json.dumps({"content": "y", "tokens": [6, 9], "stop": True, "stop_type": "limit"}).encode()
    async with other_server(events=[llama_event([5]), end], parts=[part]) as server:
        outputs = await ask(server, LlamaServer(), max_tokens=3)
        assert (ids_of(outputs), outputs[-1].finish_reason) == ([5, 6, 9], "length")
    async with other_server(events=events, parts=parts) as server:
        with pytest.raises(RequestFailedError):
            await ask(server, LlamaServer(), logprobs=1)
    empty = json.dumps({"content": "", "tokens": [], "stop": True, "stop_type": "limit"}).encode()
    for part in (empty, b" " * (MAX_PART_BYTES + 1)):
        async with other_server(events=events, parts=[part]) as server:
            with pytest.raises(EngineDiedError):
                await ask(server, LlamaServer(), max_tokens=10)


async def test_languages_are_found_out() -> None:
    cases = {
        "llama_server": {"pages": {"/props": {"default_generation_settings": {}}}},
        "sglang": {"pages": {"/get_model_info": {"model_path": "m"}}},
        "text": {"body": b'{"choices":[{"text":"hi"}]}'},
        "openai": {"body": b'{"choices":[{"text":"hi","token_ids":[3]}]}'},
    }
    async with aiohttp.ClientSession() as session:
        for name, fields in cases.items():
            async with other_server(**fields) as server:
                assert await detect(session, server.url, "m") == name


async def relayed(url: str, body: bytes) -> bytes:
    worker = OpenAIWorker(url, None, INFO, {}, api_key="k")
    worker.open()
    try:
        async with worker.relay("r", "/v1/completions", body, {}, None) as exchange:
            answer = b""
            while (data := await exchange.read()) is not None:
                answer += data
            assert exchange.content_type == "text/event-stream"
            return answer
    finally:
        await worker.close()


async def test_a_relay_passes_bytes_on() -> None:
    async with other_server(events=[{"choices": []}, b"[DONE]"]) as server:
        answer = await relayed(server.url, b'{"messages":[],"stream":true}')
        assert answer.endswith(b"data: [DONE]\n\n")
        assert server.seen == [{"messages": [], "stream": True}]
    async with other_server(status=400, body=b'{"error":{"message":"no"}}') as server:
        with pytest.raises(RequestError):
            await relayed(server.url, b"{}")
    with pytest.raises(EngineDiedError):
        await relayed("http://127.0.0.1:1", b"{}")


async def abort_while_relaying(worker: OpenAIWorker) -> None:
    async with worker.relay("r-0", "/v1/completions", b"{}", {}, None) as exchange:
        assert await worker.abort_requests("r") == 1
        while await exchange.read():
            pass


async def test_leaving_a_relay_closes_its_connection_and_aborting_ends_it() -> None:
    async with other_server(stays_open=True) as server:
        worker = OpenAIWorker(server.url, None, INFO, {})
        worker.open()
        try:
            async with worker.relay("left", "/v1/completions", b"{}", {}, None) as exchange:
                assert await exchange.read()
            await asyncio.wait_for(server.left.wait(), 30)
            with pytest.raises(RequestFailedError):
                await abort_while_relaying(worker)
            assert worker.num_running == 0
        finally:
            await worker.close()


async def test_a_server_of_text_is_never_asked_by_ids() -> None:
    async with other_server() as server:
        worker = OpenAIWorker(server.url, None, INFO, {})
        with pytest.raises(EngineError):
            await anext(worker.generate(GenerateRequest(request_id="r", prompt_ids=[5])))
    assert not server.seen
