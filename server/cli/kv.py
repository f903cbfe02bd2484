"""`headrace kv`: look into the directory of a disk tier, whether a server uses it or not."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import click

from engine.errors import ConfigError
from server.cli.common import debug_option

if TYPE_CHECKING:
    from kvstore.disk.place import FoundObject, Place

PATH = click.argument("path", type=click.Path(path_type=Path, file_okay=False))
FORMAT = click.option("--format", "output", type=click.Choice(["text", "json"]), default="text", show_default=True)


@click.group(short_help="Inspect a directory of stored KV blocks.")
def kv() -> None:
    """Inspect a directory of stored KV blocks. Nothing is changed, and a server may use it meanwhile."""


@kv.command("stat", short_help="Count objects and bytes.")
@PATH
@FORMAT
@debug_option
def stat_command(path: Path, output: str) -> None:
    """Count what is stored in PATH: objects and bytes, by model and settings (namespace)."""
    import msgspec

    from kvstore.disk.inspect import survey
    from server.setting_values import format_size

    with _place(path) as place:
        found = survey(place)
    if output == "json":
        click.echo(msgspec.json.encode(found).decode())
        return
    for one in found.namespaces:
        model = one.fields.get("model", "?") if one.fields else "?"
        click.echo(
            f"{one.digest[:16]}  {_printable(str(model))}: {one.objects} objects of {one.owners} owners,"
            f" {format_size(one.size_bytes)}, last used {_age(one.newest_use_s)} to {_age(one.oldest_use_s)} ago"
        )
    click.echo(f"in all: {found.objects} objects, {format_size(found.size_bytes)}")
    beside = {"unfinished": found.unfinished, "to be deleted": found.doomed, "corrupt": found.corrupt}
    click.echo("beside them: " + ", ".join(f"{count} {what}" for what, count in beside.items()))


@kv.command("list", short_help="List objects.")
@PATH
@click.option("--limit", type=click.IntRange(min=1), default=1000, show_default=True, help="List so many at most.")
@FORMAT
@debug_option
def list_command(path: Path, limit: int, output: str) -> None:
    """List the objects in PATH: end key, tokens, layers, heads, bytes and when each was last used, the newest first."""
    import msgspec

    from server.setting_values import format_size

    with _place(path) as place:
        for found in sorted(place.walk(), key=lambda one: one.modified_s, reverse=True)[:limit]:
            row = _row(place, found)
            if output == "json":
                click.echo(msgspec.json.encode(row).decode())
                continue
            click.echo(
                f"{row['block'][:16]}  group {row['group']}  layers {row['layers']}  heads {row['heads']}"
                f"  tokens {row['tokens']}  {format_size(found.size_bytes)}  {_age(found.modified_s)}"
            )


@kv.command(short_help="Check every byte.")
@PATH
@debug_option
def verify(path: Path) -> int:
    """Check every byte of every object in PATH against its checksums and its name. Exit code 1 when something is wrong.

    A server finds such objects itself when it loads them, and computes their KV anew.
    """
    from kvstore.disk.inspect import verify as verify_all

    checked = wrong = 0
    with _place(path) as place:
        for found, error in verify_all(place):
            checked += 1
            if error is not None:
                wrong += 1
                click.echo(f"{place.path_of(found.key)}: {_printable(str(error))}")
    click.echo(f"{checked} objects checked, {wrong} wrong")
    return 1 if wrong else 0


@contextmanager
def _place(path: Path) -> Iterator[Place]:
    from kvstore.disk.inspect import open_place
    from kvstore.errors import TierUnusableError

    try:
        yield open_place(path)
    except TierUnusableError as error:
        raise ConfigError(str(error)) from error
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error


def _row(place: Place, found: FoundObject) -> dict[str, str]:
    from kvstore.disk.inspect import header_of
    from kvstore.errors import CorruptObjectError

    key = found.key
    row = {
        "namespace": key.namespace.hex(),
        "owner": key.owner.hex(),
        "block": key.block.hex(),
        "group": str(key.group),
        "layers": f"{key.layer_start}-{key.layer_stop - 1}",
        "heads": f"{key.head_start}-{key.head_stop - 1}",
    }
    try:
        header = header_of(place, found)
    except CorruptObjectError as error:
        return {**row, "tokens": f"? ({error})"}
    except FileNotFoundError:
        return {**row, "tokens": "? (gone)"}
    return {**row, "tokens": f"{header.first_token}-{header.first_token + header.num_tokens - 1}"}


def _age(unix_s: float) -> str:
    seconds = max(0.0, time.time() - unix_s)
    for unit, length in (("d", 86400), ("h", 3600), ("m", 60)):
        if seconds >= length:
            return f"{seconds / length:.1f} {unit}"
    return f"{seconds:.0f} s"


def _printable(text: str) -> str:
    """What a directory says cannot steer the terminal."""
    return "".join(character if character.isprintable() else "?" for character in text)
