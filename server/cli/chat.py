"""`headrace chat`: talk to a running server in the terminal."""

from __future__ import annotations

import sys
from collections.abc import Generator
from contextlib import closing
from typing import TYPE_CHECKING

import click

from server.cli.common import debug_option

if TYPE_CHECKING:
    from server.chat_client import Conversation

_HELP = "Type a message. /reset starts over, /exit or Ctrl-D leaves, Ctrl-C stops an answer."


@click.command()
@click.option(
    "--url", default="http://127.0.0.1:8000", envvar="HEADRACE_URL", help="The server. [http://127.0.0.1:8000]"
)
@click.option("--api-key", envvar="HEADRACE_API_KEY", metavar="KEY", help="The key, better given as HEADRACE_API_KEY.")
@click.option("--model", metavar="NAME", help="The model to ask; the server's first unless given.")
@click.option("--system", metavar="TEXT", help="A system message.")
@click.option("-m", "--message", metavar="TEXT", help="Ask this, print the answer and leave.")
@click.option("--max-tokens", type=click.IntRange(min=1), help="The longest answer.")
@click.option("--temperature", type=click.FloatRange(0, 2), help="0 always takes the likeliest token.")
@debug_option
def chat(
    url: str,
    api_key: str | None,
    model: str | None,
    system: str | None,
    message: str | None,
    max_tokens: int | None,
    temperature: float | None,
) -> None:
    """Talk to a running server in the terminal.

    With --message, or with text on standard input, it answers once and leaves.
    """
    from server.chat_client import ChatClient, Conversation

    client = ChatClient(url, api_key)
    name = model or client.first_model(on_wait=lambda text: click.echo(text, err=True))
    conversation = Conversation(client, name, system, max_tokens=max_tokens, temperature=temperature)
    if message is None and not sys.stdin.isatty():
        message = sys.stdin.read()
    if message is not None:
        _print_answer(conversation.ask(message))
        return
    _talk(conversation, name)


def _talk(conversation: Conversation, name: str) -> None:
    """Questions and answers until the user leaves. What the server refuses ends the answer, not the conversation."""
    import readline  # noqa: F401  (gives input() its line editing and its history)

    from server.chat_client import ChatError

    click.echo(f"Talking to {name}. {_HELP}")
    while True:
        try:
            text = input("\n> ").strip()
        except EOFError:
            click.echo()
            return
        except KeyboardInterrupt:
            click.echo("\nType /exit or press Ctrl-D to leave.")
            continue
        if text == "/exit":
            return
        if text == "/reset":
            conversation.reset()
            click.echo("Starting over.")
        elif text.startswith("/"):
            click.echo(_HELP)
        elif text:
            try:
                _print_answer(conversation.ask(text))
            except KeyboardInterrupt:
                click.echo("\n[stopped]")
            except ChatError as error:
                click.echo(f"\nerror: {error}" + (f" {error.hint}" if error.hint else ""), err=True)
                continue
            if conversation.finish_reason == "length":
                click.echo("[cut off: no tokens left]")


def _print_answer(pieces: Generator[str]) -> None:
    """Closing the pieces, also when Ctrl-C comes between two of them, ends the request on the server."""
    with closing(pieces):
        for piece in pieces:
            click.echo(piece, nl=False)
    click.echo()
