"""API keys at rest: how they are made, written, read and recognised, and what a changed file does."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from engine.errors import ConfigError
from server.access.credentials import read_credentials
from server.access.key_file import KeyFile, read_key_file
from server.access.keys import UNLIMITED, KeyEntry, KeyRing, digest_of, hashed_line, new_key, read_variable
from server.config import ServeConfig

ONE, TWO = "hr-one-0123456789abcdef", "hr-two-0123456789abcdef"


def entry(key: str, tenant: str) -> KeyEntry:
    return KeyEntry(digest_of(key), tenant)


def write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    path.chmod(0o600)
    return path


def test_new_keys_are_long_and_never_the_same() -> None:
    keys = {new_key() for _ in range(100)}
    assert len(keys) == 100
    assert all(len(key) >= 46 for key in keys)


def test_a_ring_knows_its_keys_and_no_other() -> None:
    ring = KeyRing([entry(ONE, "a"), entry(TWO, "b")])
    assert [ring.find(key.encode()) for key in (ONE, TWO)] == [entry(ONE, "a"), entry(TWO, "b")]
    for other in (b"", b"x", ONE[:-1].encode(), (ONE + " ").encode(), digest_of(ONE).encode(), b"\xff\xfe"):
        assert ring.find(other) is None


def test_every_entry_is_compared_also_behind_the_one_that_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    import hmac

    compared: list[bytes] = []
    real = hmac.compare_digest

    def compare(known: bytes, given: bytes) -> bool:
        compared.append(known)
        return real(known, given)

    monkeypatch.setattr(hmac, "compare_digest", compare)
    keys = [new_key() for _ in range(5)]
    ring = KeyRing(entry(key, f"t{number}") for number, key in enumerate(keys))
    for number, key in enumerate(keys):
        compared.clear()
        assert ring.find(key.encode()) == entry(key, f"t{number}")
        assert len(compared) == 5


def test_a_file_holds_keys_as_they_are_and_hashed(tmp_path: Path) -> None:
    text = f"# ours\n{ONE}: acme\n'{TWO}#:': b.c\n{hashed_line(entry(TWO, 'acme'))}\n1234567890123456: '7'\n"
    assert read_key_file(write(tmp_path / "k", text)) == [
        entry(ONE, "acme"),
        entry(TWO + "#:", "b.c"),
        entry(TWO, "acme"),
        entry("1234567890123456", "7"),
    ]


def test_a_key_may_have_limits_of_its_own(tmp_path: Path) -> None:
    text = (
        f"{ONE}:\n  tenant: acme\n  requests_per_minute: 60\n"
        f"{TWO}: {{tokens_per_minute: 1000, requests_per_minute: none, tenant: b}}\n"
    )
    assert read_key_file(write(tmp_path / "k", text)) == [
        KeyEntry(digest_of(ONE), "acme", 60, None),
        KeyEntry(digest_of(TWO), "b", UNLIMITED, 1000),
    ]


def test_an_empty_file_has_no_keys(tmp_path: Path) -> None:
    assert read_key_file(write(tmp_path / "k", "# none\n")) == []


@pytest.mark.parametrize(
    "text",
    [
        "- a\n",
        f"{ONE}\n",
        f"{ONE}: [a]\n",
        f"{ONE}: {{a: b}}\n",
        f"{ONE}: a b\n",
        f"{ONE}:\n",
        f"{ONE}: {'x' * 65}\n",
        f"tenant: {ONE}/+\n",
        "short: a\n",
        f"{'k' * 513}: a\n",
        "'with blanks in the key': a\n",
        "sha256:12: a\n",
        f"{ONE}: a\n{ONE}: b\n",
        f"{ONE}: a\n{hashed_line(entry(ONE, 'b'))}\n",
        f"{ONE}: a\n  bad: [\n",
        f"{ONE}: {{requests_per_minute: 5}}\n",
        f"{ONE}: {{tenant: a, requests_per_minute: 0}}\n",
        f"{ONE}: {{tenant: a, requests_per_minute: -1}}\n",
        f"{ONE}: {{tenant: a, tokens_per_minute: 1.5}}\n",
        f"{ONE}: {{tenant: a, tokens_per_minute: {'9' * 100}}}\n",
        f"{ONE}: {{tenant: a, tokens_per_minute: [5]}}\n",
        f"{ONE}: {{tenant: a, tokens_per_minute: 5, tokens_per_minute: 5}}\n",
        f"{ONE}: {{tenant: a, tokens_per_hour: 5}}\n",
        f"{ONE}: {{tenant: [a]}}\n",
        f"{ONE}: a\n{ONE}: {{tenant: a, tokens_per_minute: 5}}\n",
        f"? [{ONE}]\n: a\n",
    ],
)
def test_a_faulty_file_is_refused_in_a_line_that_shows_no_key(tmp_path: Path, text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_key_file(write(tmp_path / "k", text))
    said = f"{caught.value} {caught.value.hint}"
    assert str(tmp_path / "k") in said
    assert "\n" not in said
    assert ONE not in said


@pytest.mark.parametrize("content", [b"\xff\xfe\x00", None])
def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path, content: bytes | None) -> None:
    if content is not None:
        (tmp_path / "k").write_bytes(content)
    with pytest.raises(ConfigError, match=str(tmp_path / "k")):
        read_key_file(tmp_path / "k")


def test_the_variable_has_entries_with_and_without_tenants() -> None:
    hashed = f"sha256:{digest_of(TWO)}"
    assert read_variable(f"{ONE}:a, {hashed}:b\n{new_key()}", "V")[:2] == [entry(ONE, "a"), entry(TWO, "b")]
    assert read_variable(f"{ONE},{hashed}", "V") == [entry(ONE, "default"), entry(TWO, "default")]
    assert read_variable("", "V") == []
    with pytest.raises(ConfigError, match="V, entry 2"):
        read_variable(f"{ONE} short", "V")


def test_credentials_come_from_variables_and_files(tmp_path: Path) -> None:
    config = ServeConfig(
        api_keys_file=str(write(tmp_path / "k", f"{TWO}: b\n")), admin_key_file=str(write(tmp_path / "a", ONE + "\n"))
    )
    environ = {"HEADRACE_API_KEYS": f"{ONE}:a", "HEADRACE_ADMIN_KEY": TWO, "HEADRACE_STATE_DIR": str(tmp_path / "s")}
    credentials, warnings = read_credentials(config, environ)
    assert credentials.keys == (entry(ONE, "a"),)
    assert credentials.admin_digests == (digest_of(TWO), digest_of(ONE))
    assert bytes.fromhex(credentials.scope_secret) == bytes.fromhex((tmp_path / "s" / "scope-secret").read_text())
    assert warnings == []


def test_a_key_file_without_keys_is_refused_and_an_open_one_warned_of(tmp_path: Path) -> None:
    environ = {"HEADRACE_STATE_DIR": str(tmp_path)}
    path = write(tmp_path / "k", "")
    with pytest.raises(ConfigError, match="no keys"):
        read_credentials(ServeConfig(api_keys_file=str(path)), environ)
    path.write_text(f"{ONE}: a\n")
    path.chmod(0o644)
    _, warnings = read_credentials(ServeConfig(api_keys_file=str(path)), environ)
    assert len(warnings) == 1
    assert "chmod 600" in warnings[0]


def test_a_state_directory_that_cannot_be_made_costs_a_warning(tmp_path: Path) -> None:
    blocked = write(tmp_path / "file", "") / "below"
    one, warnings = read_credentials(ServeConfig(), {"HEADRACE_STATE_DIR": str(blocked)})
    other, _ = read_credentials(ServeConfig(), {"HEADRACE_STATE_DIR": str(blocked)})
    assert "HEADRACE_STATE_DIR" in warnings[0]
    assert one.scope_secret != other.scope_secret


class Watched:
    def __init__(self, path: Path) -> None:
        self.path = path
        self.versions: list[list[KeyEntry]] = []
        self.file = KeyFile(path, self.versions.append)
        self._time = time.time_ns()

    def replace(self, text: str | None) -> bool:
        """Change the file as an editor, or an atomic rename, does; tell whether the change was taken."""
        if text is None:
            self.path.unlink()
        else:
            write(self.path.with_suffix(".new"), text).rename(self.path)
            self._time += 10**9
            os.utime(self.path, ns=(self._time, self._time))
        return self.file.look()


def test_a_changed_file_is_taken_and_a_broken_one_changes_nothing(tmp_path: Path) -> None:
    watched = Watched(tmp_path / "k")
    assert watched.replace(f"{ONE}: a\n")
    assert not watched.file.look()
    assert watched.replace(f"{TWO}: b\n")
    assert not watched.replace("- broken\n")
    assert not watched.replace(None)
    assert not watched.file.look()
    assert watched.replace(f"{ONE}: a\n")
    assert watched.replace("")
    assert watched.versions == [[entry(ONE, "a")], [entry(TWO, "b")], [entry(ONE, "a")], []]
