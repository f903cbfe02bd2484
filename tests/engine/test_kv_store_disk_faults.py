"""A real engine over disks that are full, read-only, failing, hanging or lying, and over files that others damage or
take away: every request is answered as without a store, and the disk is used again when it is well."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from engine.llm import LLM
from kvstore.disk import upkeep
from tests.support.failing_disks import NAMESPACED, built_faulty_io, can_mount
from tests.support.store_llm import engine
from tests.support.store_trial import Trial
from tests.support.tiny_models import write_tiny_llama

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def plain(model: Path) -> Iterator[LLM]:
    with engine(model) as llm:
        yield llm


def run_cases(
    model: Path, directory: Path, *cases: str, prefix: tuple[str, ...] = (), env: dict[str, str] | None = None
) -> None:
    """One process for all: most of its time it imports."""
    done = subprocess.run(
        [*prefix, sys.executable, "-m", "tests.support.store_victim", str(model), str(directory), *cases],
        cwd=ROOT,
        env={**os.environ, **(env or {})},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == list(cases)


def test_file_systems_that_fail(model: Path, tmp_path: Path) -> None:
    if not can_mount():
        pytest.skip("needs user and mount namespaces")
    run_cases(model, tmp_path, "full", "read_only", "undeletable", prefix=tuple(NAMESPACED))


def test_disks_that_fail(model: Path, tmp_path: Path) -> None:
    library = built_faulty_io(tmp_path)
    env = {"LD_PRELOAD": str(library), "FAULTS": str(tmp_path / "faults")}
    run_cases(model, tmp_path, "failing_reads", "failing_writes", "no_space", "hanging", "lying", env=env)


def truncate(path: Path, rng: random.Random) -> None:
    os.truncate(path, rng.randrange(path.stat().st_size))


def lengthen(path: Path, rng: random.Random) -> None:
    os.truncate(path, path.stat().st_size + rng.randrange(1, 9000))


def zero(path: Path, rng: random.Random) -> None:
    with path.open("r+b") as file:
        file.write(bytes(path.stat().st_size))


def flip(path: Path, rng: random.Random) -> None:
    data = bytearray(path.read_bytes())
    data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    path.write_bytes(data)


def become_directory(path: Path, rng: random.Random) -> None:
    path.unlink()
    path.mkdir()


def become_link(path: Path, rng: random.Random) -> None:
    elsewhere = path.with_suffix(".elsewhere")
    path.rename(elsewhere)
    path.symlink_to(elsewhere)


def vanish(path: Path, rng: random.Random) -> None:
    path.unlink()


DAMAGE = [truncate, lengthen, zero, flip, become_directory, become_link, vanish]


@pytest.mark.parametrize("damage", DAMAGE)
def test_files_that_are_damaged(
    damage: Callable[[Path, random.Random], None], model: Path, plain: LLM, tmp_path: Path
) -> None:
    rng = random.Random(damage.__name__)
    with engine(model, "ram=16MiB", f"disk={tmp_path / 'kv'},64MiB,min-free=1MiB") as llm:
        one = Trial(plain, llm)
        one.works()
        for path in list((tmp_path / "kv").rglob("*.kvb")):
            damage(path, rng)
        one.ask()
        one.works()


def test_files_that_are_exchanged(model: Path, plain: LLM, tmp_path: Path) -> None:
    with engine(model, "ram=16MiB", f"disk={tmp_path / 'kv'},64MiB,min-free=1MiB") as llm:
        one = Trial(plain, llm)
        one.works()
        paths = sorted((tmp_path / "kv").rglob("*.kvb"))
        contents = [path.read_bytes() for path in paths]
        for path, content in zip(paths, contents[1:] + contents[:1], strict=True):
            path.write_bytes(content)
        one.ask()
        assert one.tier.stats().corrupt
        one.works()


@pytest.mark.parametrize("below", ["", "objects", "incoming", "corrupt"])
def test_a_directory_that_is_removed(
    below: str, model: Path, plain: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(upkeep, "WATCH_S", 0.1)
    root = tmp_path / "kv"
    with engine(model, "ram=16MiB", f"disk={root},64MiB,min-free=1MiB") as llm:
        one = Trial(plain, llm)
        one.works()
        # At once: what is missing is made again while a tree is being deleted.
        (root / below).rename(tmp_path / "removed")
        shutil.rmtree(tmp_path / "removed")
        one.ask()
        one.works()
