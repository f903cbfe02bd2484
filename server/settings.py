"""Settings of the commands, out of flags, HEADRACE_* variables and a YAML file, by one table for each command.

Reads all sources once and returns a checked, frozen configuration. One file may serve several commands: each takes what
is its own. A flag wins over the environment, that over the file,
that over the default. Every message names the flag, variable or key that it is about.
"""

from __future__ import annotations

import errno
import os
import re
import reprlib
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from engine.errors import ConfigError
from server.config import GatewayConfig, ServeConfig, WorkerConfig
from server.gateway_settings import GATEWAY_OWN_SETTINGS, GATEWAY_SETTINGS
from server.serve_settings import SETTINGS
from server.setting import ENV_PREFIX, Setting
from server.setting_values import convert, split_optional
from server.worker.settings import WORKER_SETTINGS

__all__ = [
    "CONFIG_VARIABLE",
    "GATEWAY_SETTINGS",
    "SETTINGS",
    "WORKER_SETTINGS",
    "Raw",
    "Setting",
    "gather",
    "metavar",
    "parse",
    "read_gateway_settings",
    "read_settings",
    "read_worker_settings",
]

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


_BY_NAME = {setting.name: setting for setting in (*GATEWAY_OWN_SETTINGS, *SETTINGS, *WORKER_SETTINGS)}


class Raw(msgspec.Struct, frozen=True):
    """A value as it was written, and where: `--port`, `HEADRACE_PORT` or `port in FILE`."""

    value: object
    source: str


def read_settings(flags: Mapping[str, str], environ: Mapping[str, str]) -> tuple[ServeConfig, list[str]]:
    """Return the configuration and the warnings about what was left out of it.

    `flags` has the given flags by setting name, and the file's path as "config". Raises ConfigError.
    """
    values, warnings = _read(flags, environ, SETTINGS)
    return msgspec.convert(values, ServeConfig), warnings


def read_worker_settings(flags: Mapping[str, str], environ: Mapping[str, str]) -> tuple[WorkerConfig, list[str]]:
    """The same for `headrace worker`."""
    values, warnings = _read(flags, environ, WORKER_SETTINGS)
    return msgspec.convert(values, WorkerConfig), warnings


def read_gateway_settings(flags: Mapping[str, str], environ: Mapping[str, str]) -> tuple[GatewayConfig, list[str]]:
    """The same for `headrace gateway`."""
    values, warnings = _read(flags, environ, GATEWAY_SETTINGS)
    return msgspec.convert(values, GatewayConfig), warnings


def _read(
    flags: Mapping[str, str], environ: Mapping[str, str], settings: Sequence[Setting]
) -> tuple[dict[str, object], list[str]]:
    raw, warnings = gather(flags, environ, settings)
    values = {_BY_NAME[name].field: parse(_BY_NAME[name], one) for name, one in raw.items()}
    nested: dict[str, object] = {}
    for path, value in values.items():
        owner, _, field = path.rpartition(".")
        part = nested.setdefault(owner, {}) if owner else nested
        assert isinstance(part, dict)
        part[field] = value
    return nested, warnings


def gather(
    flags: Mapping[str, str], environ: Mapping[str, str], settings: Sequence[Setting] = SETTINGS
) -> tuple[dict[str, Raw], list[str]]:
    """Return the value that wins for each of `settings` that is given, by name, and warnings. Raises ConfigError."""
    from_environment, warnings = read_environment(environ)
    file = flags.get("config") or environ.get(CONFIG_VARIABLE)
    raw = read_file(Path(file)) if file else {}
    raw |= from_environment
    raw |= {name: Raw(value, _BY_NAME[name].flag) for name, value in flags.items() if name != "config"}
    own = {setting.name for setting in settings}
    return {name: value for name, value in raw.items() if name in own}, warnings


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
    known = {setting.variable: setting.name for setting in _BY_NAME.values()}
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
    by_kind = {"size": "SIZE", "duration": "TIME", "plain": "", "texts": "TEXT"}
    return setting.metavar or "|".join(setting.allowed) or by_kind[setting.kind] or by_type.get(inner, "VALUE")  # type: ignore[call-overload]
