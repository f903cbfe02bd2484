"""The settings of `headrace serve`: one table from which flags, HEADRACE_* variables, YAML keys and the docs are made.

Reads all sources once and returns a checked, frozen ServeConfig. A flag wins over the environment, that over the file,
that over the default. Every message names the flag, variable or key that it is about.
"""

from __future__ import annotations

import errno
import os
import re
import reprlib
from collections.abc import Mapping
from pathlib import Path
from typing import get_type_hints

import msgspec

from engine.config import EngineConfig
from engine.errors import ConfigError
from server.config import ServeConfig
from server.setting_values import Kind, choices_of, convert, split_optional

ENV_PREFIX = "HEADRACE_"
CONFIG_VARIABLE = "HEADRACE_CONFIG"
MAX_FILE_BYTES = 1024 * 1024
OTHER_VARIABLES = frozenset(
    {CONFIG_VARIABLE, "HEADRACE_CACHE_DIR", "HEADRACE_STATE_DIR", "HEADRACE_URL", "HEADRACE_API_KEY"}
    | {"HEADRACE_API_KEYS", "HEADRACE_ADMIN_KEY"}
)
"""Read by other parts: the file's path, the model cache, the scope secret's directory, the server that `headrace chat`
talks to and its key there, and the keys that this server asks for."""

# Kubernetes gives every pod these variables for a Service named headrace.
_SERVICE_LINK = re.compile(r"HEADRACE_(SERVICE_(HOST|PORT.*)|PORT_\d+_(TCP|UDP).*)")


class Setting(msgspec.Struct, frozen=True, kw_only=True):
    """`field` is the path in ServeConfig, whose annotation gives the type. `low` and `high` are inclusive."""

    name: str
    field: str
    section: str
    help: str
    kind: Kind = "plain"
    choices: tuple[str, ...] = ()
    low: float | None = None
    high: float | None = None
    metavar: str = ""

    @property
    def variable(self) -> str:
        return ENV_PREFIX + self.name.replace("-", "_").upper()

    @property
    def flag(self) -> str:
        return "MODEL" if self.name == "model" else f"--{self.name}"

    @property
    def type(self) -> object:
        owner, _, field = self.field.rpartition(".")
        return _ENGINE_TYPES[field] if owner == "engine" else _SERVE_TYPES[field]

    @property
    def default(self) -> object:
        owner, _, field = self.field.rpartition(".")
        return getattr(_DEFAULTS.engine if owner == "engine" else _DEFAULTS, field)

    @property
    def allowed(self) -> tuple[str, ...]:
        return self.choices or choices_of(self.type)

    @property
    def is_switch(self) -> bool:
        return self.type is bool


_DEFAULTS = ServeConfig()
_SERVE_TYPES = get_type_hints(ServeConfig)
_ENGINE_TYPES = get_type_hints(EngineConfig)

MODEL, MEMORY, FLEET, HTTP, ACCESS, LOGS = (
    "Model",
    "Cache and scheduling",
    "Replicas and routing",
    "HTTP",
    "Access",
    "Logging",
)

SETTINGS: tuple[Setting, ...] = (
    Setting(
        name="model",
        field="engine.model",
        section=MODEL,
        help="A Hugging Face directory, a GGUF file, a packaged model's name, or a hub's org/name.",
    ),
    Setting(
        name="served-model-name",
        field="engine.served_model_name",
        section=MODEL,
        help="The name that clients use.",
        metavar="NAME",
    ),
    Setting(
        name="max-model-len",
        field="engine.max_model_len",
        section=MODEL,
        help="Tokens of prompt and answer together; the model's own limit unless set.",
        low=2,
    ),
    Setting(name="dtype", field="engine.dtype", section=MODEL, help="Type of weights and activations."),
    Setting(
        name="numerics",
        field="engine.numerics",
        section=MODEL,
        help="invariant: bitwise equal logits, whatever runs beside a request.",
    ),
    Setting(name="device", field="engine.device", section=MODEL, help="Where the model runs."),
    Setting(
        name="threads",
        field="engine.threads",
        section=MODEL,
        help="CPU threads of the engine; the cores of this machine unless set.",
        low=1,
        high=1024,
    ),
    Setting(
        name="chat-template",
        field="engine.chat_template",
        section=MODEL,
        help="A Jinja chat template to use instead of the model's own.",
        metavar="FILE",
    ),
    Setting(
        name="kv-cache-memory",
        field="engine.kv_cache_memory_bytes",
        section=MEMORY,
        help="Memory of the KV cache, such as 2GiB; chosen from the free memory unless set.",
        kind="size",
        low=1,
    ),
    Setting(
        name="block-size",
        field="engine.block_size",
        section=MEMORY,
        help="Tokens of one KV block.",
        choices=("16", "32", "64", "128", "256"),
    ),
    Setting(
        name="prefix-cache",
        field="engine.prefix_cache",
        section=MEMORY,
        help="Reuse the KV of prompts that begin alike.",
    ),
    Setting(
        name="max-running",
        field="engine.max_running",
        section=MEMORY,
        help="Requests that run at once.",
        low=1,
        high=65536,
    ),
    Setting(
        name="max-waiting",
        field="engine.max_waiting",
        section=MEMORY,
        help="Requests that may wait; more are refused with 429.",
        low=1,
    ),
    Setting(
        name="max-step-tokens",
        field="engine.max_step_tokens",
        section=MEMORY,
        help="Token budget of one engine step: longer prompts are computed in chunks.",
        low=1,
    ),
    Setting(name="host", field="host", section=HTTP, help="Address to listen on; 0.0.0.0 for all.", metavar="ADDRESS"),
    Setting(name="port", field="port", section=HTTP, help="Port to listen on; 0 takes a free one.", low=0, high=65535),
    Setting(
        name="api-processes",
        field="api_processes",
        section=HTTP,
        help="Processes that speak HTTP for the engines.",
        low=1,
        high=256,
    ),
    Setting(
        name="replicas",
        field="replicas",
        section=FLEET,
        help="Engines on this machine, each with the whole model, behind one router.",
        low=1,
        high=256,
    ),
    Setting(
        name="drain-timeout",
        field="drain_timeout_s",
        section=HTTP,
        help="How long running requests may go on after SIGTERM.",
        kind="duration",
        low=0,
    ),
    Setting(
        name="request-timeout",
        field="request_timeout_s",
        section=HTTP,
        help="The longest that one request may take; no limit unless set.",
        kind="duration",
        low=0.001,
    ),
    Setting(
        name="max-body",
        field="max_body_bytes",
        section=HTTP,
        help="The largest request body.",
        kind="size",
        low=1024,
    ),
    Setting(
        name="keep-alive",
        field="keep_alive_s",
        section=HTTP,
        help="How long an idle connection stays open.",
        kind="duration",
        low=0,
    ),
    Setting(
        name="sse-keep-alive",
        field="sse_keep_alive_s",
        section=HTTP,
        help="Silence on a stream after which a comment is sent.",
        kind="duration",
        low=0.1,
    ),
    Setting(
        name="max-concurrent-requests",
        field="max_concurrent_requests",
        section=HTTP,
        help="Requests under way, probes not counted; more are refused with 429.",
        low=1,
    ),
    Setting(
        name="max-prompts",
        field="max_prompts",
        section=HTTP,
        help="Prompts of one completion request, times n.",
        low=1,
        high=65536,
    ),
    Setting(
        name="strict-params",
        field="strict_params",
        section=HTTP,
        help="Refuse unknown fields of a body instead of ignoring and naming them.",
    ),
    Setting(
        name="api-keys-file",
        field="api_keys_file",
        section=ACCESS,
        help="API keys and their tenants, a `KEY: TENANT` a line; read again when it changes.",
        metavar="FILE",
    ),
    Setting(
        name="admin-key-file",
        field="admin_key_file",
        section=ACCESS,
        help="The key of /admin; without one only this machine may use it.",
        metavar="FILE",
    ),
    Setting(
        name="scope-secret-file",
        field="scope_secret_file",
        section=ACCESS,
        help="The secret that keeps tenants' caches apart, to share between hosts; made at the first start unless set.",
        metavar="FILE",
    ),
    Setting(
        name="open-metrics",
        field="open_metrics",
        section=ACCESS,
        help="Let /metrics and /load be read without a key.",
    ),
    Setting(
        name="log-level",
        field="log_level",
        section=LOGS,
        help="The least important events to log.",
        choices=("debug", "info", "warning", "error"),
    ),
    Setting(name="log-format", field="log_format", section=LOGS, help="text, or one JSON object a line."),
    Setting(
        name="access-log",
        field="access_log",
        section=LOGS,
        help="Append a JSON line for every request to this file; - is standard output.",
        metavar="FILE",
    ),
)

_BY_NAME = {setting.name: setting for setting in SETTINGS}


class Raw(msgspec.Struct, frozen=True):
    """A value as it was written, and where: `--port`, `HEADRACE_PORT` or `port in FILE`."""

    value: object
    source: str


def read_settings(flags: Mapping[str, str], environ: Mapping[str, str]) -> tuple[ServeConfig, list[str]]:
    """Return the configuration and the warnings about what was left out of it.

    `flags` has the given flags by setting name, and the file's path as "config". Raises ConfigError.
    """
    raw, warnings = gather(flags, environ)
    values = {_BY_NAME[name].field: parse(_BY_NAME[name], one) for name, one in raw.items()}
    engine = {field.removeprefix("engine."): value for field, value in values.items() if field.startswith("engine.")}
    serve = {field: value for field, value in values.items() if not field.startswith("engine.")}
    return msgspec.convert({**serve, "engine": engine}, ServeConfig), warnings


def gather(flags: Mapping[str, str], environ: Mapping[str, str]) -> tuple[dict[str, Raw], list[str]]:
    """Return for each setting that is given the value that wins, by name, and the warnings. Raises ConfigError."""
    from_environment, warnings = read_environment(environ)
    file = flags.get("config") or environ.get(CONFIG_VARIABLE)
    raw = read_file(Path(file)) if file else {}
    raw |= from_environment
    raw |= {name: Raw(value, _BY_NAME[name].flag) for name, value in flags.items() if name != "config"}
    return raw, warnings


def parse(setting: Setting, raw: Raw) -> object:
    """Return the checked value, or raise a ConfigError that names the source."""
    try:
        value = convert(raw.value, setting.type, setting.kind, setting.choices)
    except ValueError as error:
        shown = "" if raw.value is None else f" {_short(raw.value)}"
        raise ConfigError(f"{raw.source}:{shown} {error}.", hint=_closest_choice(setting, raw.value)) from None
    if isinstance(value, int | float) and not isinstance(value, bool):
        if setting.low is not None and value < setting.low:
            raise ConfigError(f"{raw.source}: {raw.value!s} is too small; the least is {setting.low:g}.")
        if setting.high is not None and value > setting.high:
            raise ConfigError(f"{raw.source}: {raw.value!s} is too large; the most is {setting.high:g}.")
    return value


def _short(value: object) -> str:
    """A value as it was written, if it is not too long. Aliases make a few lines of YAML as long as one likes."""
    short = reprlib.Repr()
    short.maxstring = short.maxother = 200
    short.maxlevel = 2
    return short.repr(value if isinstance(value, str | list | dict) else str(value))


def read_environment(environ: Mapping[str, str]) -> tuple[dict[str, Raw], list[str]]:
    """Return what HEADRACE_* variables say, and a warning for each that says nothing to us. Empty ones are unset."""
    known = {setting.variable: setting.name for setting in SETTINGS}
    found: dict[str, Raw] = {}
    warnings: list[str] = []
    for variable, value in sorted(environ.items()):
        if not variable.startswith(ENV_PREFIX) or variable in OTHER_VARIABLES or _SERVICE_LINK.fullmatch(variable):
            continue
        if variable == "HEADRACE_PORT" and value.startswith(("tcp://", "udp://")):
            warnings.append(f"{variable}={value} comes from a Kubernetes Service named headrace and is not used.")
        elif variable not in known:
            warnings.append(f"{variable} is no setting and has no effect.{did_you_mean(variable, known)}")
        elif value.strip():
            found[known[variable]] = Raw(value, variable)
    return found, warnings


def read_file(path: Path) -> dict[str, Raw]:
    """Return the settings of a YAML file: one mapping, with the flags' names (or underscores) as its keys."""
    import yaml

    try:
        content: object = yaml.safe_load(_read_text(path))
    except OSError as error:
        raise ConfigError(f"The configuration file {path} cannot be read: {error.strerror or error}.") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)
        place = f", line {mark.line + 1}" if mark is not None else ""
        raise ConfigError(f"The configuration file {path}{place} is not valid YAML: {_problem(error)}.") from None
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigError(f"The configuration file {path} holds no mapping.", hint="Write one `name: value` a line.")
    found: dict[str, Raw] = {}
    for key, value in content.items():
        name = str(key).replace("_", "-")
        if name not in _BY_NAME:
            raise ConfigError(f"{key} in {path} is no setting.", hint=did_you_mean(name, _BY_NAME).strip() or None)
        if name in found:
            raise ConfigError(f"{key} in {path} is given twice.")
        found[name] = Raw(value, f"{key} in {path}")
    return found


def _read_text(path: Path) -> str:
    """A pipe is welcome (`--config <(...)`), a source without end is not."""
    with path.open("rb") as file:
        data = file.read(MAX_FILE_BYTES + 1)
    if len(data) > MAX_FILE_BYTES:
        raise OSError(errno.EFBIG, os.strerror(errno.EFBIG))
    return data.decode("utf-8")


def _problem(error: Exception) -> str:
    if isinstance(error, UnicodeDecodeError):
        return "it is not UTF-8 text"
    if isinstance(error, RecursionError):
        return "it is nested too deep"
    return str(getattr(error, "problem", None) or error).splitlines()[0]


def did_you_mean(name: str, known: Mapping[str, object]) -> str:
    """A sentence with a space before it, or nothing when no known name is close."""
    from difflib import get_close_matches

    close = get_close_matches(name, known, n=1, cutoff=0.7)
    return f" Did you mean {close[0]}?" if close else ""


def _closest_choice(setting: Setting, raw: object) -> str | None:
    return did_you_mean(_short(raw).strip("'").lower(), dict.fromkeys(setting.allowed)).strip() or None


def metavar(setting: Setting) -> str:
    """What help shows in the place of the value."""
    inner, _ = split_optional(setting.type)
    by_type = {int: "N", float: "N", str: "TEXT"}
    by_kind = {"size": "SIZE", "duration": "TIME", "plain": ""}
    return setting.metavar or "|".join(setting.allowed) or by_kind[setting.kind] or by_type.get(inner, "VALUE")  # type: ignore[call-overload]
