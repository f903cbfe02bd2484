"""What the commands share: the --debug option and where it is kept, and the line that tells of a download."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import click

Command = TypeVar("Command")


@dataclass
class Session:
    """One run of the command line. `debug` lets failures show their traces."""

    debug: bool = False


def _keep_debug(context: click.Context, _: click.Parameter, value: bool) -> None:
    if value and isinstance(session := context.find_root().obj, Session):
        session.debug = True


# Eager, so that it holds also when a later argument is wrong.
debug_option = click.option(
    "--debug", is_flag=True, expose_value=False, is_eager=True, callback=_keep_debug, help="Show traces of failures."
)


def fetch_model(name: str) -> Path:
    """Return the model's files; a download is shown as a bar, or as two lines where there is no terminal."""
    from tqdm import tqdm

    from engine.loader.sources import find_model

    bar: tqdm[Any] | None = None

    def show(done: int, total: int) -> None:
        nonlocal bar
        if bar is None:
            click.echo(f"Fetching {name} ({total / 1e6:.0f} MB)", err=True)
            bar = tqdm(total=total, unit="B", unit_scale=True, desc=name, disable=None, leave=False)
        bar.update(done - bar.n)

    try:
        return find_model(name, show).path
    finally:
        if bar is not None:
            bar.close()
