"""The launcher with real processes and signals; engine and API process are torch-free stand-ins on the real wire."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import psutil
import pytest

from engine.config import EngineConfig
from engine.errors import ConfigError
from server.child import Backoff, Child, ChildSpec
from server.config import ServeConfig
from server.launcher import listen, run
from tests.support.families import kill_family
from tests.support.scripted_engine import scripted_tokens
from tests.support.until import until

ROOT = Path(__file__).parents[2]

SCRIPT = """
import sys
import msgspec
from engine.errors import ConfigError, ModelError
from server.config import ServeConfig
from server.launcher import run
config = msgspec.json.decode(sys.argv[1], type=ServeConfig)
try:
    sys.exit(run(config, core_module="tests.support.scripted_engine", api_module="tests.support.scripted_api"))
except (ConfigError, ModelError) as error:
    print(f"error: {error} / {error.hint}", file=sys.stderr)
    sys.exit(2)
"""


class Serve:
    """One `headrace serve` with stand-ins behind it."""

    def __init__(self, log: Path, directory: Path, **config: object) -> None:
        model = str(config.pop("model", "ok"))
        self.log = log
        serve_config = ServeConfig(**{"engine": EngineConfig(model=model), "port": 0, **config})  # type: ignore[arg-type]
        with log.open("wb") as stderr:
            self.process = psutil.Popen(
                [sys.executable, "-c", SCRIPT, msgspec.json.encode(serve_config).decode()],
                cwd=ROOT,
                stderr=stderr,
                env={**os.environ, "TMPDIR": str(directory)},
            )

    @property
    def text(self) -> str:
        return self.log.read_text()

    async def port(self) -> int:
        await until(lambda: "listening on" in self.text, "the port is printed")
        found = re.search(r"listening on http://127\.0\.0\.1:(\d+)", self.text)
        assert found is not None
        return int(found[1])

    def children(self, module: str) -> list[psutil.Process]:
        return [child for child in self.process.children() if module in command(child)]

    async def ask(self, line: str) -> str:
        return await (await self.begin(line))

    async def begin(self, line: str) -> asyncio.Task[str]:
        """Ask, and return the whole answer to come once its first line is there."""
        reader, writer = await asyncio.open_connection("127.0.0.1", await self.port())
        writer.write(f"{line}\n".encode())
        first = await reader.readline()

        async def read_all() -> str:
            try:
                return (first + await reader.read()).decode().strip()
            finally:
                writer.close()

        return asyncio.create_task(read_all())

    async def exit_code(self) -> int:
        code: int = await asyncio.get_running_loop().run_in_executor(None, self.process.wait, 30)
        return code


@pytest.fixture
def started(tmp_path: Path) -> Iterator[list[Serve]]:
    """Servers to be cleaned up: killed with all that they have started."""
    servers: list[Serve] = []
    yield servers
    for server in servers:
        if server.process.poll() is None:
            kill_family(server.process)


@pytest.fixture
def serve(tmp_path: Path, started: list[Serve]) -> Iterator[type[Serve]]:
    directory = tmp_path / "t"
    directory.mkdir()

    def start(**config: object) -> Serve:
        server = Serve(tmp_path / f"log{len(started)}", directory, **config)
        started.append(server)
        return server

    yield start  # type: ignore[misc]
    for server in started:
        assert "Traceback" not in server.text


def left_over(tmp_path: Path) -> list[str]:
    return os.listdir(tmp_path / "t")


async def test_streams_survive_the_engines_death_and_sigterm_ends_all(serve: type[Serve], tmp_path: Path) -> None:
    server = serve(api_processes=2)
    engine = await server.ask("engine")
    (directory,) = (tmp_path / "t").iterdir()
    assert directory.stat().st_mode & 0o777 == 0o700
    await until(lambda: "is ready" in server.text, "the card is printed")

    streams = [await server.begin(f"{seed} 1500") for seed in range(8)]
    (core,) = server.children("scripted_engine")
    core.kill()
    await until(lambda: "starting it again" in server.text, "the engine is started again")
    while await server.ask("engine") == engine:  # An API process may not have noticed the death yet.
        pass
    assert "ended with signal SIGKILL; starting it again in 0.1 s" in server.text

    server.process.terminate()
    for seed, answer in enumerate(await asyncio.gather(*streams)):
        assert answer.split() == [*map(str, scripted_tokens(seed, 1500)), "end"]
    family = server.process.children()
    assert await server.exit_code() == 0
    assert not [child for child in family if child.is_running()]
    assert left_over(tmp_path) == []


async def test_streams_of_a_dead_replica_go_on_at_another(serve: type[Serve]) -> None:
    server = serve(replicas=2)
    await until(lambda: "is ready" in server.text, "the card is printed")
    assert re.search(r"replicas +2, each", server.text)
    streams = [await server.begin(f"{seed} 1500") for seed in range(8)]
    first, second = server.children("scripted_engine")
    first.kill()
    for seed, answer in enumerate(await asyncio.gather(*streams)):
        assert answer.split() == [*map(str, scripted_tokens(seed, 1500)), "end"]
    assert second.is_running()
    assert len(re.findall(r"Engine \d ended with signal SIGKILL", server.text)) == 1
    server.process.terminate()
    assert await server.exit_code() == 0


async def test_a_dead_api_process_is_replaced_behind_the_same_port(serve: type[Serve]) -> None:
    server = serve()
    pid = int(await server.ask("pid"))
    os.kill(pid, signal.SIGKILL)
    # The connection waits in the backlog of the socket that the launcher keeps.
    assert int(await server.ask("pid")) != pid


async def test_connections_are_taken_before_anything_behind_the_port_runs(serve: type[Serve]) -> None:
    server = serve()
    with socket.create_connection(("127.0.0.1", await server.port())):
        pass


async def test_a_json_log_holds_one_object_on_every_line(serve: type[Serve]) -> None:
    server = serve(log_format="json")
    await until(lambda: "is ready" in server.text, "it is ready")
    server.process.terminate()
    assert await server.exit_code() == 0
    events = [json.loads(line) for line in server.text.splitlines()]
    (ready,) = (event for event in events if "is ready" in event["message"])
    assert ready["kv_capacity_tokens"] > 0


async def test_the_limit_of_the_drain_holds(serve: type[Serve]) -> None:
    server = serve(drain_timeout_s=0.2)
    await server.ask("engine")
    stream = await server.begin("1 1000000")
    server.process.terminate()
    assert await server.exit_code() == 0
    answer = (await stream).split()
    assert answer
    assert answer[-1] != "end"


@pytest.mark.parametrize("first", [signal.SIGTERM, signal.SIGINT])
async def test_a_second_signal_ends_it_at_once(serve: type[Serve], tmp_path: Path, first: int) -> None:
    server = serve(drain_timeout_s=1000)
    await server.ask("engine")
    stream = await server.begin("1 10000000")
    family = server.process.children()
    server.process.send_signal(first)
    await until(lambda: "stopping" in server.text, "the first signal arrived")
    assert server.process.poll() is None
    server.process.send_signal(signal.SIGINT)
    assert await server.exit_code() == 128 + signal.SIGINT
    await asyncio.wait([stream])
    assert not [child for child in family if child.is_running()]
    assert left_over(tmp_path) == []


async def test_no_process_outlives_a_killed_launcher(serve: type[Serve]) -> None:
    server = serve(api_processes=2)
    await server.ask("engine")
    family = server.process.children(recursive=True)
    assert len(family) == 3
    server.process.kill()
    await until(lambda: not [child for child in family if is_alive(child)], "every child has ended")


def command(process: psutil.Process) -> str:
    """Return its command line, or nothing when it has ended meanwhile."""
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


def is_alive(process: psutil.Process) -> bool:
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


@pytest.mark.parametrize(
    ("model", "line"),
    [
        ("bad-model", "error: The file weights.bin ends too early. / Fetch it again."),
        ("bad-config", "error: There is no such device. / Try --device cpu."),
    ],
)
async def test_a_bad_model_ends_everything_with_one_line(
    serve: type[Serve], tmp_path: Path, model: str, line: str
) -> None:
    server = serve(model=model)
    assert await server.exit_code() == 2
    assert server.text.splitlines()[-1] == line
    assert left_over(tmp_path) == []


async def test_an_engine_that_crashes_while_loading_is_tried_again_with_growing_pauses(serve: type[Serve]) -> None:
    server = serve(model="crash-at-load")
    await until(lambda: server.text.count("The engine ended with exit code 70") >= 3, "it was started three times")
    pauses = re.findall(r"starting it again in ([\d.]+) s", server.text)
    assert pauses[:3] == ["0.1", "0.2", "0.4"]
    server.process.terminate()
    assert await server.exit_code() == 0


def test_a_port_in_use_is_one_clear_line() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"port {port}: Address already in use") as caught:
            run(ServeConfig(port=port))
        assert caught.value.hint is not None


@pytest.mark.parametrize("host", ["no.such.host.invalid", "not a host!!", "a" * 5000, "a\0b", "\ud800", "a..b"])
def test_an_unknown_host_is_one_clear_line(host: str) -> None:
    with pytest.raises(ConfigError, match="Cannot listen on host") as caught:
        listen(host, 0)
    assert len(str(caught.value)) < 500


def test_pauses_double_to_a_limit_and_begin_anew_after_a_healthy_life() -> None:
    backoff = Backoff()
    assert [backoff.pause_s(1.0) for _ in range(9)] == [0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 10.0, 10.0]
    assert [backoff.pause_s(60.0), backoff.pause_s(59.0)] == [0.1, 0.2]


async def test_a_child_that_is_stopped_during_its_pause_is_not_started_again(caplog: pytest.LogCaptureFixture) -> None:
    child = Child(ChildSpec("A child", "this", b"\n"))
    child._backoff = Backoff(first_s=1000)
    task = asyncio.create_task(child.keep_running())
    await until(lambda: "starting it again" in caplog.text, "it has ended")
    child.stop()
    assert await task == 0
    assert child.starts == 1
