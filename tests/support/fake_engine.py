"""An Engine in the test's own process: it answers with the tokens it is told to, and remembers what was asked of it.

Deterministic: no clock, no randomness. A `Gate` lets a test hold a stream at a token for as long as it wants.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

import msgspec

from engine.errors import HeadraceError
from engine.protocol import (
    CachedTokens,
    EngineInfo,
    EngineLoad,
    GenerateRequest,
    TextAssets,
    TokenLogprobs,
    TokenOutput,
)
from engine.text.tokenizer import TextCodec
from server.health import ServiceState
from tests.support.infos import engine_info
from tests.support.tiny_text import CHAT_TEMPLATE, EOS_ID, VOCAB_SIZE, byte_ids, text_assets

MODEL = "tiny"
MAX_MODEL_LEN = 512


def tiny_info(text: TextAssets, **changes: object) -> EngineInfo:
    """Describe an engine of tests/support/tiny_text.py's vocabulary."""
    tiny: dict[str, object] = {
        "model": MODEL,
        "max_model_len": MAX_MODEL_LEN,
        "vocab_size": VOCAB_SIZE,
        "eos_ids": (EOS_ID,),
        "kv_capacity_tokens": 4096,
        "text": text,
    }
    return engine_info(**{**tiny, **changes})


@dataclass
class Gate:
    """Holds every stream before its output number `after` until opened."""

    after: int
    opened: asyncio.Event = field(default_factory=asyncio.Event)
    reached: asyncio.Event = field(default_factory=asyncio.Event)


class FakeEngine:
    """`reply` gives the tokens of a request, without the end token that follows them; `cuts` the sizes of the outputs,
    the last one repeated. `failure` is raised before output number `fail_at`.
    """

    def __init__(self, *, with_template: bool = True, template: str = CHAT_TEMPLATE, **info: object) -> None:
        text, self.assets = text_assets(with_template=with_template, template=template)
        self.info = tiny_info(text, **info)
        self.codec = TextCodec.from_assets(text, self.assets)
        self.reply: Callable[[GenerateRequest], list[int]] = self.echo
        self.cuts: list[int] = [1]
        self.gate: Gate | None = None
        self.failure: HeadraceError | None = None
        self.fail_at = 0
        self.terminal: TokenOutput | None = None
        self.seen: list[GenerateRequest] = []
        self.running: set[str] = set()
        self.aborted: list[str] = []
        self.finished: dict[str, int] = {}
        self.changed = asyncio.Condition()
        self.cached: dict[tuple[int, ...], int] = {}

    def say(self, text: str) -> None:
        """Answer every request with this text, one byte a token."""
        self.reply = lambda request: byte_ids(text.encode())

    def echo(self, request: GenerateRequest) -> list[int]:
        """Answer with the last eight tokens of the prompt, turned by the seed so that choices differ."""
        tail = [token for token in request.prompt_ids[-12:] if token > EOS_ID] or byte_ids(b"ok")
        turn = (request.sampling.seed or 0) % len(tail)
        return tail[turn:] + tail[:turn]

    async def generate(self, request: GenerateRequest) -> AsyncIterator[TokenOutput]:
        assert request.request_id not in self.running, "engine-internal ids must be unique"
        self.seen.append(request)
        self.running.add(request.request_id)
        complete = False
        try:
            await self._note_change()
            for number, output in enumerate(self.outputs(request)):
                if self.failure is not None and number == self.fail_at:
                    complete = True
                    raise self.failure
                if self.gate is not None and number == self.gate.after:
                    self.gate.reached.set()
                    await self.gate.opened.wait()
                await asyncio.sleep(0)
                complete = output.finish_reason is not None
                yield output
        finally:
            self.running.discard(request.request_id)
            if not complete and request.request_id not in self.finished:
                self.aborted.append(request.request_id)
            await self._note_change()

    def outputs(self, request: GenerateRequest) -> list[TokenOutput]:
        """The whole stream of a request, cut into outputs."""
        sampling = request.sampling
        tokens = self.reply(request)
        ends_by_itself = sampling.max_tokens is None or len(tokens) < sampling.max_tokens
        tokens = [*tokens, EOS_ID] if ends_by_itself else tokens[: sampling.max_tokens]
        prompt_logprobs = None
        if request.prompt_logprobs is not None:
            entries = (self.logprobs(token, request.prompt_logprobs) for token in request.prompt_ids[1:])
            prompt_logprobs = [None, *entries]
        if not tokens:
            nothing = TokenOutput(request.request_id, request.attempt, 0, [], "length", cached=self._cached(request))
            return [msgspec.structs.replace(nothing, prompt_logprobs=prompt_logprobs)]
        cached = self._cached(request)
        outputs: list[TokenOutput] = []
        start = 0
        while start < len(tokens):
            size = self.cuts[min(len(outputs), len(self.cuts) - 1)]
            ids = tokens[start : start + size]
            logprobs = None
            if sampling.logprobs is not None:
                logprobs = [self.logprobs(token, sampling.logprobs) for token in ids]
            last = start + len(ids) == len(tokens)
            outputs.append(
                TokenOutput(
                    request.request_id,
                    request.attempt,
                    start,
                    ids,
                    finish_reason=None if not last else "stop" if ends_by_itself else "length",
                    stop_token=EOS_ID if last and ends_by_itself else None,
                    logprobs=logprobs,
                    cached=cached if not outputs else None,
                    prompt_logprobs=prompt_logprobs if not outputs else None,
                )
            )
            start += len(ids)
        if self.terminal is not None:
            outputs[-1] = self.terminal
        return outputs

    def logprobs(self, token: int, alternatives: int) -> TokenLogprobs:
        ids = [(token + i) % VOCAB_SIZE for i in range(alternatives)]
        return TokenLogprobs(-0.25, ids, [-0.25 - i if i < 3 else float("-inf") for i in range(alternatives)], 1)

    def _cached(self, request: GenerateRequest) -> CachedTokens:
        """Whole blocks of 64 of a prompt that was seen before."""
        key = (*request.cache_scope, *request.prompt_ids)
        hit = self.cached.get(key, 0)
        self.cached[key] = (len(request.prompt_ids) - 1) // 64 * 64
        return CachedTokens(device=hit)

    async def until(self, holds: Callable[[], bool]) -> None:
        """Return once `holds()`; it is looked at whenever a request begins or ends."""
        async with asyncio.timeout(60), self.changed:
            await self.changed.wait_for(holds)

    async def _note_change(self) -> None:
        async with self.changed:
            self.changed.notify_all()

    async def finish(self, request_id: str, keep_tokens: int) -> None:
        if request_id in self.running:
            self.finished[request_id] = keep_tokens

    async def abort(self, request_id: str) -> None:
        self.aborted.append(request_id)

    async def describe(self) -> EngineInfo:
        return self.info

    async def fetch_asset(self, digest: str) -> bytes:
        return self.assets[digest]

    async def load(self) -> EngineLoad:
        return EngineLoad(running=len(self.running), kv_blocks_used=3, kv_blocks_total=9, steps_total=17)

    async def drain(self) -> None:
        pass


class FakeReadiness:
    """Ready from the start, unless told otherwise."""

    def __init__(self, state: ServiceState | None = None) -> None:
        self.current = state or ServiceState("ready")
        self._ready = asyncio.Event()
        if self.current.status == "ready":
            self._ready.set()

    def state(self) -> ServiceState:
        return self.current

    def become(self, state: ServiceState) -> None:
        self.current = state
        if state.status == "ready":
            self._ready.set()

    async def wait_ready(self) -> None:
        await self._ready.wait()
