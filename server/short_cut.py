"""The ASGI layer that takes requests past the framework which need nothing of it."""

from __future__ import annotations

from collections.abc import Mapping

from starlette.types import ASGIApp, Receive, Scope, Send


class ShortCut:
    """The innermost layer in front of the framework. `endpoints` answer a POST to exactly their paths, and tell their
    errors themselves: they would only pay for its routing and error handling, which take as long as all of our layers,
    some of it for each part of a stream. Whatever else is asked goes through the framework."""

    def __init__(self, app: ASGIApp, *, endpoints: Mapping[str, ASGIApp]) -> None:
        self.app = app
        self._endpoints = endpoints

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        app = self.app
        if scope["type"] == "http" and scope["method"] == "POST":
            app = self._endpoints.get(scope["path"], app)
        await app(scope, receive, send)
