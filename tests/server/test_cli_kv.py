"""`headrace kv` on a directory that a disk tier has filled."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvstore.disk.tier import DiskTier
from server.cli.main import run
from tests.support.kv_objects import DIGEST, NAMESPACE, key_of
from tests.support.tier_contract import SIZE, save, soon, statuses

Capture = pytest.CaptureFixture[str]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    tier = DiskTier(tmp_path / "kv", 1 << 30, min_free_bytes=0)
    assert statuses(save(tier, range(5))) == ["ok"] * 5
    tier.describe(NAMESPACE)
    tier.close(soon())
    return tmp_path / "kv"


def spoil(root: Path, number: int) -> Path:
    path = next(root.rglob(key_of(number).leaf + ".kvb"))
    data = bytearray(path.read_bytes())
    data[SIZE // 2] ^= 1
    path.write_bytes(data)
    return path


def test_stat_counts_by_namespace(root: Path, capsys: Capture) -> None:
    assert run(["kv", "stat", str(root)]) == 0
    first, total, _ = capsys.readouterr().out.splitlines()
    assert first.startswith(f"{DIGEST.hex()[:16]}  tiny: 5 objects of 1 owners, ")
    assert total.startswith("in all: 5 objects, ")
    assert run(["kv", "stat", str(root), "--format", "json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["namespaces"][0]["fields"]["weights_digest"] == NAMESPACE.weights_digest
    assert (found["unfinished"], found["doomed"], found["corrupt"]) == (0, 0, 0)


def test_list_names_what_each_object_holds(root: Path, capsys: Capture) -> None:
    assert run(["kv", "list", str(root), "--format", "json"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert {row["block"] for row in rows} == {key_of(number).block.hex() for number in range(5)}
    assert {row["tokens"] for row in rows} == {"0-15"}
    assert run(["kv", "list", str(root), "--limit", "2"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 2


def test_verify_finds_what_is_wrong_and_changes_nothing(root: Path, capsys: Capture) -> None:
    assert run(["kv", "verify", str(root)]) == 0
    assert capsys.readouterr().out == "5 objects checked, 0 wrong\n"
    path = spoil(root, 3)
    before = path.read_bytes(), path.stat().st_mtime_ns
    assert run(["kv", "verify", str(root)]) == 1
    line, total = capsys.readouterr().out.splitlines()
    assert line.startswith(f"{path}: payload")
    assert total == "5 objects checked, 1 wrong"
    assert (path.read_bytes(), path.stat().st_mtime_ns) == before
    (root / "objects" / DIGEST.hex() / "namespace.json").write_text("no json")
    path.write_bytes(b"short")
    assert run(["kv", "list", str(root)]) == 0
    assert "? (short" in capsys.readouterr().out
    assert run(["kv", "stat", str(root)]) == 0
    assert "  ?: 5 objects" in capsys.readouterr().out


@pytest.mark.parametrize("command", ["stat", "list", "verify"])
def test_directories_of_others_are_refused(command: str, capsys: Capture, tmp_path: Path) -> None:
    assert run(["kv", command, str(tmp_path)]) == 2
    assert "not the directory of a disk tier" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_running_tiers_directory_can_be_looked_into(root: Path, capsys: Capture) -> None:
    tier = DiskTier(root, 1 << 30, min_free_bytes=0)
    assert run(["kv", "verify", str(root)]) == 0
    tier.close(soon())
    assert "5 objects checked" in capsys.readouterr().out
