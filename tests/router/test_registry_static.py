"""Lists that somebody wrote, and the names of registries."""

from __future__ import annotations

import json
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest

from engine.errors import ConfigError
from router.registry.kubernetes_access import KubernetesAccess
from router.registry.open import check_registry, open_registry
from router.registry.records import MAX_RECORD_BYTES
from router.registry.static import StaticRegistry
from router.registry.valkey import ValkeyRegistry
from tests.support.registries import Watcher, gateway, ids, worker
from tests.support.until import until
from tests.support.worker_port import WorkerPort, worker_port


@pytest.fixture
async def port() -> AsyncIterator[WorkerPort]:
    async with worker_port() as port:
        yield port


def write(path: Path, content: object) -> None:
    """Replace a file as an editor does."""
    temporary = path.with_suffix(".new")
    temporary.write_text(content if isinstance(content, str) else json.dumps(content))
    temporary.replace(path)


def plain(record: object) -> object:
    return msgspec.to_builtins(record)


async def test_a_file_is_read_again_when_it_changes_and_kept_when_it_breaks(tmp_path: Path) -> None:
    path = tmp_path / "workers.json"
    write(path, [plain(worker("w0")), {"worker_id": "broken"}, 7])
    registry = open_registry(f"static:{path}")
    watcher = Watcher(registry.watch())
    assert ids(await watcher.until(bool)) == ["w0"]
    path.write_text("{ this is: no list")
    write(path, {"workers": [plain(worker("w0")), plain(worker("w1"))], "gateways": [plain(gateway("g"))]})
    assert ids(await watcher.until(lambda records: len(records) == 2)) == ["w0", "w1"]
    path.write_text("- [}")
    gateways = Watcher(registry.watch_gateways())
    assert (await gateways.until(bool))[0].gateway_id == "g"
    path.unlink()
    write(path, [plain(worker("w2"))])
    assert ids(await watcher.until(lambda records: ids(records) == ["w2"])) == ["w2"]
    assert all(watcher.lists), "the list was lost while the file was broken"
    await registry.close()
    await watcher.close()
    await gateways.close()


async def test_workers_tell_their_records_over_http(port: WorkerPort, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.registry.static.POLL_INTERVAL_S", 0.02)
    registry = open_registry(f"static:{port.url},http://127.0.0.1:1")
    watcher = Watcher(registry.watch())
    assert ids(await watcher.until(bool)) == ["w0"]
    port.say(worker("w0", state="draining"))
    await watcher.until(lambda records: [record.state for record in records] == ["draining"])
    # Neither errors nor nonsense take away what is known.
    for status, body in ((500, b""), (302, b""), (200, b"nonsense"), (200, b"x" * (MAX_RECORD_BYTES + 1))):
        port.status, port.body, enough = status, body, port.asked + 2
        await until(lambda enough=enough: port.asked >= enough, "the port is asked again")  # type: ignore[misc]
    assert [record.state for record in watcher.latest] == ["draining"]
    port.status = 200
    port.say(worker("w0", incarnation="2"))
    await watcher.until(lambda records: [record.incarnation for record in records] == ["2"])
    assert all(watcher.lists)
    await registry.close()
    await watcher.close()


async def test_what_a_process_announces_its_own_watchers_see() -> None:
    registry = StaticRegistry()
    watcher = Watcher(registry.watch())
    announcement = await registry.announce(worker("w9", state="starting"))
    await watcher.until(lambda records: ids(records) == ["w9"])
    await announcement.update(worker("w9"))
    await watcher.until(lambda records: [record.state for record in records] == ["ready"])
    await announcement.close()
    await watcher.until(lambda records: records == ())
    await registry.close()
    await watcher.close()


async def test_engines_of_other_makes_are_listed_by_the_model_that_they_name(port: WorkerPort, tmp_path: Path) -> None:
    port.body = b'{"object":"list","data":[{"id":"org/model"},{"id":"second"}]}'
    path = tmp_path / "workers.json"
    write(path, [f"auto+{port.url}", {"worker_id": "w", "model": "m", "http_url": "http://h:1", "dialect": "text"}])
    for spec, count in ((f"static:{path}", 2), (f"static:auto+{port.url}", 1)):
        registry = open_registry(spec)
        watcher = Watcher(registry.watch())
        first, *_ = await watcher.until(lambda records, count=count: len(records) == count)  # type: ignore[misc]
        assert (first.worker_id, first.model) == (port.url.removeprefix("http://"), "org/model")
        assert (first.dialect, first.http_url, first.is_ours) == ("auto", port.url, False)
        await registry.close()
        await watcher.close()


@pytest.mark.parametrize(
    "spec",
    [
        "",
        "nonsense",
        "static:klingon+http://h:1",
        "static:openai+tcp://h:1",
        "static:",
        "static:/does/not/exist.yaml",
        "static:http://",
        "static:http://a:1,tcp://b:2",
        "redis://h:notaport/0",
        "redis://h:1/0?namespace={x}",
        "redis://h:1/0?ssl_keyfile=/etc/passwd",
        "k8s:",
        "k8s:only-a-namespace",
        "k8s:a/b/c",
        "k8s:default/workers",
    ],
)
async def test_names_of_no_registry_are_refused(spec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    with pytest.raises(ConfigError):
        open_registry(spec)


def test_a_name_is_checked_before_anything_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_registry("redis://127.0.0.1:1/0")  # nobody need be there
    check_registry("static:http://127.0.0.1:1")
    with pytest.raises(ConfigError, match="names no registry"):
        check_registry("nonsense")
    path = tmp_path / "list.json"
    write(path, ["http://127.0.0.1:1"])
    monkeypatch.setitem(sys.modules, "aiohttp", None)
    for spec in ("static:http://127.0.0.1:1", f"static:{path}"):
        with pytest.raises(ConfigError, match="aiohttp"):
            check_registry(spec)


async def test_names_of_registries(tmp_path: Path) -> None:
    for spec in ("redis://h:6379/0", "valkey://h?namespace=blue", "unix:///run/valkey.sock?db=1"):
        registry = open_registry(spec)
        assert isinstance(registry, ValkeyRegistry)
        assert registry.prefix == ("{blue}:" if "blue" in spec else "{headrace}:")
        await registry.close()


def test_a_pods_way_to_its_api_server(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("t\n")
    access = KubernetesAccess.in_cluster({"KUBERNETES_SERVICE_HOST": "fd00::1"}, tmp_path)
    assert access.url == "https://[fd00::1]:443"
    assert access.headers()["Authorization"] == "Bearer t"
    (tmp_path / "token").write_text("renewed")
    assert access.headers()["Authorization"] == "Bearer renewed"
    with pytest.raises(ConfigError):
        KubernetesAccess.in_cluster({}, tmp_path)
