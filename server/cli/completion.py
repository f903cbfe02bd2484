"""`headrace completion`: the script that teaches a shell to complete our commands and options."""

from __future__ import annotations

import click

from server.cli.common import debug_option

_VARIABLE = "_HEADRACE_COMPLETE"


@click.command(short_help="Print a shell's completion script.")
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@debug_option
@click.pass_context
def completion(context: click.Context, shell: str) -> None:
    """Print the completion script for SHELL.

    For bash, put `eval "$(headrace completion bash)"` into ~/.bashrc; for zsh the same with zsh into ~/.zshrc; for fish
    write it to ~/.config/fish/completions/headrace.fish.
    """
    from click.shell_completion import get_completion_class

    kind = get_completion_class(shell)
    if kind is None:
        raise click.UsageError(f"The shell {shell} is not supported.")
    click.echo(kind(context.find_root().command, {}, "headrace", _VARIABLE).source())
