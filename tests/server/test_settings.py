"""One table for flags, environment and YAML: who wins, what is refused, and which source a message names."""

from __future__ import annotations

import os
from pathlib import Path
from threading import Thread

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.config import EngineConfig
from engine.errors import ConfigError
from server.config import CoresConfig, GatewayConfig, RoutingConfig, ServeConfig, WorkerConfig
from server.setting_values import format_size, parse_duration, parse_size
from server.settings import (
    GATEWAY_SETTINGS,
    SETTINGS,
    WORKER_SETTINGS,
    Setting,
    read_gateway_settings,
    read_settings,
    read_worker_settings,
)
from tests.support.settings_table import PAGE, page_with_table


def read(flags: dict[str, str] | None = None, env: dict[str, str] | None = None) -> ServeConfig:
    config, warnings = read_settings(flags or {}, env or {})
    assert warnings == []
    return config


def refused(flags: dict[str, str] | None = None, env: dict[str, str] | None = None) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        read_settings(flags or {}, env or {})
    return caught.value


def write(path: Path, text: str) -> str:
    path.write_text(text, encoding="utf-8")
    return str(path)


# The device decides on the loop, and the launcher on an engine's place among its neighbours.
DERIVED = {"engine.in_flight_steps", "engine.local_index", "engine.local_engines"}


def test_nothing_given_is_the_default_configuration() -> None:
    assert read() == ServeConfig()


def test_every_field_of_the_configuration_has_a_setting() -> None:
    fields = {f"engine.{one.name}" for one in msgspec.structs.fields(EngineConfig)}
    fields |= {f"routing.{one.name}" for one in msgspec.structs.fields(RoutingConfig)}
    fields |= {f"cores.{one.name}" for one in msgspec.structs.fields(CoresConfig)}
    fields |= {one.name for one in msgspec.structs.fields(ServeConfig)} - {"engine", "routing", "cores"}
    assert {setting.field for setting in SETTINGS} == fields - DERIVED


def test_every_field_of_the_workers_configuration_has_a_setting() -> None:
    fields = {f"engine.{one.name}" for one in msgspec.structs.fields(EngineConfig)}
    fields |= {f"cores.{one.name}" for one in msgspec.structs.fields(CoresConfig)}
    fields |= {one.name for one in msgspec.structs.fields(WorkerConfig)} - {"engine", "cores"}
    assert {setting.field for setting in WORKER_SETTINGS} == fields - DERIVED


def test_every_field_of_a_gateways_configuration_but_the_engines_has_a_setting() -> None:
    fields = {f"routing.{one.name}" for one in msgspec.structs.fields(RoutingConfig)}
    fields |= {one.name for one in msgspec.structs.fields(GatewayConfig)} - {"engine", "cores", "routing", "replicas"}
    assert {setting.field for setting in GATEWAY_SETTINGS} == fields
    config, _ = read_gateway_settings({"register": "redis://h"}, {"HEADRACE_PORT": "9"})
    assert config == GatewayConfig(register="redis://h", port=9)


def test_a_file_serves_both_commands_and_each_takes_its_own(tmp_path: Path) -> None:
    file = write(tmp_path / "h.yaml", "port: 1\nlisten: tcp://127.0.0.1:9\nthreads: 3\ndp: 2\n")
    assert read({"config": file}) == ServeConfig(port=1, engine=EngineConfig(threads=3))
    worker, warnings = read_worker_settings({"config": file}, {"HEADRACE_ROLE": "decode", "HEADRACE_PORT": "x"})
    assert worker == WorkerConfig(listen="tcp://127.0.0.1:9", dp=2, role="decode", engine=EngineConfig(threads=3))
    assert warnings == []
    with pytest.raises(ConfigError, match="--dp"):
        read_worker_settings({"dp": "0"}, {})


@pytest.mark.parametrize(
    ("flag", "env", "file", "expected"),
    [("1", "2", "3", 1), (None, "2", "3", 2), (None, None, "3", 3), (None, None, None, 8000), ("1", None, "3", 1)],
)
def test_flag_wins_over_environment_over_file_over_default(
    tmp_path: Path, flag: str | None, env: str | None, file: str | None, expected: int
) -> None:
    flags = {} if flag is None else {"port": flag}
    if file is not None:
        flags["config"] = write(tmp_path / "h.yaml", f"port: {file}\n")
    assert read(flags, {} if env is None else {"HEADRACE_PORT": env}).port == expected


SAMPLES = {
    "model": ("some/dir", "some/dir"),
    "served-model-name": ("a", "a"),
    "max-model-len": ("4096", 4096),
    "dtype": ("float32", "float32"),
    "numerics": ("invariant", "invariant"),
    "device": ("cpu", "cpu"),
    "operators": ("torch", "torch"),
    "weights": ("int8", "int8"),
    "threads": ("3", 3),
    "chat-template": ("t.jinja", "t.jinja"),
    "kv-dtype": ("fp8", "fp8"),
    "kv-cache-memory": ("2GiB", 2 * 1024**3),
    "block-size": ("32", 32),
    "prefix-cache": ("false", False),
    "kv-store": ("ram=1GiB disk=/kv,2GiB", ("ram=1GiB", "disk=/kv,2GiB")),
    "kv-store-quota": ("3GiB", 3 * 1024**3),
    "kv-store-secret-file": ("s.hex", "s.hex"),
    "kv-store-load": ("always", "always"),
    "max-running": ("7", 7),
    "max-waiting": ("9", 9),
    "max-step-tokens": ("512", 512),
    "host": ("0.0.0.0", "0.0.0.0"),
    "port": ("1234", 1234),
    "api-processes": ("2", 2),
    "replicas": ("2", 2),
    "routing-policy": ("least_tokens", "least_tokens"),
    "prefill-budget": ("10s", 10.0),
    "max-queued": ("10", 10),
    "queue-timeout": ("5s", 5.0),
    "hedge-after": ("500ms", 0.5),
    "stall-timeout": ("7s", 7.0),
    "core-unready-after": ("5s", 5.0),
    "core-restart-after": ("2m", 120.0),
    "index-blocks": ("5000", 5000),
    "drain-timeout": ("1.5m", 90.0),
    "request-timeout": ("30", 30.0),
    "max-body": ("1MB", 1_000_000),
    "keep-alive": ("5s", 5.0),
    "sse-keep-alive": ("500ms", 0.5),
    "max-concurrent-requests": ("11", 11),
    "max-prompts": ("12", 12),
    "strict-params": ("true", True),
    "api-keys-file": ("k.yaml", "k.yaml"),
    "admin-key-file": ("a.txt", "a.txt"),
    "scope-secret-file": ("s.txt", "s.txt"),
    "open-metrics": ("false", False),
    "debug-header": ("true", True),
    "requests-per-minute": ("60", 60),
    "tokens-per-minute": ("100000", 100_000),
    "access-log": ("access.jsonl", "access.jsonl"),
    "log-level": ("debug", "debug"),
    "log-format": ("json", "json"),
}


def field_of(config: ServeConfig, setting: Setting) -> object:
    owner, _, name = setting.field.rpartition(".")
    return getattr(getattr(config, owner) if owner else config, name)


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda setting: setting.name)
def test_each_setting_reads_alike_from_all_three_sources(tmp_path: Path, setting: Setting) -> None:
    text, expected = SAMPLES[setting.name]
    assert expected != setting.default
    file = write(tmp_path / "h.yaml", f"{setting.name.replace('-', '_')}: {text}\n")
    for config in (read({setting.name: text}), read({}, {setting.variable: text}), read({"config": file})):
        assert field_of(config, setting) == expected
        assert type(field_of(config, setting)) is type(expected)


def test_message_names_the_flag_the_variable_or_the_key(tmp_path: Path) -> None:
    assert str(refused({"port": "x"})).startswith("--port: 'x' ")
    assert str(refused({}, {"HEADRACE_PORT": "x"})).startswith("HEADRACE_PORT: 'x' ")
    file = write(tmp_path / "my.yaml", "port: x\n")
    assert str(refused({"config": file})).startswith(f"port in {file}: 'x' ")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("port", "65536"),
        ("port", "-1"),
        ("port", "80.5"),
        ("port", "none"),
        ("block-size", "8"),
        ("block-size", "100"),
        ("threads", "0"),
        ("dtype", "float8"),
        ("kv-cache-memory", "2 parsecs"),
        ("kv-cache-memory", "-1"),
        ("kv-cache-memory", "0"),
        ("drain-timeout", "soon"),
        ("drain-timeout", "nan"),
        ("drain-timeout", "1e9h"),
        ("keep-alive", "9" * 400 + "h"),
        ("keep-alive", "2000000h"),
        ("max-body", "9" * 40 + "TiB"),
        ("host", "a\udcffb"),
        ("served-model-name", "\ud800"),
        ("request-timeout", "0"),
        ("prefix-cache", "perhaps"),
        ("log-level", "loud"),
    ],
)
def test_wrong_value_is_refused(name: str, value: str) -> None:
    message = str(refused({name: value}))
    assert f"--{name}" in message
    assert "\n" not in message


@pytest.mark.parametrize("value", ["true", "[1]", "{a: 1}", "1.5"])
def test_yaml_of_the_wrong_type_is_refused(tmp_path: Path, value: str) -> None:
    assert "port in" in str(refused({"config": write(tmp_path / "h.yaml", f"port: {value}\n")}))


def test_optional_setting_can_be_unset_over_a_file(tmp_path: Path) -> None:
    file = write(tmp_path / "h.yaml", "max-model-len: 100\nrequest_timeout: 5\n")
    config = read({"config": file, "max-model-len": "none"}, {"HEADRACE_REQUEST_TIMEOUT": "none"})
    assert config.engine.max_model_len is None
    assert config.request_timeout_s is None


def test_close_choice_is_suggested() -> None:
    assert refused({"dtype": "bfloat61"}).hint == "Did you mean bfloat16?"


def test_unknown_yaml_key_is_an_error_with_a_suggestion(tmp_path: Path) -> None:
    error = refused({"config": write(tmp_path / "h.yaml", "max-model-length: 100\n")})
    assert "max-model-length" in str(error)
    assert error.hint == "Did you mean max-model-len?"


def test_key_given_twice_in_both_spellings_is_refused(tmp_path: Path) -> None:
    assert "twice" in str(refused({"config": write(tmp_path / "h.yaml", "max-body: 1MB\nmax_body: 2MB\n")}))


# Nine lists of nine of the list before: a value of a billion letters in ten lines.
LAUGHS = "log-level: [&a [x]" + "".join(
    f", &{name} [{', '.join([f'*{before}'] * 9)}]" for before, name in zip("abcdefghi", "bcdefghij", strict=True)
) + "]\n"  # fmt: skip


@pytest.mark.parametrize(
    "text",
    [
        "a: [1\n",
        "- port\n",
        "just words\n",
        "port: !!python/object:os.system x\n",
        "port: " + "[" * 3000 + "]" * 3000 + "\n",
        "port: " + "9" * 5000 + "\n",
        'port: "\\ud800"\n',
        "port: 1\0\n",
        "? [a, b]\n: 1\n",
        LAUGHS,
        "log-level: &a [*a]\n",
    ],
)
def test_file_that_is_no_mapping_of_plain_values_is_refused_in_one_line(tmp_path: Path, text: str) -> None:
    file = write(tmp_path / "h.yaml", text)
    message = str(refused({"config": file}))
    assert file in message
    assert "\n" not in message


def test_a_file_without_end_is_refused_and_a_pipe_is_read(tmp_path: Path) -> None:
    assert "File too large" in str(refused({"config": "/dev/zero"}))
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    writer = Thread(target=pipe.write_text, args=("port: 77\n",))
    writer.start()
    assert read({"config": str(pipe)}).port == 77
    writer.join()


def test_missing_file_and_binary_file_are_refused(tmp_path: Path) -> None:
    assert "cannot be read" in str(refused({"config": str(tmp_path / "none.yaml")}))
    (tmp_path / "b.yaml").write_bytes(b"\xff\xfe\x00port")
    assert "not valid YAML" in str(refused({"config": str(tmp_path / "b.yaml")}))


def test_empty_file_and_empty_variable_change_nothing(tmp_path: Path) -> None:
    env = {"HEADRACE_CONFIG": write(tmp_path / "h.yaml", "# nothing\n"), "HEADRACE_PORT": " "}
    assert read({}, env) == ServeConfig()


def test_file_named_by_the_environment_is_read_unless_a_flag_names_another(tmp_path: Path) -> None:
    env = {"HEADRACE_CONFIG": write(tmp_path / "a.yaml", "port: 1\n")}
    assert read({}, env).port == 1
    assert read({"config": write(tmp_path / "b.yaml", "port: 2\n")}, env).port == 2


def test_unknown_variable_is_warned_of_with_a_suggestion() -> None:
    config, warnings = read_settings({}, {"HEADRACE_MAX_MODEL_LENGTH": "5", "OTHER_PORT": "1"})
    assert config == ServeConfig()
    assert len(warnings) == 1
    assert "HEADRACE_MAX_MODEL_LENGTH" in warnings[0]
    assert "Did you mean HEADRACE_MAX_MODEL_LEN?" in warnings[0]


def test_variables_of_a_kubernetes_service_named_headrace_do_no_harm() -> None:
    env = {
        "HEADRACE_PORT": "tcp://10.0.0.1:8000",
        "HEADRACE_SERVICE_HOST": "10.0.0.1",
        "HEADRACE_SERVICE_PORT": "8000",
        "HEADRACE_SERVICE_PORT_HTTP": "8000",
        "HEADRACE_PORT_8000_TCP_ADDR": "10.0.0.1",
    }
    config, warnings = read_settings({}, env)
    assert config.port == 8000
    assert ["Kubernetes" in one for one in warnings] == [True]


@pytest.mark.parametrize(
    ("text", "size"),
    [("0", 0), ("12", 12), ("12b", 12), ("1k", 1000), ("1KiB", 1024), ("1.5 GiB", 3 * 2**29), ("2g", 2 * 10**9)],
)
def test_sizes(text: str, size: int) -> None:
    assert parse_size(text) == size


@given(st.integers(min_value=0, max_value=2**60))
def test_a_written_size_reads_back_exactly(size: int) -> None:
    assert parse_size(format_size(size)) == size


@pytest.mark.parametrize(("text", "seconds"), [("30", 30), (30, 30), (1.5, 1.5), ("2h", 7200), ("250ms", 0.25)])
def test_durations(text: object, seconds: float) -> None:
    assert parse_duration(text) == seconds


@given(st.text(max_size=12))
def test_no_text_breaks_the_parsers(text: str) -> None:
    for setting in SETTINGS:
        try:
            config, _ = read_settings({setting.name: text}, {})
        except ConfigError:
            continue
        assert isinstance(field_of(config, setting), type(SAMPLES[setting.name][1]) | None)


def test_documentation_has_the_settings_as_they_are() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert page == page_with_table(page), "run: python -m tests.support.settings_table"
    assert all(f"| `{setting.flag}` |" in page for setting in SETTINGS)


def test_example_file_of_the_documentation_is_valid(tmp_path: Path) -> None:
    example = PAGE.read_text(encoding="utf-8").split("```yaml\n")[1].split("```")[0]
    config = read({"config": write(tmp_path / "h.yaml", example)})
    assert (config.port, config.drain_timeout_s, config.engine.kv_cache_memory_bytes) == (9000, 60, 2**31)
