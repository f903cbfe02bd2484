"""`headrace worker`: turn flags, environment and file into a WorkerConfig, and hand it to the worker's process."""

from __future__ import annotations

import os

import click

from server.cli.common import debug_option
from server.cli.serve import EPILOG, Given, SettingsCommand, given_flags, parameters
from server.settings import WORKER_SETTINGS, read_worker_settings


def _worker(**given: Given) -> int:
    """Run engines of MODEL for gateways on this machine or others, which find them in a registry.

    A worker speaks to gateways over ZeroMQ, encrypted and with a list of known keys where other machines can reach it.
    Its HTTP port is for health, metrics and operators.
    """
    config, warnings = read_worker_settings(given_flags(given), os.environ)
    for warning in warnings:
        click.echo(f"warning: {warning}", err=True)

    from engine.loader.precheck import check_model
    from server.access.credentials import ADMIN_VARIABLE, admin_digests
    from server.worker.process import run

    digests = admin_digests(config.admin_key_file, os.environ)
    os.environ.pop(ADMIN_VARIABLE, None)  # the children need none of it
    # Before processes run: the engines would say the same seconds later.
    check_model(config.engine)
    return run(config, digests)


worker = debug_option(
    SettingsCommand("worker", callback=_worker, params=parameters(WORKER_SETTINGS), help=_worker.__doc__, epilog=EPILOG)
)
