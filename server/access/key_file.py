"""The file of API keys: read strictly, and read again when it changes.

The file is YAML, one `KEY: TENANT` a line (see server/access/keys.py), or `KEY: {tenant: TENANT, ...}` for a key with
limits of its own. It is looked at once a second, because a stat
works alike for an editor, an atomic rename and a mounted secret, and with any number of processes, where a signal would
have to find all of them. A version that cannot be used changes nothing and is logged once.
"""

from __future__ import annotations

import asyncio
import logging
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from engine.errors import ConfigError
from server.access.keys import KeyEntry, check_entries, read_entry, read_limit

logger = logging.getLogger(__name__)

LOOK_INTERVAL_S = 1.0
MAX_FILE_BYTES = 4 * 1024 * 1024
LIMITS = ("requests_per_minute", "tokens_per_minute")


def read_key_file(path: Path) -> list[KeyEntry]:
    """Return the entries; a file without any has none. Raises ConfigError, which never shows a key."""
    import yaml

    try:
        with path.open("rb") as file:
            source = file.read(MAX_FILE_BYTES + 1)
        if len(source) > MAX_FILE_BYTES:
            raise ConfigError(f"The key file {path} is larger than {MAX_FILE_BYTES} bytes.")
        document = yaml.compose(source.decode(), Loader=yaml.SafeLoader)
    except OSError as error:
        raise ConfigError(f"The key file {path} cannot be read: {error.strerror or error}.") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        mark = getattr(error, "problem_mark", None)
        place = f", line {mark.line + 1}," if mark is not None else ""
        raise ConfigError(f"The key file {path}{place} is not valid YAML.", hint=_FORM) from None
    if document is None:
        return []
    if not isinstance(document, yaml.MappingNode):
        raise ConfigError(f"The key file {path} is no mapping of keys to tenants.", hint=_FORM)
    entries = []
    # The nodes and not what they stand for: a key of digits is no number here, and one that is given twice is seen.
    for key, value in document.value:
        place = f"{path}, line {key.start_mark.line + 1}"
        fields = _fields(value)
        if not isinstance(key, yaml.ScalarNode) or fields is None or "tenant" not in fields:
            raise ConfigError(f"{place}: this is no key with a tenant.", hint=_FORM)
        entry = read_entry(key.value, fields.pop("tenant"), place)
        limits = {name: read_limit(fields.pop(name), name, place) for name in LIMITS if name in fields}
        if fields:
            raise ConfigError(f"{place}: a key has a tenant and {' and '.join(LIMITS)}, and nothing else.", hint=_FORM)
        entries.append(msgspec.structs.replace(entry, **limits))
    return check_entries(entries, str(path))


_FORM = (
    "Write one `KEY: TENANT` a line, which `headrace keys new TENANT` prints,"
    " or `KEY: {tenant: TENANT, requests_per_minute: 60, tokens_per_minute: 10000}`."
)


def _fields(node: Any) -> dict[str, str] | None:  # noqa: ANN401  (yaml has no types)
    """Return what stands behind a key: a tenant, or a mapping with one. None for what can be neither."""
    import yaml

    if isinstance(node, yaml.ScalarNode):
        return {"tenant": node.value}
    if not isinstance(node, yaml.MappingNode):
        return None
    pairs = [(name.value, value.value) for name, value in node.value if isinstance(value, yaml.ScalarNode)]
    fields = {name: value for name, value in pairs if isinstance(name, str)}
    return fields if len(fields) == len(node.value) else None


def readable_by_others(path: Path) -> bool:
    """Whether other users may read a file that may hold keys as they are."""
    return bool(path.stat().st_mode & (stat.S_IRGRP | stat.S_IROTH))


class KeyFile:
    """A key file under watch. `on_change` gets the entries of each version that can be used."""

    def __init__(self, path: Path, on_change: Callable[[list[KeyEntry]], None]) -> None:
        self.path = path
        self._on_change = on_change
        self._seen: tuple[int, ...] | None = None

    def look(self) -> bool:
        """Take a version that is new and usable; tell whether there was one."""
        version = self._version()
        if version == self._seen:
            return False
        self._seen = version
        try:
            entries = read_key_file(self.path)
        except ConfigError as error:
            logger.error("the API keys stay as they were: %s", error)
            return False
        self._on_change(entries)
        logger.info("%d API keys are valid now", len(entries), extra={"file": str(self.path)})
        return True

    async def watch(self) -> None:
        """Look until cancelled."""
        while True:
            await asyncio.sleep(LOOK_INTERVAL_S)
            await asyncio.to_thread(self.look)

    def _version(self) -> tuple[int, ...]:
        try:
            status = os.stat(self.path)
        except OSError as error:
            return (-1, error.errno or 0)
        return (status.st_mtime_ns, status.st_size, status.st_ino, status.st_dev)
