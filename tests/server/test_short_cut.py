"""Which requests go past the framework."""

from __future__ import annotations

import pytest
from starlette.types import Receive, Scope, Send

from server.short_cut import ShortCut


class Named:
    """An application that tells that it was called, and with what."""

    def __init__(self, name: str, calls: list[tuple[str, Scope]]) -> None:
        self._name, self._calls = name, calls

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._calls.append((self._name, scope))


@pytest.mark.parametrize(
    ("scope", "who"),
    [
        ({"type": "http", "method": "POST", "path": "/v1/completions"}, "endpoint"),
        ({"type": "http", "method": "GET", "path": "/v1/completions"}, "framework"),
        ({"type": "http", "method": "OPTIONS", "path": "/v1/completions"}, "framework"),
        ({"type": "http", "method": "POST", "path": "/v1/completions/"}, "framework"),
        ({"type": "http", "method": "POST", "path": "/v1/Completions"}, "framework"),
        ({"type": "http", "method": "POST", "path": "/admin/drain"}, "framework"),
        ({"type": "websocket", "path": "/v1/completions"}, "framework"),
        ({"type": "lifespan"}, "framework"),
    ],
    ids=["post", "get", "options", "slash", "case", "other", "websocket", "lifespan"],
)
async def test_only_a_post_to_exactly_its_path_goes_to_an_endpoint(scope: Scope, who: str) -> None:
    calls: list[tuple[str, Scope]] = []
    endpoint = Named("endpoint", calls)
    app = ShortCut(Named("framework", calls), endpoints={"/v1/completions": endpoint})

    async def receive() -> dict[str, object]:
        raise AssertionError("nothing is read on the way")

    async def send(message: object) -> None:
        raise AssertionError("nothing is sent on the way")

    await app(scope, receive, send)
    assert calls == [(who, scope)], "once, and as it came"
