"""Workers behind a Kubernetes service, told by a local API server and by the workers' own HTTP ports."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest

from router.registry.base import WorkerRecord
from router.registry.kubernetes import KubernetesRegistry, Service
from router.registry.kubernetes_access import KubernetesAccess
from tests.support.kubernetes_api import KubernetesApi, endpoint_slice, kubernetes_api
from tests.support.registries import Watcher, ids, worker
from tests.support.until import until
from tests.support.worker_port import WorkerPort, worker_port


@dataclass
class Cluster:
    api: KubernetesApi
    ports: dict[str, WorkerPort]
    token_file: Path
    registry: KubernetesRegistry
    watcher: Watcher[WorkerRecord]

    def slice(self, name: str, *hosts: str, terminating: bool = False) -> None:
        self.api.put(endpoint_slice(name, "workers", self.port, *hosts, terminating=terminating))

    @property
    def port(self) -> int:
        return next(iter(self.ports.values())).port


@pytest.fixture
async def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Cluster]:
    """An API server, and workers w1 to w3 on the same port of 127.0.0.1 to 127.0.0.3."""
    monkeypatch.setattr("router.registry.kubernetes.POLL_INTERVAL_S", 0.05)
    (tmp_path / "token").write_text("secret")
    async with AsyncExitStack() as stack:
        api = await stack.enter_async_context(kubernetes_api("secret", "default"))
        ports: dict[str, WorkerPort] = {}
        number = 0
        for host in ("127.0.0.1", "127.0.0.2", "127.0.0.3"):
            ports[host] = await stack.enter_async_context(worker_port(host, number))
            ports[host].say(worker(f"w{host[-1]}"))
            number = ports[host].port
        access = KubernetesAccess(api.url, tmp_path / "token")
        registry = KubernetesRegistry(Service("default", "workers"), access=access)
        watcher = Watcher(registry.watch())
        yield Cluster(api, ports, tmp_path / "token", registry, watcher)
        await registry.close()
        await watcher.close()


async def test_slices_are_followed(cluster: Cluster) -> None:
    await cluster.watcher.until(lambda records: records == ())
    cluster.slice("a", "127.0.0.1")
    cluster.slice("b", "127.0.0.2", "127.0.0.1")
    cluster.api.put(endpoint_slice("c", "another-service", cluster.port, "127.0.0.3"))
    assert ids(await cluster.watcher.until(lambda records: len(records) == 2)) == ["w1", "w2"]
    # A pod on its way out takes nothing new, even before it knows.
    cluster.slice("b", "127.0.0.2", terminating=True)
    await cluster.watcher.until(lambda records: [record.state for record in records] == ["ready", "draining"])
    cluster.api.delete("b")
    await cluster.watcher.until(lambda records: ids(records) == ["w1"])
    cluster.ports["127.0.0.1"].say(worker("w1", state="draining"))
    await cluster.watcher.until(lambda records: [record.state for record in records] == ["draining"])
    assert cluster.api.lists == 1


async def test_a_list_comes_in_pages(cluster: Cluster) -> None:
    await cluster.registry.close()
    for number in (1, 2, 3):
        cluster.slice(f"s{number}", f"127.0.0.{number}")
    lists = cluster.api.lists
    registry = KubernetesRegistry(
        Service("default", "workers", str(cluster.port)), access=KubernetesAccess(cluster.api.url, cluster.token_file)
    )
    watcher = Watcher(registry.watch())
    assert ids(await watcher.until(bool)) == ["w1", "w2", "w3"]
    assert cluster.api.lists == lists + 3
    await registry.close()
    await watcher.close()


async def test_a_watch_goes_on_from_the_last_bookmark_and_lists_anew_when_that_is_gone(cluster: Cluster) -> None:
    await until(lambda: cluster.api.num_streams == 1, "a watch is open")
    cluster.slice("a", "127.0.0.1")
    await cluster.watcher.until(lambda records: ids(records) == ["w1"])
    cluster.api.bookmark()
    cluster.slice("b", "127.0.0.2")
    await cluster.watcher.until(lambda records: ids(records) == ["w1", "w2"])
    cluster.api.bookmark()
    version = cluster.api.version
    # What the bookmark said is read before the connection breaks.
    cluster.slice("c", "127.0.0.3")
    await cluster.watcher.until(lambda records: len(records) == 3)
    cluster.api.cut()
    await until(lambda: cluster.api.num_streams == 1, "the watch is opened again")
    assert int(cluster.api.watches[-1]) == version + 1
    assert cluster.api.lists == 1
    cluster.api.forget_history()
    cluster.api.drop_silently("b")
    cluster.api.cut()
    await cluster.watcher.until(lambda records: ids(records) == ["w1", "w3"])
    assert cluster.api.lists > 1
    # The same, told within an open watch.
    await until(lambda: cluster.api.num_streams == 1, "a watch is open")
    cluster.api.drop_silently("c")
    cluster.api.say({"type": "ERROR", "object": {"kind": "Status", "code": 410, "message": "Expired"}})
    await cluster.watcher.until(lambda records: ids(records) == ["w1"])


async def test_outages_and_nonsense_keep_the_list(cluster: Cluster) -> None:
    cluster.slice("a", "127.0.0.1")
    await cluster.watcher.until(lambda records: ids(records) == ["w1"])
    await until(lambda: cluster.api.num_streams == 1, "a watch is open")
    seen = len(cluster.watcher.lists)
    for nonsense in ({"type": "ADDED", "object": 7}, {"type": 5}, {"type": "ERROR", "object": {"code": 500}}):
        opened = cluster.api.num_streams
        cluster.api.say(nonsense)
        await until(lambda opened=opened: cluster.api.num_streams > opened, "it is asked again")  # type: ignore[misc]
    cluster.api.refuse_with = 500
    cluster.api.cut()
    # A token that is replaced is taken up.
    cluster.api.token = "next"
    await until(lambda: cluster.api.rejected > 0, "the old token is refused")
    cluster.token_file.write_text("next")
    cluster.api.refuse_with = None
    assert all(ids(records) == ["w1"] for records in cluster.watcher.lists[seen:])
    cluster.slice("b", "127.0.0.2")
    await cluster.watcher.until(lambda records: ids(records) == ["w1", "w2"])
    assert all(records for records in cluster.watcher.lists[seen:])


async def test_pods_of_another_make_are_listed_by_the_model_that_they_name(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("secret")
    async with kubernetes_api("secret", "default") as api, worker_port() as port:
        port.body = b'{"data":[{"id":"m"}]}'
        api.put(endpoint_slice("a", "engines", port.port, "127.0.0.1"))
        access = KubernetesAccess(api.url, tmp_path / "token")
        registry = KubernetesRegistry(Service("default", "engines", dialect="openai"), access=access)
        watcher = Watcher(registry.watch())
        (record,) = await watcher.until(bool)
        assert (record.model, record.dialect, record.http_url) == ("m", "openai", port.url)
        await registry.close()
        await watcher.close()
