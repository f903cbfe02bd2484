"""From a registry's name to the registry."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import cast
from urllib.parse import parse_qsl, urlsplit, urlunsplit

from engine.errors import ConfigError
from router.registry.base import Dialect, Registry
from router.registry.kubernetes import KubernetesRegistry, Service
from router.registry.records import split_worker_url
from router.registry.static import StaticRegistry
from router.registry.valkey import ValkeyRegistry

NAME = re.compile(r"[A-Za-z0-9._-]{1,63}")
KUBERNETES = re.compile(
    r"k8s:(?P<namespace>[a-z0-9-]{1,63})/(?P<service>[a-z0-9-]{1,63})(:(?P<port>[a-z0-9-]{1,63}))?"
    r"(\?gateways=(?P<gateways>[a-z0-9-]{1,63})(:(?P<gateways_port>[a-z0-9-]{1,63}))?)?"
    r"([?&]dialect=(?P<dialect>auto|openai|sglang|llama_server|text))?"
)
FORMS = (
    "Give static:FILE, static:URL,URL, redis://HOST:PORT/DB (also rediss, valkey, unix; ?namespace=NAME), or"
    " k8s:NAMESPACE/SERVICE:PORT (?gateways=SERVICE&dialect=NAME)."
)


def open_registry(spec: str) -> Registry:
    """Return the registry that `spec` names; call it on the event loop that will use it.

    Raises ConfigError for a name of none, a list that cannot be read, and a client that is not installed.
    """
    kind = spec.partition(":")[0]
    match kind:
        case "static":
            return _static(spec.removeprefix("static:"))
        case "redis" | "rediss" | "valkey" | "valkeys" | "unix":
            return _valkey(spec)
        case "k8s":
            return _kubernetes(spec)
    raise ConfigError(f"{spec[:200]!r} names no registry.", hint=FORMS)


def check_registry(spec: str) -> None:
    """Raise ConfigError for what `open_registry` would raise it for. Connects to nothing; not for a running loop."""

    async def check() -> None:
        await open_registry(spec).close()

    asyncio.run(check())


def _static(rest: str) -> StaticRegistry:
    if split_worker_url(rest)[1].startswith(("http://", "https://")):
        return StaticRegistry(urls=[url.strip() for url in rest.split(",") if url.strip()])
    if not rest:
        raise ConfigError("static: needs a file or a list of URLs.", hint=FORMS)
    return StaticRegistry(path=Path(rest))


def _valkey(spec: str) -> ValkeyRegistry:
    parts = urlsplit(spec)
    options = dict(parse_qsl(parts.query))
    namespace = options.pop("namespace", "headrace")
    if not NAME.fullmatch(namespace):
        raise ConfigError(f"The registry's namespace {namespace[:100]!r} cannot be used.", hint=FORMS)
    if options and parts.scheme != "unix":
        raise ConfigError(f"The registry has no option {sorted(options)[0][:100]!r}.", hint=FORMS)
    scheme = {"valkey": "redis", "valkeys": "rediss"}.get(parts.scheme, parts.scheme)
    query = "&".join(f"{name}={value}" for name, value in options.items())
    return ValkeyRegistry(urlunsplit((scheme, parts.netloc, parts.path, query, "")), namespace=namespace)


def _kubernetes(spec: str) -> KubernetesRegistry:
    found = KUBERNETES.fullmatch(spec)
    if found is None:
        raise ConfigError(f"{spec[:200]!r} names no service.", hint=FORMS)
    namespace = found["namespace"]
    gateways = None
    if found["gateways"]:
        gateways = Service(namespace, found["gateways"], found["gateways_port"] or "http")
    dialect = cast(Dialect, found["dialect"] or "headrace")
    return KubernetesRegistry(Service(namespace, found["service"], found["port"] or "http", dialect), gateways)
