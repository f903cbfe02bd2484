"""A client of the chat endpoint for a terminal: one conversation, streamed. Standard library only: it starts at once.

Owns the conversation and the connection of the running answer. Knows nothing of prompts, keys and colours.
"""

from __future__ import annotations

import http.client
import json
import re
import time
from collections.abc import Callable, Generator
from contextlib import closing
from typing import Any
from urllib.parse import urlsplit

from engine.errors import HeadraceError

Message = dict[str, str]

_CONNECT_TIMEOUT_S = 10.0
_ANSWER_TIMEOUT_S = 600.0
_LONGEST_ERROR_BYTES = 64 * 1024
_UNSENDABLE = re.compile(r"[\x00-\x20\x7f]")


class ChatError(HeadraceError):
    """The server cannot be asked, or it refused. `hint` says what to try."""

    code = "chat_error"

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.hint = hint


class NotReadyError(ChatError):
    """The server is up and its model is not. `retry_after_s` is the server's own guess."""

    def __init__(self, message: str, *, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class ChatClient:
    """Speaks HTTP with one server. `url` may lack the scheme and may end in /v1."""

    def __init__(self, url: str, api_key: str | None = None) -> None:
        try:
            parts = urlsplit(url if "//" in url else f"http://{url}")
            port = parts.port
            is_server = parts.scheme in ("http", "https") and bool(parts.hostname) and not _UNSENDABLE.search(url)
        except ValueError:
            is_server = False
        if not is_server:
            raise ChatError(f"{url!r} is not the URL of a server.", hint="Write it like http://127.0.0.1:8000.")
        self._headers = {"Content-Type": "application/json"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self._secure = parts.scheme == "https"
        self._host = parts.hostname or ""
        self._port = port
        self._path = parts.path.rstrip("/").removesuffix("/v1")
        self.url = f"{parts.scheme}://{parts.netloc}{self._path}"

    def models(self) -> list[str]:
        """Names of the served models."""
        connection, response = self._send("GET", "/v1/models", None)
        try:
            return [str(one["id"]) for one in json.loads(response.read())["data"]]
        except (OSError, http.client.HTTPException, ValueError, KeyError, TypeError):
            raise self._no_headrace() from None
        finally:
            connection.close()

    def first_model(self, on_wait: Callable[[str], None], patience_s: float = 900.0) -> str:
        """The name of the first served model, when it is ready. `on_wait` gets each new thing it says until then."""
        give_up, told = time.monotonic() + patience_s, ""
        while True:
            try:
                names = self.models()
            except NotReadyError as error:
                if time.monotonic() > give_up:
                    raise
                if str(error) != told:
                    told = str(error)
                    on_wait(told)
                time.sleep(error.retry_after_s)
                continue
            if not names:
                raise ChatError(f"The server at {self.url} serves no model.")
            return names[0]

    def stream(self, body: dict[str, object]) -> Generator[dict[str, Any]]:
        """Yield the chunks of a streamed chat completion. Closing the iterator ends the request on the server."""
        connection, response = self._send("POST", "/v1/chat/completions", {**body, "stream": True})
        try:
            for line in iter(response.readline, b""):
                if not line.startswith(b"data:"):
                    continue
                data = line[5:].strip()
                if data == b"[DONE]":
                    return
                chunk = json.loads(data)
                if "error" in chunk:
                    raise ChatError(_error_text(data, "the answer failed"))
                yield chunk
            raise ChatError("The server ended the answer in the middle.")
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise ChatError(f"The connection to {self.url} broke: {error or type(error).__name__}.") from error
        finally:
            connection.close()

    def _send(
        self, method: str, path: str, body: dict[str, object] | None
    ) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
        kind = http.client.HTTPSConnection if self._secure else http.client.HTTPConnection
        connection = kind(self._host, self._port, timeout=_CONNECT_TIMEOUT_S)
        try:
            connection.connect()
            connection.sock.settimeout(_ANSWER_TIMEOUT_S)
            content = None if body is None else json.dumps(body).encode()
            connection.request(method, self._path + path, content, self._headers)
            response = connection.getresponse()
            if response.status != 200:
                raise self._refusal(response)
        except OSError:
            connection.close()
            raise ChatError(f"No server answers at {self.url}.", hint="Start one with `headrace serve`.") from None
        except http.client.HTTPException:
            connection.close()
            raise self._no_headrace() from None
        except BaseException:
            connection.close()
            raise
        return connection, response

    def _refusal(self, response: http.client.HTTPResponse) -> ChatError:
        text = _error_text(response.read(_LONGEST_ERROR_BYTES), f"the server answered {response.status}")
        if response.status == 503:
            try:
                pause_s = float(response.headers.get("Retry-After") or 1)
            except ValueError:
                pause_s = 1.0
            return NotReadyError(text, retry_after_s=min(max(pause_s, 0.2), 5.0))
        hint = "Set HEADRACE_API_KEY to a key of this server." if response.status == 401 else None
        return ChatError(text, hint=hint)

    def _no_headrace(self) -> ChatError:
        return ChatError(f"What answers at {self.url} is no OpenAI-compatible server.")


class Conversation:
    """The messages so far. An answer that was stopped stays in it as far as it came."""

    def __init__(self, client: ChatClient, model: str, system: str | None = None, **sampling: object) -> None:
        self._client = client
        self._model = model
        self._system = system
        self._sampling = {name: value for name, value in sampling.items() if value is not None}
        self.messages: list[Message] = []
        self.finish_reason: str | None = None
        self.reset()

    def reset(self) -> None:
        """Forget everything but the system message."""
        self.messages = [{"role": "system", "content": self._system}] if self._system else []

    def ask(self, text: str) -> Generator[str]:
        """Yield the answer's text as it comes. A question that got no answer at all is taken back."""
        self.messages.append({"role": "user", "content": text})
        self.finish_reason = None
        answer: list[str] = []
        try:
            body: dict[str, object] = {"model": self._model, "messages": self.messages, **self._sampling}
            with closing(self._client.stream(body)) as chunks:
                for choice in (choice for chunk in chunks for choice in chunk.get("choices", ())):
                    self.finish_reason = choice.get("finish_reason") or self.finish_reason
                    if content := choice.get("delta", {}).get("content"):
                        answer.append(content)
                        yield content
        finally:
            if answer or self.finish_reason:
                self.messages.append({"role": "assistant", "content": "".join(answer)})
            else:
                self.messages.pop()


def _error_text(body: bytes, otherwise: str) -> str:
    """The message of an OpenAI error body."""
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"{otherwise}: {body[:200].decode(errors='replace')}".rstrip(": ")
