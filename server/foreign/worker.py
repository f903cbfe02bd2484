"""`OpenAIWorker`: an `Engine` whose work is done by another server, over HTTP, token ids in and token ids out.

A request is one streamed POST. Aborting closes its connection, which every server takes for a client that left. The
server's health is looked at on a loop of its own.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Mapping
from typing import TYPE_CHECKING, Literal, TypeVar

import msgspec

from engine.errors import (
    ConfigError,
    DeadlineError,
    DrainingError,
    EngineDiedError,
    HeadraceError,
    LoadingError,
    PressureError,
    RequestError,
)
from engine.protocol import CachedTokens, EngineInfo, EngineLoad, GenerateRequest, TokenLogprobs, TokenOutput
from server.bench.serve_stream import EventLines
from server.foreign.dialect import Dialect, EventReader, Piece
from server.foreign.errors import error_of_answer

if TYPE_CHECKING:
    import aiohttp

T = TypeVar("T")

MAX_STREAMS = 16_384
MAX_ERROR_BYTES = 64 * 1024
HEALTH_INTERVAL_S = 2.0
HEALTH_TIMEOUT_S = 2.0
CONNECT_TIMEOUT_S = 5.0
SILENCE_S = 300.0
"""A server that sends nothing for so long, no keep-alive either, is taken for dead."""


class OpenAIWorker:
    """The server at `url`, which speaks `dialect`. `open()` on the loop that uses it, `close()` at the end.

    `info` describes its model; `assets` are the bytes of `info.text` by digest: other servers do not serve them.
    `api_key` is sent as a bearer token.
    """

    def __init__(
        self,
        url: str,
        dialect: Dialect,
        info: EngineInfo,
        assets: Mapping[str, bytes],
        *,
        api_key: str | None = None,
        health_path: str = "/health",
    ) -> None:
        self.url = url.rstrip("/")
        self.dialect = dialect
        self._info = info
        self._assets = dict(assets)
        self._headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
        self._health_path = health_path
        self._session: aiohttp.ClientSession | None = None
        self._health: asyncio.Task[None] | None = None
        self._look_now = asyncio.Event()
        self._ready = asyncio.Event()
        self._draining = False
        self._streams: dict[str, _Stream] = {}
        self._totals = Counter[str]()
        self._endings = Counter[str]()

    # --- life ---------------------------------------------------------------------------------------------------------

    def open(self) -> None:
        """Raises ConfigError where aiohttp is missing. The server need not be there yet."""
        try:
            import aiohttp
        except ImportError:
            raise ConfigError(
                "Engines of other makes need aiohttp, which is not installed.",
                hint="Run: pip install 'headrace[fleet]'",
            ) from None
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S, sock_read=SILENCE_S)
        self._session = aiohttp.ClientSession(
            headers=self._headers,
            timeout=timeout,
            connector=aiohttp.TCPConnector(limit=0),
            cookie_jar=aiohttp.DummyCookieJar(),
            trust_env=False,
        )
        self._health = asyncio.create_task(self._watch_health())

    async def close(self) -> None:
        """End every running request with EngineDiedError."""
        if self._health is not None:
            self._health.cancel()
            await asyncio.wait((self._health,))
        self._ready.clear()
        for stream in self._streams.values():
            stream.end("closed")
        if self._session is not None:
            await self._session.close()

    @property
    def is_ready(self) -> bool:
        return self._ready.is_set() and not self._draining

    async def wait_ready(self) -> EngineInfo:
        await self._ready.wait()
        return self._info

    # --- Engine -------------------------------------------------------------------------------------------------------

    async def generate(self, request: GenerateRequest) -> AsyncIterator[TokenOutput]:
        stream = self._admit(request)
        try:
            async for output in self._answers(stream):
                yield output
        finally:
            stream.close()
            del self._streams[request.request_id]

    async def finish(self, request_id: str, keep_tokens: int) -> None:
        if stream := self._streams.get(request_id):
            stream.end("finish")

    async def abort(self, request_id: str) -> None:
        if stream := self._streams.get(request_id):
            stream.end("abort")

    async def describe(self) -> EngineInfo:
        if not self._ready.is_set() and not self._totals["healthy"]:
            raise LoadingError(f"The engine at {self.url} does not answer yet.", progress=0.0)
        return self._info

    async def fetch_asset(self, digest: str) -> bytes:
        if (data := self._assets.get(digest)) is None:
            raise RequestError(f"There is no asset {digest}.", param="digest", value=digest)
        return data

    async def load(self) -> EngineLoad:
        """What goes through here: other clients of the same server are not seen."""
        return EngineLoad(
            running=len(self._streams),
            prompt_tokens_total=self._totals["prompt"],
            cached_tokens_total=self._totals["cached"],
            output_tokens_total=self._totals["output"],
            requests_total=dict(self._endings),
            draining=self._draining,
        )

    async def drain(self) -> None:
        self._draining = True

    # --- one request --------------------------------------------------------------------------------------------------

    def _admit(self, request: GenerateRequest) -> _Stream:
        if self._draining:
            raise DrainingError("The engine takes nothing new.")
        if self._session is None:
            raise EngineDiedError("The connection to the engine was closed.")
        if request.request_id in self._streams:
            raise RequestError(f"Request {request.request_id} is running already.", param="request_id")
        if len(self._streams) >= MAX_STREAMS:
            raise PressureError(f"{MAX_STREAMS} requests are running already.")
        self.dialect.check(request)
        stream = self._streams[request.request_id] = _Stream(request, self._info)
        return stream

    async def _answers(self, stream: _Stream) -> AsyncIterator[TokenOutput]:
        try:
            await self._post(stream)
            while (data := await stream.read()) is not None:
                for output in stream.outputs(data):
                    self._count(stream, output)
                    yield output
                    if output.finish_reason is not None:
                        return
                if stream.failure is not None:
                    raise stream.failure
            raise EngineDiedError("The engine's answer broke off.")
        except _StreamEnded:
            yield self._ended(stream)
        except HeadraceError as error:
            self._endings["error"] += 1
            if isinstance(error, EngineDiedError):
                self._look_now.set()
            raise

    async def _post(self, stream: _Stream) -> None:
        """Send the request; raises what the answer says unless it is a stream."""
        assert self._session is not None
        body = msgspec.json.encode(self.dialect.body(stream.request, self._info))
        headers = {"Content-Type": "application/json", "X-Request-Id": stream.request.request_id[:128]}
        stream.reader = self.dialect.reader(stream.request)
        url = self.url + self.dialect.path
        response = await stream.wait(self._session.post(url, data=body, headers=headers, allow_redirects=False))
        stream.response = response
        if response.status != 200:
            told = await stream.wait(response.content.read(MAX_ERROR_BYTES))
            raise error_of_answer(response.status, response.headers.get("Retry-After"), told)

    def _count(self, stream: _Stream, output: TokenOutput) -> None:
        if output.cached is not None:
            self._totals["cached"] += output.cached.total
        if output.offset == len(stream.request.resume_ids):
            self._totals["prompt"] += len(stream.request.prompt_ids)
        self._totals["output"] += len(output.token_ids)
        if output.finish_reason is not None:
            self._endings[output.finish_reason] += 1

    def _ended(self, stream: _Stream) -> TokenOutput:
        """Return the terminal output of a request that was ended from here."""
        match stream.ended_by:
            case "closed":
                raise EngineDiedError("The connection to the engine was closed.")
            case "finish" | "abort" as cause:
                reason: Literal["stop", "abort"] = "stop" if cause == "finish" else "abort"
                self._endings[reason] += 1
                return TokenOutput(stream.request.request_id, stream.request.attempt, stream.offset, [], reason)
        self._endings["error"] += 1
        raise DeadlineError("The request's deadline passed before it finished.")

    # --- health -------------------------------------------------------------------------------------------------------

    async def _watch_health(self) -> None:
        while True:
            self._look_now.clear()
            if await self._is_healthy():
                self._totals["healthy"] += 1
                self._ready.set()
            else:
                self._ready.clear()
            try:
                async with asyncio.timeout(HEALTH_INTERVAL_S):
                    await self._look_now.wait()
            except TimeoutError:
                continue

    async def _is_healthy(self) -> bool:
        import aiohttp

        assert self._session is not None
        timeout = aiohttp.ClientTimeout(total=HEALTH_TIMEOUT_S)
        try:
            async with self._session.get(self.url + self._health_path, timeout=timeout) as response:
                return response.status == 200
        except (aiohttp.ClientError, TimeoutError, OSError):
            return False


class _StreamEnded(Exception):
    """The request was ended from this side; `_Stream.ended_by` says how, None for its deadline."""


class _Stream:
    """One running request and its answer. `offset` is the index of the next output token."""

    def __init__(self, request: GenerateRequest, info: EngineInfo) -> None:
        self.request = request
        self.offset = len(request.resume_ids)
        self.response: aiohttp.ClientResponse | None = None
        self.reader: EventReader | None = None
        self.ended_by: Literal["finish", "abort", "closed"] | None = None
        self._ends = frozenset(() if request.sampling.ignore_eos else info.eos_ids) | set(
            request.sampling.stop_token_ids
        )
        self._cut: asyncio.Timeout | None = None
        self._lines = EventLines()
        self._ids: list[int] = []
        self._logprobs: list[TokenLogprobs] = []
        self._cached: int | None = None
        self._is_first = True
        self.failure: HeadraceError | None = None

    def end(self, cause: Literal["finish", "abort", "closed"]) -> None:
        """Interrupt whatever it waits for."""
        self.ended_by = self.ended_by or cause
        if self._cut is not None:
            self._cut.reschedule(asyncio.get_running_loop().time())

    def close(self) -> None:
        if self.response is not None:
            self.response.close()

    async def wait(self, step: Awaitable[T]) -> T:
        """Await `step` until the deadline. Raises _StreamEnded, and EngineDiedError for a connection that fails."""
        import aiohttp

        deadline = self.request.deadline_unix_s
        left_s = None if deadline is None else max(0.0, deadline - time.time())
        try:
            async with asyncio.timeout(0 if self.ended_by else left_s) as self._cut:
                return await step
        except TimeoutError as error:
            if self._cut is not None and self._cut.expired():
                raise _StreamEnded from None
            raise EngineDiedError(f"The engine does not answer: {error or type(error).__name__}") from None
        except (aiohttp.ClientError, OSError) as error:
            raise EngineDiedError(f"The connection to the engine failed: {error or type(error).__name__}") from None
        finally:
            self._cut = None

    async def read(self) -> bytes | None:
        """Return the next bytes of the answer, None at its end."""
        assert self.response is not None
        if self.ended_by is not None:
            raise _StreamEnded
        return await self.wait(self.response.content.readany()) or None

    def outputs(self, data: bytes) -> list[TokenOutput]:
        """Return what these bytes add, as one output at most. `failure` is set when they told an error behind it."""
        assert self.reader is not None
        try:
            events = self._lines.feed(data)
        except ValueError as error:
            raise EngineDiedError(f"The engine's answer cannot be read: {error}") from None
        finish: Literal["stop", "length"] | None = None
        try:
            for event in events:
                piece = self.reader.read(event)
                if piece is not None and finish is None:
                    self._take(piece)
                    finish = piece.finish_reason
        except HeadraceError as error:
            self.failure = error
        output = self._output(finish)
        return [] if output is None else [output]

    def _take(self, piece: Piece) -> None:
        self._ids += piece.token_ids
        self._logprobs += piece.logprobs
        if piece.cached_tokens is not None:
            self._cached = piece.cached_tokens

    def _output(self, finish: Literal["stop", "length"] | None) -> TokenOutput | None:
        """Tokens wait for their logprobs; at the end everything must be there."""
        wants = self.request.sampling.logprobs is not None
        count = min(len(self._ids), len(self._logprobs)) if wants else len(self._ids)
        if finish is not None and count < len(self._ids):
            raise EngineDiedError("The engine told fewer logprobs than tokens.")
        if not count and finish is None:
            return None
        ids, self._ids = self._ids[:count], self._ids[count:]
        logprobs, self._logprobs = self._logprobs[:count], self._logprobs[count:]
        cached = self._cached if self._is_first else None
        self._is_first = False
        output = TokenOutput(
            self.request.request_id,
            self.request.attempt,
            self.offset,
            ids,
            finish,
            stop_token=ids[-1] if finish == "stop" and ids and ids[-1] in self._ends else None,
            logprobs=logprobs if wants else None,
            cached=None if cached is None else CachedTokens(device=cached),
        )
        self.offset += count
        return output
