"""The part of a Kubernetes API server that discovery uses: EndpointSlices of one namespace, listed and watched.

Versions, pages, bookmarks and 410 Gone behave as documented; a test may lose history, cut connections and refuse.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from aiohttp import web

PATH = "/apis/discovery.k8s.io/v1/namespaces/{namespace}/endpointslices"


def endpoint_slice(name: str, service: str, port: int, *hosts: str, terminating: bool = False) -> dict:  # type: ignore[type-arg]
    """What the server holds for one slice, with fields that a client does not need."""
    conditions = {"ready": not terminating, "serving": True, "terminating": terminating}
    return {
        "kind": "EndpointSlice",
        "apiVersion": "discovery.k8s.io/v1",
        "metadata": {"name": name, "labels": {"kubernetes.io/service-name": service}},
        "addressType": "IPv4",
        "endpoints": [
            {"addresses": [host], "conditions": conditions, "targetRef": {"kind": "Pod", "name": f"pod-{host}"}}
            for host in hosts
        ]
        or None,
        "ports": [{"name": "metrics", "port": 1, "protocol": "TCP"}, {"name": "http", "port": port}],
    }


class KubernetesApi:
    def __init__(self, token: str) -> None:
        self.token = token
        self.url = ""
        self.page_size = 1
        self.refuse_with: int | None = None
        self.lists = 0
        self.watches: list[str] = []
        self.rejected = 0
        self._slices: dict[str, dict] = {}  # type: ignore[type-arg]
        self._history: list[tuple[int, dict]] = []  # type: ignore[type-arg]
        self._version = 100
        self._oldest = 0
        self._streams: list[tuple[web.Request, asyncio.Queue[dict]]] = []  # type: ignore[type-arg]

    def put(self, one: dict) -> None:  # type: ignore[type-arg]
        kind = "MODIFIED" if one["metadata"]["name"] in self._slices else "ADDED"
        self._slices[one["metadata"]["name"]] = one
        self._note(kind, one)

    def delete(self, name: str) -> None:
        self._note("DELETED", self._slices.pop(name))

    def bookmark(self) -> None:
        """Tell watchers the present version, past changes that do not concern them."""
        self._version += 50
        metadata = {"resourceVersion": str(self._version), "creationTimestamp": None}
        self._tell({"type": "BOOKMARK", "object": {"kind": "EndpointSlice", "metadata": metadata}})

    def forget_history(self) -> None:
        self._version += 1
        self._oldest = self._version

    def drop_silently(self, name: str) -> None:
        """Delete a slice without telling watchers."""
        del self._slices[name]

    def say(self, line: dict) -> None:  # type: ignore[type-arg]
        """Send those who watch now anything."""
        for _, queue in self._streams:
            queue.put_nowait(line)

    def cut(self) -> None:
        """Break all open watches."""
        streams, self._streams = self._streams, []
        for request, _ in streams:
            if request.transport is not None:
                request.transport.abort()

    @property
    def num_streams(self) -> int:
        return len(self._streams)

    @property
    def version(self) -> int:
        return self._version

    def _note(self, kind: str, one: dict) -> None:  # type: ignore[type-arg]
        self._version += 1
        one["metadata"]["resourceVersion"] = str(self._version)
        self._tell({"type": kind, "object": json.loads(json.dumps(one))})

    def _tell(self, event: dict) -> None:  # type: ignore[type-arg]
        self._history.append((self._version, event))
        self.say(event)

    async def answer(self, request: web.Request) -> web.StreamResponse:
        if request.headers.get("Authorization") != f"Bearer {self.token}":
            self.rejected += 1
            return _status(401, "Unauthorized")
        if self.refuse_with is not None:
            return _status(self.refuse_with, "no")
        service = request.query["labelSelector"].removeprefix("kubernetes.io/service-name=")
        if request.query.get("watch") == "1":
            return await self._watch(request, service)
        return self._list(request, service)

    def _list(self, request: web.Request, service: str) -> web.Response:
        self.lists += 1
        label = "kubernetes.io/service-name"
        named = [one for _, one in sorted(self._slices.items()) if one["metadata"]["labels"][label] == service]
        start = int(request.query.get("continue", "0"))
        end = start + min(self.page_size, int(request.query["limit"]))
        metadata = {"resourceVersion": str(self._version), "continue": str(end) if end < len(named) else ""}
        return web.json_response({"kind": "EndpointSliceList", "metadata": metadata, "items": named[start:end]})

    async def _watch(self, request: web.Request, service: str) -> web.StreamResponse:
        version = int(request.query["resourceVersion"])
        self.watches.append(request.query["resourceVersion"])
        assert request.query["allowWatchBookmarks"] == "true"
        if version < self._oldest:
            return _status(410, "too old resource version")
        response = web.StreamResponse()
        await response.prepare(request)
        queue: asyncio.Queue[dict] = asyncio.Queue()  # type: ignore[type-arg]
        for number, event in self._history:
            if number > version:
                queue.put_nowait(event)
        self._streams.append((request, queue))
        try:
            while True:
                event = await queue.get()
                if _service(event) in (service, None):
                    await response.write(json.dumps(event).encode() + b"\n")
        except (ConnectionError, asyncio.CancelledError):
            return response


def _service(event: dict) -> str | None:  # type: ignore[type-arg]
    """The service of a change, None for what concerns everybody."""
    if event["type"] not in ("ADDED", "MODIFIED", "DELETED") or not isinstance(event["object"], dict):
        return None
    return str(event["object"]["metadata"]["labels"]["kubernetes.io/service-name"])


def _status(code: int, message: str) -> web.Response:
    return web.json_response({"kind": "Status", "code": code, "message": message}, status=code)


@asynccontextmanager
async def kubernetes_api(token: str, namespace: str) -> AsyncIterator[KubernetesApi]:
    api = KubernetesApi(token)
    application = web.Application()
    application.router.add_get(PATH.format(namespace=namespace), api.answer)
    runner = web.AppRunner(application, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    api.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        yield api
    finally:
        api.cut()
        await runner.cleanup()
