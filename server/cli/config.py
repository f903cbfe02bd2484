"""`headrace config show`: the settings as `headrace serve` would have them, and where each comes from."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping

import click

from server.cli.common import debug_option
from server.cli.serve import Given, given_flags, parameters
from server.setting_values import format_size
from server.settings import SETTINGS, Setting, gather, parse

SECRETS = ("HEADRACE_API_KEYS", "HEADRACE_ADMIN_KEY", "HEADRACE_API_KEY")
DEFAULT = "default"


@click.group(short_help="Show the settings.")
def config() -> None:
    """Look at the settings without starting a server."""


def _show(format_: str, **given: Given) -> None:
    """Print every setting and where its value comes from, with the arguments of `headrace serve`.

    The YAML can be used as a file for --config. Keys and secrets are never printed.
    """
    flags = given_flags(given)
    raw, warnings = gather(flags, os.environ)
    for warning in warnings:
        click.echo(f"warning: {warning}", err=True)
    rows: list[tuple[Setting, object, str]] = []
    for setting in SETTINGS:
        found = raw.get(setting.name)
        value = setting.default if found is None else parse(setting, found)
        rows.append((setting, _written(setting, value), DEFAULT if found is None else found.source))
    secrets = {name: "(set, not shown)" for name in SECRETS if os.environ.get(name)}
    click.echo(_as_json(rows, secrets) if format_ == "json" else _as_yaml(rows, secrets), nl=False)


def _written(setting: Setting, value: object) -> object:
    """A value as people write it, which reads back as the same."""
    if setting.kind == "size" and isinstance(value, int):
        return format_size(value)
    if setting.kind == "duration" and isinstance(value, int | float):
        return f"{value}s"
    return value


def _as_json(rows: list[tuple[Setting, object, str]], secrets: Mapping[str, str]) -> str:
    settings = {setting.name: {"value": value, "source": source} for setting, value, source in rows}
    return json.dumps({"settings": settings, "secrets": dict(secrets)}, indent=2) + "\n"


def _as_yaml(rows: list[tuple[Setting, object, str]], secrets: Mapping[str, str]) -> str:
    pairs = [(f"{setting.name}: {json.dumps(value, ensure_ascii=False)}", source) for setting, value, source in rows]
    width = min(48, max(len(pair) for pair, _ in pairs))
    lines = [f"{pair:<{width}}  # {source}" for pair, source in pairs]
    lines += [f"# {name}: {note}" for name, note in secrets.items()]
    return "\n".join(lines) + "\n"


_FORMAT = click.Option(
    ["--format", "format_"], type=click.Choice(["yaml", "json"]), default="yaml", show_default=True, help="The form."
)

show = debug_option(
    click.Command("show", callback=_show, params=[*parameters(), _FORMAT], help=_show.__doc__, short_help="Print them.")
)
config.add_command(show)
