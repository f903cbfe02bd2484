"""The entry point: the commands, and how every failure of theirs becomes one line on stderr and an exit code.

Exit codes: 0 done, 1 failed, 2 wrong arguments, settings or model, 130 interrupted.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Sequence

import click

from engine.errors import ConfigError, HeadraceError, ModelError
from server.cli.bench import bench
from server.cli.build_ops import build_ops
from server.cli.chat import chat
from server.cli.common import Session, debug_option
from server.cli.completion import completion
from server.cli.config import config
from server.cli.doctor import doctor
from server.cli.gateway import gateway
from server.cli.keys import keys
from server.cli.kv import kv
from server.cli.pull import pull
from server.cli.serve import serve
from server.cli.simulate import simulate_command
from server.cli.worker import worker
from server.version import VERSION


@click.group(
    invoke_without_command=True, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100}
)
@click.version_option(VERSION, "-V", "--version", prog_name="headrace", message="%(prog)s %(version)s")
@debug_option
@click.pass_context
def headrace(context: click.Context) -> None:
    """Serve large language models behind an OpenAI-compatible API."""
    if context.invoked_subcommand is None:
        click.echo(context.get_help())


@headrace.command()
@debug_option
def version() -> None:
    """Print the version."""
    click.echo(f"headrace {VERSION}")


headrace.add_command(serve)
headrace.add_command(pull)
headrace.add_command(chat)
headrace.add_command(keys)
headrace.add_command(config)
headrace.add_command(completion)
headrace.add_command(worker)
headrace.add_command(gateway)
headrace.add_command(doctor)
headrace.add_command(build_ops)
headrace.add_command(bench)
headrace.add_command(simulate_command)
headrace.add_command(kv)


def run(arguments: Sequence[str]) -> int:
    """Carry out a command line and return its exit code."""
    session = Session()
    try:
        result = headrace.main(list(arguments), "headrace", standalone_mode=False, obj=session)
        return result if isinstance(result, int) else 0
    except click.ClickException as error:
        return fail(_usage_message(error), _usage_hint(error), 2)
    except (click.Abort, KeyboardInterrupt):
        return 130
    except BrokenPipeError:
        # The reader of our output left: what is still buffered must not raise again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except HeadraceError as error:
        if session.debug:
            traceback.print_exc()
        wrong_setting = isinstance(error, ConfigError | ModelError)
        return fail(str(error), getattr(error, "hint", None), 2 if wrong_setting else 1)
    except Exception as error:
        if session.debug:
            traceback.print_exc()
        return fail(f"{type(error).__name__}: {error}", "Run it again with --debug to see where it comes from.", 1)


def main() -> None:
    """What the `headrace` script calls."""
    sys.exit(run(sys.argv[1:]))


def fail(message: str, hint: str | None, code: int) -> int:
    """Say what went wrong in one line, and what to try in another."""
    click.echo(f"error: {_one_line(message)}", err=True)
    if hint:
        click.echo(f"hint: {_one_line(hint)}", err=True)
    return code


def _one_line(text: str) -> str:
    """Files and servers have a say in what we say: no line breaks, no control of the terminal."""
    return "".join(character if character.isprintable() else "?" for character in " ".join(text.split()))


def _usage_message(error: click.ClickException) -> str:
    if isinstance(error, click.NoSuchOption):
        return f"There is no option {error.option_name}."
    if isinstance(error, click.NoSuchCommand):
        return f"There is no command {error.command_name}."
    return error.format_message()


def _usage_hint(error: click.ClickException) -> str:
    if isinstance(error, click.NoSuchOption | click.NoSuchCommand) and error.possibilities:
        return f"Did you mean {error.possibilities[0]}?"
    context = getattr(error, "ctx", None)
    return f"See `{context.command_path if context else 'headrace'} --help`."
