"""`headrace gateway`: turn flags, environment and file into a GatewayConfig, and hand it to the launcher."""

from __future__ import annotations

import os

import click

from server.cli.common import debug_option
from server.cli.serve import EPILOG, Given, SettingsCommand, given_flags, options, run_server
from server.settings import GATEWAY_SETTINGS, read_gateway_settings


def _gateway(**given: Given) -> int:
    """Serve the OpenAI API in front of the workers that a registry lists.

    A gateway has no engine and keeps nothing: run as many as you like. Requests go to the worker that has their prefix
    cached and room for them, and on to another one when it dies.
    """
    config, warnings = read_gateway_settings(given_flags(given), os.environ)
    for warning in warnings:
        click.echo(f"warning: {warning}", err=True)
    return run_server(config)


gateway = debug_option(
    SettingsCommand(
        "gateway", callback=_gateway, params=options(GATEWAY_SETTINGS), help=_gateway.__doc__, epilog=EPILOG
    )
)
