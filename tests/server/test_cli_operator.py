"""`headrace keys`, `config show`, `completion` and `doctor`, as an operator runs them."""

from __future__ import annotations

import io
import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from engine.errors import ConfigError
from server.access.key_file import read_key_file
from server.access.keys import KeyEntry, digest_of
from server.cli.main import run
from server.settings import SETTINGS, read_settings

Capture = pytest.CaptureFixture[str]
SHELL_FIRST_LINES = {
    "bash": "_headrace_completion()",
    "zsh": "#compdef headrace",
    "fish": "function _headrace_completion",
}


def test_a_new_key_comes_with_the_line_that_lets_it_in(capsys: Capture, tmp_path: Path) -> None:
    assert run(["keys", "new", "acme"]) == 0
    key, line = capsys.readouterr().out.splitlines()
    assert key not in line
    (tmp_path / "k").write_text(line + "\n")
    assert read_key_file(tmp_path / "k") == [KeyEntry(digest_of(key), "acme")]


def test_a_key_that_exists_is_hashed_from_standard_input(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("hr-some-0123456789abcdef\n"))
    assert run(["keys", "hash", "acme"]) == 0
    assert capsys.readouterr().out == f"sha256:{digest_of('hr-some-0123456789abcdef')}: acme\n"


@pytest.mark.parametrize(("key", "tenant"), [("short", "acme"), ("", "acme"), ("hr-some-0123456789abcdef", "a b")])
def test_weak_keys_and_bad_tenants_are_refused(
    key: str, tenant: str, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(key + "\n"))
    assert run(["keys", "hash", tenant]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: ")


def test_a_bad_tenant_gets_no_key(capsys: Capture) -> None:
    assert run(["keys", "new", "a b"]) == 2
    assert capsys.readouterr().out == ""


def show(capsys: Capture, *arguments: str) -> str:
    assert run(["config", "show", *arguments]) == 0
    return capsys.readouterr().out


def test_config_show_tells_each_value_and_its_source(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "h.yaml"
    file.write_text("max_body: 1MiB\nport: 1\n")
    monkeypatch.setenv("HEADRACE_DRAIN_TIMEOUT", "1.5m")
    monkeypatch.setenv("HEADRACE_PORT", "2")
    shown = json.loads(show(capsys, "--format", "json", "--config", str(file), "--port", "3", "some/model"))
    settings = shown["settings"]
    assert set(settings) == {setting.name for setting in SETTINGS}
    assert settings["port"] == {"value": 3, "source": "--port"}
    assert settings["drain-timeout"] == {"value": "90.0s", "source": "HEADRACE_DRAIN_TIMEOUT"}
    assert settings["max-body"] == {"value": "1MiB", "source": f"max_body in {file}"}
    assert settings["model"] == {"value": "some/model", "source": "MODEL"}
    assert settings["host"] == {"value": "127.0.0.1", "source": "default"}


def test_the_yaml_of_config_show_is_a_file_with_the_same_settings(capsys: Capture, tmp_path: Path) -> None:
    flags = {
        "port": "0",
        "prefix-cache": "false",
        "request-timeout": "1ms",
        "access-log": "-",
        "max-body": "1234567",
        "chat-template": "a: #b\\'\"",
        "model": "m: #x",
    }
    plain = [f"--{name}={value}" for name, value in flags.items() if name not in ("prefix-cache", "model")]
    file = tmp_path / "h.yaml"
    file.write_text(show(capsys, *plain, "--no-prefix-cache", flags["model"]))
    wanted, _ = read_settings(flags, {})
    assert read_settings({"config": str(file)}, {}) == (wanted, [])


def test_config_show_never_prints_keys(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_API_KEYS", "sesame-0123456789abcdef:acme")
    monkeypatch.setenv("HEADRACE_ADMIN_KEY", "sesame-0123456789abcdef")
    for form in ("yaml", "json"):
        shown = show(capsys, "--format", form)
        assert "sesame" not in shown
        assert "HEADRACE_API_KEYS" in shown


def test_config_show_refuses_what_serve_refuses(capsys: Capture) -> None:
    assert run(["config", "show", "--port", "web"]) == 2
    assert capsys.readouterr().err.startswith("error: --port: 'web' is not a whole number.")


@pytest.mark.parametrize("shell", SHELL_FIRST_LINES)
def test_completion_prints_a_script_for_each_shell(shell: str, capsys: Capture) -> None:
    assert run(["completion", shell]) == 0
    assert SHELL_FIRST_LINES[shell] in capsys.readouterr().out


def test_the_completion_knows_commands_and_options() -> None:
    def completed(words: str, index: int) -> str:
        environment = {"_HEADRACE_COMPLETE": "bash_complete", "COMP_WORDS": words, "COMP_CWORD": str(index)}
        command = [sys.executable, "-c", "from server.cli.main import main; main()"]
        return subprocess.run(
            command, capture_output=True, text=True, env=environment, cwd=Path(__file__).parents[2]
        ).stdout

    assert "plain,serve" in completed("headrace se", 1)
    assert "plain,--max-model-len" in completed("headrace serve --max-mod", 2)


def test_doctor_tells_what_is_there_and_fails_for_a_port_in_use(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HEADRACE_STATE_DIR", str(tmp_path))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert run(["doctor", "--port", str(taken.getsockname()[1])]) == 1
    shown = capsys.readouterr().out
    for name in ("python", "torch", "device", "operators", "threads", "memory", "model cache", "state", "open files"):
        assert f"  {name} " in shown
    assert "BAD   port" in shown
    assert run(["doctor", "--port", "0"]) == 0
    assert "BAD" not in capsys.readouterr().out


def test_doctor_looks_at_the_tiers_of_a_kv_store(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HEADRACE_STATE_DIR", str(tmp_path))
    (tmp_path / "file").write_text("in the way")
    tiers = ["--kv-store", "ram=16MiB", "--kv-store", f"disk={tmp_path / 'kv'},64MiB,min-free=1KiB"]
    with socket.create_server(("127.0.0.1", 0)) as silent:
        server = f"redis://127.0.0.1:{silent.getsockname()[1]}/0"
        assert run(["doctor", "--port", "0", *tiers, "--kv-store", server]) == 0
    shown = capsys.readouterr().out
    for text in ("ok    kv ram", "ok    kv disk", "O_DIRECT", "not encrypted", "note  kv server", "does not answer"):
        assert text in shown, shown
    assert not (tmp_path / "kv").exists()
    for tier, text in [
        (f"disk={tmp_path / 'file' / 'kv'}", "cannot be written to"),
        ("floppy=/a", "floppy"),
        ("redis://:secret@/0", "no host"),
    ]:
        assert run(["doctor", "--port", "0", "--kv-store", tier]) == 1
        shown = capsys.readouterr().out
        assert text in shown, shown
        assert "secret" not in shown.replace(f"{tmp_path}", "").replace("  secret  ", ""), shown
    monkeypatch.setenv("HEADRACE_STATE_DIR", str(tmp_path / "file"))
    assert run(["doctor", "--port", "0", *tiers]) == 0
    shown = capsys.readouterr().out
    assert "note  kv scope" in shown
    assert "not found again" in shown


def test_serve_refuses_a_bad_key_file_before_it_listens(capsys: Capture, tmp_path: Path) -> None:
    (tmp_path / "k").write_text("- broken\n")
    assert run(["serve", "--api-keys-file", str(tmp_path / "k"), "--port", "0"]) == 2
    assert str(tmp_path / "k") in capsys.readouterr().err
    with pytest.raises(ConfigError):
        read_key_file(tmp_path / "k")
