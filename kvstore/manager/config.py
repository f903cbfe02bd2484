"""What the operator says of the store: one text for each tier.

ram=4GiB                                  memory, also what everything passes through
disk=DIRECTORY,50GiB[,min-free=10GiB]     files of this machine
shared=DIRECTORY,500GiB                   files of a directory that several machines have
redis://HOST:PORT/0                       a Redis or Valkey server (kvstore/remote/address.py has all forms)
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import msgspec

DEFAULT_RAM_BYTES = 1 << 30
DEFAULT_DISK_BYTES = 50 << 30
DEFAULT_MIN_FREE_BYTES = 1 << 30
MIN_RAM_BYTES = 16 << 20

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*(|[KMGT]i?B?|B)", re.IGNORECASE)
_POWERS = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4}
_SERVERS = ("redis://", "valkey://", "rediss://", "valkeys://", "unix://")


class DirectorySpec(msgspec.Struct, frozen=True):
    path: str
    capacity_bytes: int = DEFAULT_DISK_BYTES
    min_free_bytes: int = DEFAULT_MIN_FREE_BYTES


class StoreConfig(msgspec.Struct, frozen=True, kw_only=True):
    """`disk` is of this machine, and of all its engines when `local_engines` are several. At most one of `shared` and
    `server` is set. `quota_bytes` bounds each tenant in each tier that evicts by itself. `always_load` loads what is
    found whatever it costs, and `min_blocks` is the least that is worth a load. With a `secret_file` what leaves memory
    is encrypted. `check_processes` check what is loaded, for engines that are faster than threads would."""

    ram_bytes: int = DEFAULT_RAM_BYTES
    disk: DirectorySpec | None = None
    shared: DirectorySpec | None = None
    server: str | None = None
    local_engines: int = 1
    quota_bytes: int | None = None
    secret_file: str | None = None
    min_blocks: int = 1
    always_load: bool = False
    eviction: str = "adaptive"
    check_processes: int = 0


def parse_store(specs: Sequence[str]) -> StoreConfig | None:
    """Return what the texts say, None for none. Raises ValueError, which names the text and what is wrong with it."""
    if not specs:
        return None
    fields: dict[str, object] = {}
    for spec in specs:
        name, value = _parse(spec)
        other = "shared" if name == "server" else "server" if name == "shared" else name
        if name in fields or other in fields:
            raise ValueError(f"{_shown(spec)}: there is one like it already")
        fields[name] = value
    return msgspec.convert(fields, StoreConfig)


def size_of(text: str) -> int:
    """Return the bytes of a size such as 512MiB; powers of 1024, whatever the letters. Raises ValueError."""
    found = _SIZE.fullmatch(text.strip())
    if found is None:
        raise ValueError(f"{text!r} is not a size such as 512MiB or 50GiB")
    unit = found[2].upper().removesuffix("B").removesuffix("I")
    return int(float(found[1]) * 1024 ** _POWERS[unit])


def _parse(spec: str) -> tuple[str, object]:
    if spec.startswith(_SERVERS):
        return "server", spec
    kind, equals, rest = spec.partition("=")
    if kind == "ram" and equals:
        size = _size(spec, rest)
        if size < MIN_RAM_BYTES:
            raise ValueError(f"{spec}: memory of at least {MIN_RAM_BYTES >> 20}MiB is needed")
        return "ram_bytes", size
    if kind in ("disk", "shared") and equals:
        return kind, _directory(spec, rest)
    raise ValueError(
        f"{_shown(spec)}: not ram=SIZE, disk=DIRECTORY[,SIZE][,min-free=SIZE], shared=DIRECTORY[,SIZE] or redis://HOST"
    )


def _directory(spec: str, rest: str) -> DirectorySpec:
    path, *options = rest.split(",")
    if not path:
        raise ValueError(f"{spec}: names no directory")
    sizes = {"capacity_bytes": DEFAULT_DISK_BYTES, "min_free_bytes": DEFAULT_MIN_FREE_BYTES}
    for option in options:
        name, equals, value = option.partition("=")
        if not equals:
            sizes["capacity_bytes"] = _size(spec, option)
        elif name == "min-free":
            sizes["min_free_bytes"] = _size(spec, value)
        else:
            raise ValueError(f"{spec}: {name!r} is not an option of a directory (min-free is)")
    return DirectorySpec(str(Path(path).expanduser().absolute()), **sizes)


def _size(spec: str, text: str) -> int:
    try:
        size = size_of(text)
    except ValueError as error:
        raise ValueError(f"{spec}: {error}") from None
    if not size:
        raise ValueError(f"{spec}: a size of 0")
    return size


def _shown(spec: str) -> str:
    """Without what may be a password."""
    return re.sub(r"//[^@/]*@", "//...@", spec)
