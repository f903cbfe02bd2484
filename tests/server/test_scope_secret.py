"""The scope secret's file: made once whoever comes first, kept, and refused when others can read it."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from engine.errors import ConfigError
from kvstore.keys import tenant_scope
from server.access.credentials import read_credentials
from server.access.scope_secret import FILE_NAME, load_or_make, read_secret
from server.config import ServeConfig
from tests.support.headrace_server import ROOT


def test_it_is_made_once_and_only_its_owner_can_read_it(tmp_path: Path) -> None:
    directory = tmp_path / "deep" / "state"
    secret = load_or_make(directory)
    assert len(secret) == 32
    assert load_or_make(directory) == secret
    assert stat.S_IMODE((directory / FILE_NAME).stat().st_mode) == 0o600
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    assert os.listdir(directory) == [FILE_NAME]
    assert load_or_make(tmp_path / "other") != secret


def test_a_umask_cannot_open_it(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        load_or_make(tmp_path / "s")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "s" / FILE_NAME).stat().st_mode) == 0o600


def test_processes_that_start_at_once_have_one_secret(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from server.access.scope_secret import load_or_make;"
        "print('ready', flush=True); sys.stdin.readline();"
        "print(load_or_make(Path(sys.argv[1])).hex())"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "s")]
    racers = [
        subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(6)
    ]
    for racer in racers:
        assert racer.stdout is not None
        assert racer.stdout.readline() == "ready\n"
    for racer in racers:
        assert racer.stdin is not None
        racer.stdin.write("\n")
        racer.stdin.flush()
    secrets = {racer.communicate()[0].strip() for racer in racers}
    assert secrets == {(tmp_path / "s" / FILE_NAME).read_text().strip()}
    assert os.listdir(tmp_path / "s") == [FILE_NAME]


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o620, 0o602, 0o610])
def test_a_file_that_is_open_to_others_is_refused_with_the_cure(tmp_path: Path, mode: int) -> None:
    load_or_make(tmp_path)
    (tmp_path / FILE_NAME).chmod(mode)
    with pytest.raises(ConfigError) as caught:
        load_or_make(tmp_path)
    assert caught.value.hint == f"Run: chmod 600 {tmp_path / FILE_NAME}"


@pytest.mark.parametrize("content", ["", "ab" * 31, "ab" * 32 + "c", "xy" * 32, "ab " * 32])
def test_a_file_without_a_secret_is_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "s"
    path.write_text(content)
    path.chmod(0o600)
    with pytest.raises(ConfigError, match="holds no secret"):
        read_secret(path)


def test_a_pipe_or_a_directory_in_its_place_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe", 0o600)
    (tmp_path / "folder").mkdir(mode=0o700)
    for name in ("pipe", "folder", "nothing"):
        with pytest.raises(ConfigError):
            read_secret(tmp_path / name)


def test_a_restart_keeps_every_scope_and_a_shared_file_gives_two_hosts_the_same(tmp_path: Path) -> None:
    def scope(config: ServeConfig, state: str) -> bytes:
        credentials, _ = read_credentials(config, {"HEADRACE_STATE_DIR": str(tmp_path / state)})
        return tenant_scope(bytes.fromhex(credentials.scope_secret), "acme", "salt")

    first = scope(ServeConfig(), "one")
    assert scope(ServeConfig(), "one") == first
    assert scope(ServeConfig(), "two") != first
    shared = ServeConfig(scope_secret_file=str(tmp_path / "one" / FILE_NAME))
    assert scope(shared, "two") == first
