"""The operator's routes under /kv, and what they do: an order goes to every engine, and each answers for itself.

The guard has checked who asks. `?worker=` names one engine by its target id. An answer is good when one engine's is;
what the others say stands beside it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from urllib.parse import parse_qs

import msgspec
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from engine.errors import HeadraceError, RequestError, UnsupportedError
from engine.kv.store_orders import StoreAdmin, StoreAnswer
from kvstore.keys import PUBLIC_SCOPE, owner_of
from server.errors import reply_to
from server.kv_orders import KV_GETS, KV_POSTS, RESET_PATHS, KVBody, Read
from server.openai.body import parse_body
from server.openai.json_endpoint import JsonEndpoint, Reply
from server.service import Service

logger = logging.getLogger("headrace.admin")

Order = Callable[[StoreAdmin], Awaitable[StoreAnswer | None]]


async def ask_all(engines: Mapping[str, StoreAdmin], worker: str | None, order: Order) -> dict[str, object]:
    """Give an order to all engines at once, or to one. Raises what the first says if none could carry it out."""
    if worker is not None and worker not in engines:
        raise RequestError(
            f"There is no worker {worker!r} here; there are {', '.join(sorted(engines)[:16]) or 'none'}.",
            param="worker",
            value=worker,
            code="unknown_worker",
        )
    asked = [name for name in engines if worker in (None, name)]
    if not asked:
        raise UnsupportedError("This server has no engine with a KV store.", code="kv_store_off")
    answers = await asyncio.gather(*(order(engines[name]) for name in asked), return_exceptions=True)
    failures = [one for one in answers if isinstance(one, BaseException)]
    for failure in failures:
        if len(failures) == len(answers) or not isinstance(failure, HeadraceError):
            raise failure
    return {"workers": [_shown(name, answer) for name, answer in zip(asked, answers, strict=True)]}


def _shown(worker: str, answer: StoreAnswer | BaseException | None) -> dict[str, object]:
    if isinstance(answer, HeadraceError):
        return {"worker": worker, **msgspec.json.decode(reply_to(answer).body)}
    fields = {} if answer is None else msgspec.to_builtins(answer)
    fields.pop("type", None)
    return {"worker": worker, **fields}


class ServiceNames:
    """The `Names` of a process that knows text and tenants."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def tokens(self, model: str | None, prompt: str) -> Sequence[int]:
        text = self._service.model(model).require_text()
        (ids,) = await text.prompts_ids([prompt], add_special_tokens=True, keep=None, to_run=False)
        return ids

    def scope(self, tenant: str | None, salt: str | None) -> bytes:
        tenants = None if self._service.tenants is None else self._service.tenants()
        if tenants is not None and tenant is None:
            raise RequestError("Whose KV? Name the tenant.", param="tenant", code="missing_required_parameter")
        if tenant is not None and tenant not in (tenants or ()):
            raise RequestError(
                f"No key belongs to a tenant {tenant!r}; what is stored of a former one has an 'owner'.",
                param="tenant",
                value=tenant,
                code="unknown_tenant",
            )
        return self._service.cache_scope(tenant, salt)

    def of_owners(self) -> dict[str, str]:
        """Return the known tenants by the owner in hex that stands for them in a store."""
        names = {owner_of(PUBLIC_SCOPE).hex(): "(everyone)"}
        for tenant in () if self._service.tenants is None else self._service.tenants():
            names[owner_of(self._service.cache_scope(tenant, None)).hex()] = tenant
        return names


def kv_routes(service: Service) -> list[Route]:
    routes = [_route(service, path, "POST", partial(_order, path, read)) for path, read in KV_POSTS.items()]
    routes += [_route(service, path, "GET", partial(_order, path, read)) for path, read in KV_GETS.items()]
    return routes + [_route(service, path, "POST", _reset) for path in RESET_PATHS]


OrderAnswer = Callable[[str | None, Service, bytes], Awaitable[Reply]]


def _route(service: Service, path: str, method: str, answer: OrderAnswer) -> Route:
    return Route(path, _WithWorker(service, answer), methods=[method])


class _WithWorker:
    """A JsonEndpoint whose answer is also told the query's worker."""

    def __init__(self, service: Service, answer: OrderAnswer) -> None:
        self._service, self._answer = service, answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        endpoint: ASGIApp = JsonEndpoint(
            self._service, partial(self._answer, worker_in(scope["query_string"])), needs_model=False
        )
        await endpoint(scope, receive, send)


def worker_in(query: bytes) -> str | None:
    """Return the worker that a query names, None when it names none."""
    named = parse_qs(query.decode("latin-1")).get("worker")
    return named[0] if named else None


async def _order(path: str, read: Read, worker: str | None, service: Service, body: bytes) -> Reply:
    names = ServiceNames(service)
    model, order = await read(body, names)
    answer = await ask_all(_engines(service, model), worker, lambda engine: engine.order_store(order))
    if path in KV_POSTS:
        logger.info("an operator's order to the KV store was carried out", extra={"order": path, "worker": worker})
    else:
        _name_tenants(answer, names.of_owners())
    return Reply(answer)


async def _reset(worker: str | None, service: Service, body: bytes) -> Reply:
    asked = await parse_body(body or b"{}", KVBody)
    answer = await ask_all(_engines(service, asked.model), worker, lambda engine: engine.reset_prefix_cache())
    logger.info("the prefix cache was reset, as an operator asked", extra={"worker": worker})
    return Reply({"status": "ok", **answer})


def _engines(service: Service, model: str | None) -> dict[str, StoreAdmin]:
    models = service.models.served() if model is None else [service.model(model)]
    return {name: engine for one in models for name, engine in one.stores().items()}


def _name_tenants(answer: dict[str, object], names: Mapping[str, str]) -> None:
    """Add to each owner the tenant that it is, as far as that is known here."""
    workers = answer["workers"]
    assert isinstance(workers, list), "ask_all makes a list"
    for worker in workers:
        for uses in worker.get("owners", {}).values():
            for use in uses:
                use["tenant"] = names.get(use["owner"])
