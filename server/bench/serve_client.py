"""One HTTP client of an OpenAI-compatible server, for many requests at once. Needs aiohttp, of the extra `bench`.

Owns the connections, of which there is no limit: what is due is sent. Every request comes back as a record, failed ones
too. Knows neither the load's shape nor its length.
"""

from __future__ import annotations

import re
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Literal
from urllib.parse import urlsplit

import aiohttp
import msgspec

from engine.errors import ConfigError
from server.bench.serve_errors import BenchError
from server.bench.serve_records import RequestRecord
from server.bench.serve_stream import AnswerReader, error_message, prompt_tokens_of

Endpoint = Literal["chat", "completions"]
Prompt = str | list[int] | list[dict[str, str]]

_PATHS = {"chat": "/chat/completions", "completions": "/completions"}
_LONGEST_ERROR_BYTES = 64 * 1024
_LONGEST_ANSWER_BYTES = 16 << 20


class RequestOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What every request's body has. `extra` wins over all else in it."""

    endpoint: Endpoint = "chat"
    model: str = ""
    temperature: float | None = 0.0
    ignore_eos: bool = True
    usage: bool = True
    extra: dict[str, object] = {}

    def body(self, prompt: Prompt, max_tokens: int, *, stream: bool) -> bytes:
        """Encode a request. A list of messages is for the chat endpoint, anything else for completions."""
        body: dict[str, object] = {"model": self.model, "max_tokens": max_tokens, "stream": stream}
        body["messages" if self.endpoint == "chat" else "prompt"] = prompt
        if self.temperature is not None:
            body["temperature"] = self.temperature
        if self.ignore_eos:
            body["ignore_eos"] = True
        if stream and self.usage:
            body["stream_options"] = {"include_usage": True}
        return msgspec.json.encode({**body, **self.extra})


def base_url(url: str) -> str:
    """Complete what the user wrote: the scheme, and /v1 unless the path ends in a version of its own."""
    full = (url if "//" in url else f"http://{url}").rstrip("/")
    try:
        parts = urlsplit(full)
        valid = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:
        valid = False
    if not valid or parts.query or parts.fragment:
        raise ConfigError(f"{url!r} is not the URL of a server.", hint="Write it like http://127.0.0.1:8000.")
    if parts.username or parts.password:
        raise ConfigError("The URL has a password in it.", hint="Set HEADRACE_API_KEY to the server's key.")
    return full if re.search(r"/v\d\w*$", parts.path) else f"{full}/v1"


class LoadClient:
    """Sends to one server. Times are seconds since `start_clock`."""

    def __init__(self, session: aiohttp.ClientSession, base: str) -> None:
        self._session = session
        self._base = base
        self._start_s = time.perf_counter()

    def start_clock(self) -> None:
        self._start_s = time.perf_counter()

    def now_s(self) -> float:
        return time.perf_counter() - self._start_s

    async def first_model(self) -> str:
        body = await self._whole("GET", "/models", None)
        try:
            return str(msgspec.json.decode(body)["data"][0]["id"])
        except (ValueError, KeyError, TypeError, IndexError):
            raise BenchError(f"{self._base} names no model.", hint="Name one with --model.") from None

    async def prompt_tokens(self, options: RequestOptions, prompt: Prompt) -> int | None:
        """Ask for one token of answer, and return the prompt's length as the server counts; None where it does not."""
        body = await self._whole("POST", _PATHS[options.endpoint], options.body(prompt, 1, stream=False))
        try:
            return prompt_tokens_of(body)
        except ValueError:
            raise self._no_server() from None

    async def ask(
        self, options: RequestOptions, prompt: Prompt, max_tokens: int, record: RequestRecord
    ) -> tuple[RequestRecord, str]:
        """Stream an answer. The record, which has its due time, is filled in; the text is the answer's."""
        body = options.body(prompt, max_tokens, stream=True)
        reader = AnswerReader(record)
        stage = "connection"
        record.sent_s = self.now_s()
        try:
            async with self._session.post(self._base + _PATHS[options.endpoint], data=body) as response:
                stage = "cut stream"
                if response.status != 200:
                    body = await response.content.read(_LONGEST_ERROR_BYTES)
                    reader.fail(f"http {response.status}", error_message(body))
                else:
                    await self._read(response, reader)
        except TimeoutError:
            reader.fail("timeout", "The answer took longer than --timeout.")
        except aiohttp.ClientError as error:
            reader.fail(stage, str(error) or type(error).__name__)
        except ValueError as error:
            reader.fail("malformed", str(error))
        reader.end(self.now_s())
        return record, reader.text

    async def _read(self, response: aiohttp.ClientResponse, reader: AnswerReader) -> None:
        """Read to the body's end, behind [DONE]: only then does the connection serve the next request."""
        async for part in response.content.iter_any():
            reader.feed(part, self.now_s())

    async def _whole(self, method: str, path: str, body: bytes | None) -> bytes:
        try:
            async with self._session.request(method, self._base + path, data=body) as response:
                content = bytearray()
                async for part in response.content.iter_any():
                    content += part
                    if len(content) > _LONGEST_ANSWER_BYTES:
                        raise self._no_server()
                if response.status == 200:
                    return bytes(content)
                hint = "Set HEADRACE_API_KEY to a key of this server." if response.status == 401 else None
                raise BenchError(
                    f"The server answered {response.status} to {path}: {error_message(bytes(content))}", hint=hint
                )
        except TimeoutError:
            raise BenchError(f"{self._base}{path} did not answer in time.") from None
        except aiohttp.ClientConnectionError as error:
            raise BenchError(
                f"No server answers at {self._base}: {error}", hint="Start one with `headrace serve`."
            ) from None
        except (aiohttp.ClientError, ValueError):
            raise self._no_server() from None

    def _no_server(self) -> BenchError:
        return BenchError(f"What answers at {self._base} is no OpenAI-compatible server.")


@asynccontextmanager
async def connected(
    base: str, api_key: str | None, timeout_s: float, *, reuse: bool = True
) -> AsyncIterator[LoadClient]:
    """Open a client; `timeout_s` is each request's whole time. Without `reuse` each has a connection of its own."""
    headers = {"Content-Type": "application/json"}
    if api_key:
        headers["Authorization"] = f"Bearer {api_key}"
    # Shorter than servers keep idle connections: a request on one that is just being closed would count as failed.
    connector = aiohttp.TCPConnector(limit=0, **({"keepalive_timeout": 2} if reuse else {"force_close": True}))
    async with aiohttp.ClientSession(
        connector=connector,
        timeout=aiohttp.ClientTimeout(total=timeout_s),
        headers=headers,
    ) as session:
        yield LoadClient(session, base)
