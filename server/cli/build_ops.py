"""`headrace build-ops`: compile the CPU's operators before a server needs them."""

from __future__ import annotations

import click

from server.cli.common import debug_option


@click.command("build-ops", short_help="Compile the CPU operators ahead.")
@click.option(
    "--into-installation",
    is_flag=True,
    help="Put them beside the program instead of into the cache: for images, where the compiler is not kept.",
)
@debug_option
def build_ops(into_installation: bool) -> None:
    """Compile the operators that a model on a CPU is computed with, and print where they are.

    What this makes runs on any processor of this kind, with the best of its instructions. A server does it by itself at
    its first start, for its own processor, which takes some seconds, and keeps the result in HEADRACE_CACHE_DIR or this
    user's cache directory. The compiler is CXX, or the first of c++, g++ and clang++.
    """
    from engine.cpu_ops.build import build

    click.echo(build(into_installation=into_installation))
