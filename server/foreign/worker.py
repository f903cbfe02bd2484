"""`OpenAIWorker`: an `Engine` whose work is done by another server, over HTTP.

A request is one streamed POST, token ids in and token ids out, or text for a server that gives no ids. Aborting closes
its connection, which every server takes for a client that left. The server's health is looked at on a loop of its own.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from contextlib import aclosing, asynccontextmanager
from typing import TYPE_CHECKING, Literal

from engine.errors import (
    ConfigError,
    DrainingError,
    EngineDiedError,
    HeadraceError,
    LoadingError,
    PressureError,
    RequestError,
    RequestFailedError,
    UnsupportedError,
)
from engine.kv.store_orders import StoreAnswer, StoreOrder
from engine.protocol import EngineInfo, EngineLoad, GenerateRequest, TokenOutput
from engine.wire.remote_state import RemoteState
from server.foreign.dialect import Dialect, no_ids
from server.foreign.exchange import Exchange, ExchangeEnded
from server.foreign.outputs import outputs_of
from server.foreign.stream import Stream
from server.foreign.watch import ServerWatch

if TYPE_CHECKING:
    import aiohttp

MAX_STREAMS = 16_384
HEALTH_INTERVAL_S = 2.0
CONNECT_TIMEOUT_S = 5.0
SILENCE_S = 300.0
"""A stream on which nothing comes for so long, no keep-alive either, is taken for dead."""


class OpenAIWorker:
    """The server at `url`. `open()` on the loop that uses it, `close()` at the end. It serves once it is well and
    `serve` has said how it is spoken to; a `dialect` and `info` that are known beforehand say it at once.

    `api_key` is sent as a bearer token. `on_load` is called with each load that the server tells.
    """

    def __init__(
        self,
        url: str,
        dialect: Dialect | None = None,
        info: EngineInfo | None = None,
        assets: Mapping[str, bytes] | None = None,
        *,
        api_key: str | None = None,
        health_path: str = "/health",
        health_interval_s: float = HEALTH_INTERVAL_S,
    ) -> None:
        self.url = url.rstrip("/")
        self.on_load: Callable[[EngineLoad], None] | None = None
        self.watch = ServerWatch(self.url, health_path, health_interval_s, self._note_change, self._take_load)
        self.counters = {"given_up": 0}
        self._dialect = dialect
        self._info = info
        self._assets = dict(assets or {})
        self._headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
        self._session: aiohttp.ClientSession | None = None
        self._watching: asyncio.Task[None] | None = None
        self._changed = asyncio.Event()
        self._draining = False
        self._running: dict[str, Exchange] = {}
        self._bytes_read = 0
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
        self._watching = asyncio.create_task(self.watch.run(self._session))

    async def close(self) -> None:
        """End every running request with EngineDiedError."""
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.wait((self._watching,))
        session, self._session = self._session, None
        for exchange in self._running.values():
            exchange.end("closed")
        if session is not None:
            await session.close()
        self._note_change()

    @property
    def session(self) -> aiohttp.ClientSession:
        """With the server's key. Open from `open` to `close`."""
        if self._session is None:
            raise EngineDiedError("The connection to the engine was closed.")
        return self._session

    def serve(self, dialect: Dialect | None, info: EngineInfo, assets: Mapping[str, bytes]) -> None:
        """From now on requests may be sent: in `dialect`, None for text only. `info` describes the server's model,
        `assets` are the bytes of its text by digest: other servers do not serve them."""
        self._dialect, self._info, self._assets = dialect, info, dict(assets)
        self._note_change()

    @property
    def serves(self) -> bool:
        """Whether `serve` has been called, however the server is."""
        return self._info is not None

    def withdraw(self) -> None:
        """Send nothing new until `serve` is called again: it may be another server now, or another model."""
        self._info = None
        self._note_change()

    def give_up(self, reason: str) -> None:
        """End every running request with EngineSilentError; it serves again once it has answered."""
        self.counters["given_up"] += 1
        for exchange in self._running.values():
            exchange.end("silent")
        self.watch.lose()

    # --- state --------------------------------------------------------------------------------------------------------

    @property
    def address(self) -> str:
        return self.url

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def frames_received(self) -> int:
        """Grows with everything that the server says."""
        return self.watch.heard + self._bytes_read + sum(one.bytes_read for one in self._running.values())

    @property
    def is_ready(self) -> bool:
        return self.state().state == "ready"

    def state(self) -> RemoteState:
        health = "lost" if self._session is None else self.watch.health
        if health == "lost" and self.watch.lives:
            return RemoteState(state="dead", message=f"The engine at {self.url} is gone.")
        if health in ("unknown", "lost") or self._info is None:
            return RemoteState(message=f"The engine at {self.url} does not serve yet.")
        is_draining = self._draining or health == "draining"
        return RemoteState(
            state="draining" if is_draining else "ready", incarnation=str(self.watch.lives), info=self._info
        )

    async def wait_ready(self) -> EngineInfo:
        while (state := self.state()).state != "ready" or state.info is None:
            await self.wait_changed()
        return state.info

    async def wait_changed(self) -> RemoteState:
        """Return the next state that may differ from the present one."""
        await self._changed.wait()
        return self.state()

    def _note_change(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    def _take_load(self, load: EngineLoad) -> None:
        if self.on_load is not None:
            self.on_load(load)

    # --- Engine -------------------------------------------------------------------------------------------------------

    def takes(self, request: GenerateRequest) -> bool:
        """Whether the server can do what the request asks for."""
        try:
            self._checked_dialect(request)
        except HeadraceError:
            return False
        return True

    async def generate(self, request: GenerateRequest) -> AsyncIterator[TokenOutput]:
        dialect = self._checked_dialect(request)
        if (info := self._info) is None:
            raise EngineDiedError(f"The engine at {self.url} serves no more.")
        async with self._exchange(request.request_id, request.deadline_unix_s) as exchange:
            stream = Stream(request, info, dialect.reader(request))
            async with aclosing(self._outputs(exchange, stream, dialect)) as outputs:
                async for output in outputs:
                    yield output

    async def finish(self, request_id: str, keep_tokens: int) -> None:
        if exchange := self._running.get(request_id):
            exchange.end("finish")

    async def abort(self, request_id: str) -> None:
        if exchange := self._running.get(request_id):
            exchange.end("abort")

    async def describe(self) -> EngineInfo:
        if self._info is None or not self.watch.lives:
            raise LoadingError(f"The engine at {self.url} does not serve yet.", progress=0.0)
        return self._info

    async def fetch_asset(self, digest: str) -> bytes:
        if (data := self._assets.get(digest)) is None:
            raise RequestError(f"There is no asset {digest}.", param="digest", value=digest)
        return data

    async def load(self) -> EngineLoad:
        """What goes through here: other clients of the same server are not seen."""
        return EngineLoad(
            running=len(self._running),
            prompt_tokens_total=self._totals["prompt"],
            cached_tokens_total=self._totals["cached"],
            output_tokens_total=self._totals["output"],
            requests_total=dict(self._endings),
            draining=self._draining,
        )

    async def drain(self) -> None:
        self._draining = True
        self._note_change()

    # --- Admin --------------------------------------------------------------------------------------------------------

    async def reset_prefix_cache(self) -> None:
        raise UnsupportedError(f"The engine at {self.url} is of another make: its cache is not reset from here.")

    async def order_store(self, order: StoreOrder) -> StoreAnswer:
        raise UnsupportedError(
            f"The engine at {self.url} is of another make: its KV store is not managed from here.", code="kv_store_off"
        )

    async def abort_requests(self, request_id: str) -> int:
        """Of the requests that go through here."""
        chosen = [
            exchange
            for name, exchange in self._running.items()
            if name == request_id or name.startswith(f"{request_id}-")
        ]
        for exchange in chosen:
            exchange.end("abort")
        return len(chosen)

    # --- one request --------------------------------------------------------------------------------------------------

    @asynccontextmanager
    async def relay(
        self, request_id: str, path: str, body: bytes, headers: Mapping[str, str], deadline_unix_s: float | None
    ) -> AsyncIterator[Exchange]:
        """Send a client's body as it is and give the answer, which is text. Leaving closes the connection.

        Raises what an answer other than 200 comes to, EngineDiedError for a connection that fails, and what it means
        when the request is ended from this side."""
        async with self._exchange(request_id, deadline_unix_s) as exchange:
            try:
                await exchange.post(self.session, self.url + path, body, headers)
                yield exchange
                self._endings["stop"] += 1
            except ExchangeEnded:
                self._endings["abort"] += 1
                exchange.raise_unless_wanted()
                raise RequestFailedError("The request was aborted.") from None
            except HeadraceError as error:
                self._note_error(error)
                raise

    @asynccontextmanager
    async def _exchange(self, request_id: str, deadline_unix_s: float | None) -> AsyncIterator[Exchange]:
        if self._draining:
            raise DrainingError("The engine takes nothing new.")
        if self._session is None:
            raise EngineDiedError("The connection to the engine was closed.")
        if request_id in self._running:
            raise RequestError(f"Request {request_id} is running already.", param="request_id")
        if len(self._running) >= MAX_STREAMS:
            raise PressureError(f"{MAX_STREAMS} requests are running already.")
        exchange = self._running[request_id] = Exchange(deadline_unix_s)
        try:
            yield exchange
        finally:
            exchange.close()
            del self._running[request_id]
            self._bytes_read += exchange.bytes_read

    def _checked_dialect(self, request: GenerateRequest) -> Dialect:
        if self._dialect is None:
            raise no_ids()
        self._dialect.check(request)
        return self._dialect

    async def _outputs(self, exchange: Exchange, stream: Stream, dialect: Dialect) -> AsyncGenerator[TokenOutput, None]:
        """Yield to the end, also where the request is ended from here; counts what comes and what goes wrong."""
        try:
            async with aclosing(outputs_of(exchange, self.session, self.url, stream, dialect)) as outputs:
                async for output in outputs:
                    self._count(stream, output)
                    yield output
        except ExchangeEnded:
            yield self._ended(exchange, stream)
        except HeadraceError as error:
            self._note_error(error)
            raise

    def _count(self, stream: Stream, output: TokenOutput) -> None:
        if output.cached is not None:
            self._totals["cached"] += output.cached.total
        if output.offset == len(stream.request.resume_ids):
            self._totals["prompt"] += len(stream.request.prompt_ids)
        self._totals["output"] += len(output.token_ids)
        if output.finish_reason is not None:
            self._endings[output.finish_reason] += 1

    def _ended(self, exchange: Exchange, stream: Stream) -> TokenOutput:
        """Return the terminal output of a request that was ended from here."""
        try:
            exchange.raise_unless_wanted()
        except HeadraceError:
            self._endings["error"] += 1
            raise
        reason: Literal["stop", "abort"] = "stop" if exchange.ended_by == "finish" else "abort"
        self._endings[reason] += 1
        return TokenOutput(stream.request.request_id, stream.request.attempt, stream.offset, [], reason)

    def _note_error(self, error: HeadraceError) -> None:
        self._endings["error"] += 1
        if isinstance(error, EngineDiedError):
            self.watch.look_soon()
