"""What a server says of itself: whether it can be used at all, and what its operator should know."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kvstore.remote.link import ErrorReplyError, Link
from kvstore.tier import Deadline

MAX_INFO_BYTES = 1 << 20
OLDEST = (6, 2)
"""The first version that knows GETEX. Valkey tells the version of Redis that it can stand in for."""

SETTINGS = ("save", "appendonly", "maxmemory-policy", "io-threads")

Info = Mapping[str, str]


def read_info(link: Link, deadline: Deadline) -> Info:
    """Return INFO as a table: empty where this user may not ask. Raises LinkBrokenError and ErrorReplyError."""
    try:
        text = link.call(b"INFO", deadline=deadline, max_bytes=MAX_INFO_BYTES)
    except ErrorReplyError as error:
        if error.code != "NOPERM":
            raise
        return {}
    lines = text.decode(errors="replace").splitlines() if isinstance(text, bytes) else []
    return dict(line.partition(":")[::2] for line in lines if ":" in line)


def read_settings(link: Link, deadline: Deadline) -> Info:
    """Return SETTINGS as far as they are told. Raises LinkBrokenError."""
    settings = {}
    for name in SETTINGS:
        try:
            told = link.call(b"CONFIG", b"GET", name.encode(), deadline=deadline, max_bytes=MAX_INFO_BYTES)
        except ErrorReplyError:
            return {}  # hosted servers and careful operators do not allow it
        if isinstance(told, list) and len(told) == 2 and isinstance(told[1], bytes):
            settings[name] = told[1].decode(errors="replace")
    return settings


def number_in(info: Info, name: str) -> int:
    text = info.get(name, "")
    return int(text) if text.isdecimal() and len(text) < 19 else 0


def refusal_of(info: Info) -> str:
    """Return why the server cannot be used, "" when it can."""
    mode = info.get("redis_mode") or info.get("server_mode") or "standalone"
    if info.get("cluster_enabled") == "1" or mode != "standalone":
        return f"it runs in {'cluster' if info.get('cluster_enabled') == '1' else mode} mode, which is not supported"
    if info.get("role") in ("slave", "replica"):
        return "it is a replica, which takes no writes"
    version = info.get("redis_version", "")
    numbers = tuple(int(part) for part in version.split(".")[:2] if part.isdecimal() and len(part) < 9)
    if len(numbers) == 2 and numbers < OLDEST:
        return f"it is of version {version}; {'.'.join(map(str, OLDEST))} is the oldest that can be used"
    return ""


def advice_on(info: Info, settings: Info) -> Sequence[str]:
    """Return what should be set otherwise, a sentence each."""
    advice = []
    if "maxmemory" in info and not number_in(info, "maxmemory"):
        advice.append("it has no maxmemory: it will grow until the machine has no memory left")
    if (settings.get("maxmemory-policy") or info.get("maxmemory_policy")) == "noeviction":
        advice.append(
            "its maxmemory-policy is noeviction: once it is full nothing new is stored; allkeys-lru is better"
        )
    if settings.get("save"):
        advice.append("it saves snapshots (save), which doubles its memory at times and is of no use to a cache")
    if settings.get("appendonly") == "yes" or info.get("aof_enabled") == "1":
        advice.append("it writes a log of all that is stored (appendonly), which is of no use to a cache")
    if settings.get("io-threads") == "1":
        advice.append("it has one I/O thread (io-threads): others wait while it sends large objects")
    return advice
