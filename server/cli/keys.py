"""`headrace keys`: make and hash API keys for the file of --api-keys-file; make key pairs for the wire."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from server.cli.common import debug_option


@click.group(short_help="Make API keys and wire keys.")
def keys() -> None:
    """Make and hash API keys for the file of --api-keys-file; make key pairs for workers and gateways."""


@keys.command(short_help="Make a key.")
@click.argument("tenant")
@debug_option
def new(tenant: str) -> None:
    """Print a new key for TENANT, and under it the line for the key file, which holds only its hash.

    The key is shown this once. Requests with keys of one tenant share cached prefixes.
    """
    from server.access.keys import hashed_line, new_key, read_entry

    key = new_key()
    line = hashed_line(read_entry(key, tenant, "TENANT"))  # a tenant that cannot be gets no key
    click.echo(key)
    click.echo(line)


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


@keys.command("pair", short_help="Make a key pair for the wire.")
@click.argument("file", type=click.Path(path_type=Path, dir_okay=False))
@debug_option
def new_pair(file: Path) -> None:
    """Make FILE with a new key pair (--wire-key-file), which only you may read, and print its public key.

    A worker lets in the clients whose public keys stand in the file of --wire-clients-file, one a line.
    """
    from engine.wire.curve import KeyPair

    pair = KeyPair.new()
    pair.write(file)
    click.echo(pair.public)
