"""What the fleet of one API process stands on: a registry, keys, and the sharing of dispatches with its peers."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import zmq

from engine.errors import ConfigError
from engine.wire.curve import KeyPair
from router.registry.base import Announcement, GatewayRecord, Registry
from router.registry.open import open_registry
from router.sharing import DispatchSharing
from server.api_spec import ApiSpec
from server.fleet.discovery import Discovery
from server.fleet.local import LocalRegistry
from server.foreign.settings import ForeignSettings
from server.sharing_keys import SharingKeys


@dataclass
class Footing:
    """`open` on the loop that uses it, `close` at the end. `gateways` are peers that no registry need list; `own` is
    what is announced of this process."""

    registry: Registry
    keys: KeyPair | None = None
    insecure: bool = False
    sharing: DispatchSharing | None = None
    gateways: tuple[GatewayRecord, ...] = ()
    own: GatewayRecord | None = None
    with_events: bool = True
    context: zmq.Context[Any] | None = None
    announcement: Announcement | None = None
    foreign: ForeignSettings | None = None

    async def open(self) -> None:
        """Raises ConfigError for an address that cannot be had."""
        if self.sharing is not None:
            try:
                self.sharing.open()
            except zmq.ZMQError as error:
                raise ConfigError(f"Cannot listen on {self.sharing.address}: {error}.") from None
        if self.own is not None:
            self.announcement = await self.registry.announce(self.own)

    async def close(self) -> None:
        if self.announcement is not None:
            await self.announcement.close()
        await self.registry.close()
        if self.sharing is not None:
            self.sharing.close()
        if self.context is not None:
            self.context.term()


def footing_of(spec: ApiSpec) -> Footing:
    """Raise ConfigError for a registry that cannot be used."""
    if spec.discovery is not None:
        return _of_gateway(spec, spec.discovery)
    sharing = None
    if len(spec.gateways) > 1:
        sharing = DispatchSharing(spec.gateways[spec.index].dispatches)
    return Footing(
        LocalRegistry(spec.workers), sharing=sharing, gateways=spec.gateways, with_events=len(spec.workers) > 1
    )


def _of_gateway(spec: ApiSpec, discovery: Discovery) -> Footing:
    registry, keys = open_registry(discovery.register), discovery.keys
    if not discovery.announced:
        sharing = DispatchSharing(spec.gateways[spec.index].dispatches) if len(spec.gateways) > 1 else None
        return Footing(registry, keys, discovery.insecure, sharing, spec.gateways, foreign=discovery.foreign)
    context: zmq.Context[Any] = zmq.Context()
    clients = None if discovery.wire_clients_file is None else Path(discovery.wire_clients_file)
    sharing_keys = None if keys is None else SharingKeys(context, keys, clients)
    sharing = DispatchSharing(discovery.listen[spec.index], context=context, keys=sharing_keys)
    own = discovery.announced[spec.index]
    return Footing(
        registry,
        keys,
        discovery.insecure,
        sharing,
        discovery.announced,
        own,
        context=context,
        foreign=discovery.foreign,
    )
