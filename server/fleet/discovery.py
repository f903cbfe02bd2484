"""How a gateway finds workers and other gateways: the registry, the keys, and where it tells what it dispatches."""

from __future__ import annotations

import msgspec

from engine.errors import ConfigError
from engine.wire.curve import KeyPair
from router.registry.base import GatewayRecord
from router.registry.open import check_registry
from server.config import GatewayConfig
from server.foreign.settings import ForeignSettings, read_engine_key, tokenizers_of
from server.wire_access import check_not_open, read_wire_keys
from server.worker.addresses import advertised_addresses


class Discovery(msgspec.Struct, frozen=True, kw_only=True):
    """What an API process of a gateway is told. `announced` are the gateway's own records, one for each API process;
    without them it tells nobody but its own processes what it dispatches. `insecure` allows workers on other machines
    to have no key where this gateway has one. `tokenizers` are by model."""

    register: str
    wire_key_file: str | None = None
    wire_clients_file: str | None = None
    insecure: bool = False
    listen: tuple[str, ...] = ()
    announced: tuple[GatewayRecord, ...] = ()
    tokenizers: dict[str, str] = {}
    engine_key_file: str | None = None

    @property
    def foreign(self) -> ForeignSettings:
        return ForeignSettings(tokenizers=self.tokenizers, api_key=read_engine_key(self.engine_key_file))

    @property
    def keys(self) -> KeyPair | None:
        return read_wire_keys(self.wire_key_file, self.wire_clients_file)


def discovery_of(config: GatewayConfig, incarnation: str) -> Discovery:
    """Raise ConfigError for settings that cannot be used, and for a door that would be open to other machines."""
    if config.register is None:
        raise ConfigError("A gateway needs --register.", hint="Where do its workers register? See docs/discovery.md.")
    check_registry(config.register)
    keys = read_wire_keys(config.wire_key_file, config.wire_clients_file)
    known = Discovery(
        register=config.register,
        wire_key_file=config.wire_key_file,
        wire_clients_file=config.wire_clients_file,
        insecure=config.insecure,
        tokenizers=tokenizers_of(config.tokenizer),
        engine_key_file=config.engine_key_file,
    )
    read_engine_key(config.engine_key_file)
    if config.dispatches_listen is None:
        return known
    if keys is None:
        check_not_open(config.dispatches_listen, "Give --wire-key-file and --wire-clients-file.")
    pairs = advertised_addresses(config.dispatches_listen, config.api_processes, config.advertise)
    records = [
        GatewayRecord(
            gateway_id=f"{shown.partition('://')[2].replace('/', '_')}",
            incarnation=incarnation,
            dispatches=shown,
            public_key=None if keys is None else keys.public,
        )
        for _, shown in pairs
    ]
    return msgspec.structs.replace(known, listen=tuple(one for one, _ in pairs), announced=tuple(records))
