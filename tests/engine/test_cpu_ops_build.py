"""The build of the C++ operators: found again, whole or not there, and a server goes on where it fails."""

from __future__ import annotations

import logging
import os
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from engine.cpu_ops import build as build_module
from engine.cpu_ops import library as library_module
from engine.cpu_ops.build import build, find, find_compiler
from engine.cpu_ops.library import Library, library_or_none, load_library
from engine.errors import ConfigError
from tests.support.cpp import library_or_skip
from tests.support.loading import load
from tests.support.tiny_models import write_tiny_llama

CACHE = os.environ.get("HEADRACE_CACHE_DIR")

# Stands in for a compiler where only the way of its result matters: it writes what it was called with.
SCRIPT = """#!/bin/sh
if [ "$1" = --version ]; then echo "{version}"; exit 0; fi
echo call >> "{calls}"
while [ $# -gt 0 ]; do [ "$1" = -o ] && target="$2"; shift; done
echo compiled > "$target"
"""


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of its own, and a process that has loaded nothing."""
    monkeypatch.setenv("HEADRACE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(build_module, "SHIPPED", tmp_path / "shipped")
    monkeypatch.setattr(library_module, "_loaded", None)
    return tmp_path / "cache" / "operators"


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "compiler"
    write_script(path, "one")
    monkeypatch.setenv("CXX", str(path))
    return path


def write_script(path: Path, version: str) -> None:
    path.write_text(SCRIPT.format(version=version, calls=path.parent / "calls"))
    path.chmod(0o755)


def calls(script: Path) -> int:
    log = script.parent / "calls"
    return len(log.read_text().splitlines()) if log.is_file() else 0


def test_a_library_is_compiled_once_and_again_for_another_compiler(script: Path, own_cache: Path) -> None:
    first = build()
    assert first.parent == own_cache
    assert stat.S_IMODE(own_cache.stat().st_mode) == 0o700
    done = calls(script)
    assert done > 0
    assert (build(), find()) == (first, first)
    assert calls(script) == done
    write_script(script, "two")
    assert build() != first
    assert sorted(own_cache.iterdir()) == sorted((first, build()))


def test_a_start_compiles_for_its_own_processor_unless_all_was_compiled_ahead(script: Path) -> None:
    own = find()
    done = calls(script)
    whole = build()
    assert own.name != whole.name or calls(script) == done  # a processor may have no more than the generic set
    assert find() == whole


def test_builds_at_the_same_time_leave_one_library(script: Path, own_cache: Path) -> None:
    with ThreadPoolExecutor(4) as pool:
        paths = set(pool.map(lambda _: build(), range(4)))
    assert list(own_cache.iterdir()) == list(paths)
    assert paths.pop().read_text() == "compiled\n"


def test_an_installation_brings_its_own(script: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shipped = build(into_installation=True)
    assert shipped.parent == build_module.SHIPPED
    monkeypatch.setenv("CXX", str(script.parent / "nothing"))
    assert find() == shipped
    assert not own_cache.exists()


def test_what_was_compiled_serves_without_the_compiler(script: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = build()
    monkeypatch.setenv("CXX", str(script.parent / "nothing"))
    assert find() == kept


@pytest.mark.skipif(os.geteuid() != 0, reason="others' folders need root to make")
def test_a_folder_that_others_can_write_to_is_refused(script: Path, own_cache: Path) -> None:
    build()
    own_cache.chmod(0o777)
    with pytest.raises(ConfigError, match="can be written to by others"):
        build()
    own_cache.chmod(0o700)
    os.chown(own_cache, 12345, -1)
    with pytest.raises(ConfigError, match="can be written to by others"):
        find()


def test_a_compiler_that_fails_says_why_and_leaves_nothing(script: Path, own_cache: Path) -> None:
    script.write_text('#!/bin/sh\n[ "$1" = --version ] && exit 0\necho "x.cpp:1: error: no such thing" >&2\nexit 1\n')
    with pytest.raises(ConfigError, match="error: no such thing"):
        build()
    assert list(own_cache.iterdir()) == []


@pytest.mark.parametrize("broken", ["no compiler", "a compiler that makes nonsense"])
def test_without_operators_a_model_runs_on_torchs(
    tmp_path: Path, script: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, broken: str
) -> None:
    if broken == "no compiler":
        monkeypatch.delenv("CXX")
        monkeypatch.setenv("PATH", str(tmp_path))
    model = write_tiny_llama(tmp_path / "model")
    with caplog.at_level(logging.WARNING):
        assert [load(model).operators, load(model, "bfloat16").operators] == ["torch", "torch"]
    (line,) = (record.getMessage() for record in caplog.records if record.name == library_module.__name__)
    assert "torch's operators" in line
    with pytest.raises(ConfigError):
        load(model, operators="cpp")


def test_the_real_compiler_makes_what_can_be_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """From the cache of the other tests: it is compiled once for all of them."""
    if CACHE is None:
        monkeypatch.delenv("HEADRACE_CACHE_DIR")
    else:
        monkeypatch.setenv("HEADRACE_CACHE_DIR", CACHE)
    library = library_or_skip()
    assert library is load_library() is library_or_none()
    assert isinstance(library, Library)
    assert library.lanes in (4, 8, 16)
    assert not library.use("no such set")
    assert find_compiler().version
