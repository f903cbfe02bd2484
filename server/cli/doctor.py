"""`headrace doctor`: whether this machine can serve, line by line."""

from __future__ import annotations

import click

from server.cli.common import debug_option


@click.command(short_help="Check this machine.")
@click.option("--host", default="127.0.0.1", show_default=True, help="The address that is to be listened on.")
@click.option("--port", type=click.IntRange(0, 65535), default=8000, show_default=True, help="The port.")
@click.option(
    "--kv-store",
    multiple=True,
    metavar="TIER",
    envvar="HEADRACE_KV_STORE",
    help="A tier of the KV store to look at, as `headrace serve` takes it. Given once for each.",
)
@click.option(
    "--kv-store-secret-file", metavar="FILE", envvar="HEADRACE_KV_STORE_SECRET_FILE", help="The store's secret."
)
@debug_option
def doctor(host: str, port: int, kv_store: tuple[str, ...], kv_store_secret_file: str | None) -> int:
    """Check what a server needs on this machine: Python, torch, device, memory, directories, port, and tiers of the KV
    store.

    The exit code is 1 when something is missing.
    """
    from server.doctor import checks

    failed = False
    for check in checks(host, port, kv_store, kv_store_secret_file):
        failed |= check.state == "bad"
        click.echo(f"{_MARKS[check.state]}  {check.name:<12} {check.text}")
        if check.hint:
            click.echo(f"{'':>18} {check.hint}")
    return int(failed)


_MARKS = {"good": "ok  ", "note": "note", "bad": "BAD "}
