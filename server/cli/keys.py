"""`headrace keys`: make API keys, and hash keys that exist, for the file that --api-keys-file names."""

from __future__ import annotations

import sys

import click

from server.cli.common import debug_option


@click.group(short_help="Make and hash API keys.")
def keys() -> None:
    """Make and hash API keys for the file of --api-keys-file."""


@keys.command(short_help="Make a key.")
@click.argument("tenant")
@debug_option
def new(tenant: str) -> None:
    """Print a new key for TENANT, and under it the line for the key file, which holds only its hash.

    The key is shown this once. Requests with keys of one tenant share cached prefixes.
    """
    from server.access.keys import hashed_line, new_key, read_entry

    key = new_key()
    click.echo(key)
    click.echo(hashed_line(read_entry(key, tenant, "TENANT")))


@keys.command("hash", short_help="Hash a key that exists.")
@click.argument("tenant")
@debug_option
def hash_key(tenant: str) -> None:
    """Read a key from standard input and print the line for the key file, which holds only its hash."""
    from server.access.keys import check_strength, hashed_line, read_entry

    key = click.prompt("Key", hide_input=True, err=True) if sys.stdin.isatty() else sys.stdin.readline()
    key = key.strip()
    check_strength(key, "standard input")
    click.echo(hashed_line(read_entry(key, tenant, "TENANT")))
