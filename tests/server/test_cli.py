"""The command line: one line and a hint for each mistake, exit codes, and traces only when asked for."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from server.cli.main import run
from server.settings import SETTINGS
from server.version import VERSION

Capture = pytest.CaptureFixture[str]


def lines(text: str) -> list[str]:
    return text.strip().splitlines()


@pytest.mark.parametrize("arguments", [[], ["--help"], ["-h"]])
def test_help_names_every_command(arguments: list[str], capsys: Capture) -> None:
    assert run(arguments) == 0
    shown = capsys.readouterr().out
    for command in ("serve", "pull", "chat", "version"):
        assert f"\n  {command} " in shown


def test_serve_help_shows_every_setting(capsys: Capture) -> None:
    assert run(["serve", "--help"]) == 0
    shown = capsys.readouterr().out
    for setting in SETTINGS:
        assert ("MODEL" if setting.name == "model" else f"--{setting.name} ") in shown


@pytest.mark.parametrize("arguments", [["version"], ["--version"], ["-V"]])
def test_version_is_printed(arguments: list[str], capsys: Capture) -> None:
    assert run(arguments) == 0
    assert capsys.readouterr().out == f"headrace {VERSION}\n"


@pytest.mark.parametrize(
    ("arguments", "message", "hint"),
    [
        (["serv"], "There is no command serv.", "Did you mean serve?"),
        (["serve", "--prot", "1"], "There is no option --prot.", "Did you mean --port?"),
        (["serve", "--max-model-length", "1"], "There is no option --max-model-length.", "--max-model-len?"),
        (["serve", "--port", "web"], "--port: 'web' is not a whole number.", None),
        (["serve", "--dtype", "float23"], "--dtype: 'float23' is not one of", "Did you mean float32?"),
        (["serve", "--port"], "'--port' requires an argument", "--help"),
        (["serve", "one", "two"], "unexpected extra argument (two)", "headrace serve --help"),
        (["serve", "--config", "/does/not/exist.yaml"], "cannot be read", None),
        (["pull", "nothing"], "'nothing' is neither a directory", "safetensors"),
    ],
)
def test_a_mistake_is_one_line_and_a_hint(
    arguments: list[str], message: str, hint: str | None, capsys: Capture
) -> None:
    assert run(arguments) == 2
    captured = capsys.readouterr()
    said = lines(captured.err)
    assert captured.out == ""
    assert said[0].startswith("error: ")
    assert message in said[0]
    assert len(said) == (1 if hint is None else 2)
    if hint is not None:
        assert said[1].startswith("hint: ")
        assert hint in said[1]


def test_what_a_file_says_cannot_steer_the_terminal(capsys: Capture, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["\\u001b[2J\\n' + "x" * 100_000 + '"]}')
    (tmp_path / "\x1b[31mred").mkdir()
    for model in (tmp_path, tmp_path / "\x1b[31mred"):
        assert run(["serve", str(model)]) == 2
        said = capsys.readouterr().err
        assert "\x1b" not in said
        assert len(lines(said)) <= 2
        assert len(said) < 3000


def test_debug_adds_the_trace_and_keeps_the_exit_code(capsys: Capture) -> None:
    assert run(["serve", "--debug", "--port", "web"]) == 2
    said = capsys.readouterr().err
    assert "Traceback" in said
    assert lines(said)[-1] == "error: --port: 'web' is not a whole number."


def test_wrong_variable_is_named(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_THREADS", "0")
    assert run(["serve"]) == 2
    assert lines(capsys.readouterr().err) == ["error: HEADRACE_THREADS: 0 is too small; the least is 1."]


def test_module_and_script_are_the_same_command() -> None:
    script = Path(sys.executable).with_name("headrace")
    for command in ([sys.executable, "-m", "server"], [str(script)]):
        done = subprocess.run([*command, "version"], capture_output=True, text=True, check=True)
        assert done.stdout == f"headrace {VERSION}\n"


def test_reader_that_leaves_early_causes_no_trace() -> None:
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "server", "serve", "--help"]
    done = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, text=True, check=False)
    os.close(write)
    assert done.stderr == ""
