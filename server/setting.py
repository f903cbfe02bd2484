"""One setting of a command: its names in every source, its type and its bounds. Knows neither tables nor sources."""

from __future__ import annotations

from typing import get_type_hints

import msgspec

from server.config import ServeConfig, WorkerConfig
from server.setting_values import Kind, choices_of

ENV_PREFIX = "HEADRACE_"
MODEL, MEMORY, FLEET, HTTP, ACCESS, LOGS, WORKER, GATEWAY = (
    "Model",
    "Cache and scheduling",
    "Replicas and routing",
    "HTTP",
    "Access",
    "Logging",
    "Worker",
    "Gateway",
)
"""Sections of the tables."""


class Setting(msgspec.Struct, frozen=True, kw_only=True):
    """`field` is the path in `config`, whose annotation gives the type. `low` and `high` are inclusive."""

    name: str
    field: str
    section: str
    help: str
    config: type[ServeConfig] | type[WorkerConfig] = ServeConfig
    kind: Kind = "plain"
    choices: tuple[str, ...] = ()
    low: float | None = None
    high: float | None = None
    metavar: str = ""

    @property
    def variable(self) -> str:
        return ENV_PREFIX + self.name.replace("-", "_").upper()

    @property
    def flag(self) -> str:
        return "MODEL" if self.name == "model" else f"--{self.name}"

    @property
    def type(self) -> object:
        owner, _, field = self.field.rpartition(".")
        return get_type_hints(get_type_hints(self.config)[owner] if owner else self.config)[field]

    @property
    def default(self) -> object:
        owner, _, field = self.field.rpartition(".")
        config = self.config()
        return getattr(getattr(config, owner) if owner else config, field)

    @property
    def allowed(self) -> tuple[str, ...]:
        return self.choices or choices_of(self.type)

    @property
    def is_switch(self) -> bool:
        return self.type is bool
