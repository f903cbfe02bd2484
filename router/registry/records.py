"""Records as text, and what a record must be before anyone acts on it. Knows no registry.

Anyone who can write to a registry can write anything: every size is bounded, every address is one that we would dial,
and what does not pass is left out with a warning that says why.
"""

from __future__ import annotations

import logging
import re
import struct
from collections.abc import Iterable
from typing import TypeVar, cast
from urllib.parse import urlsplit

import msgspec
from zmq.utils import z85

from router.registry.base import Dialect, GatewayRecord, Record, WorkerRecord

log = logging.getLogger("headrace.registry")

R = TypeVar("R", WorkerRecord, GatewayRecord)

MAX_RECORD_BYTES = 256 * 1024
MAX_RECORDS = 4_096
MAX_RANKS = 1_024
MAX_TEXT_CHARACTERS = 512

ID = re.compile(r"[A-Za-z0-9._:@-]{1,128}")
DIGEST = re.compile(r"([0-9a-f]{8,128})?")
OTHER_URL = re.compile(r"(auto|openai|sglang|llama_server|text)\+(.*)")
TCP_ADDRESS = re.compile(
    r"tcp://(?:[A-Za-z0-9_.-]{1,253}|\[[0-9A-Fa-f:.]{2,45}(?:%[A-Za-z0-9_.-]{1,32})?\]):([0-9]{1,5})"
)
IPC_ADDRESS = re.compile(r"ipc://(\S+)")
MAX_IPC_PATH_BYTES = 103
"""The kernel's limit is 107 on Linux and 103 on macOS."""


class RecordError(ValueError):
    """A record cannot be used. The message says why, without the record's own text."""


def encode_record(record: Record) -> bytes:
    return msgspec.json.encode(record)


def decode_record(data: bytes | str, kind: type[R]) -> R:
    """Return a record of JSON that has passed all checks. Raises RecordError."""
    if len(data) > MAX_RECORD_BYTES:
        raise RecordError(f"it is larger than {MAX_RECORD_BYTES} bytes")
    try:
        record = msgspec.json.decode(data, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise RecordError(f"it is no record: {str(error)[:200]}") from None
    check_record(record)
    return record


def convert_record(value: object, kind: type[R]) -> R:
    """The same for a record out of a file, as plain mappings and lists."""
    try:
        record = msgspec.convert(value, kind)
    except (msgspec.ValidationError, RecursionError) as error:
        raise RecordError(f"it is no record: {str(error)[:200]}") from None
    check_record(record)
    return record


def check_record(record: Record) -> None:
    """Raise RecordError for values that nobody may act on."""
    if isinstance(record, GatewayRecord):
        _check(ID.fullmatch(record.gateway_id), "gateway_id")
        _check(is_zmq_address(record.dispatches), "dispatches")
    else:
        _check_worker(record)
    _check(ID.fullmatch(record.incarnation), "incarnation")
    _check(record.public_key is None or is_public_key(record.public_key), "public_key")


def _check_worker(record: WorkerRecord) -> None:
    _check(ID.fullmatch(record.worker_id), "worker_id")
    _check(0 < len(record.model) <= MAX_TEXT_CHARACTERS and record.model.isprintable(), "model")
    _check(len(record.numerics) <= MAX_TEXT_CHARACTERS and record.numerics.isprintable(), "numerics")
    _check(DIGEST.fullmatch(record.compatibility), "compatibility")
    _check(record.http_url is None or is_http_url(record.http_url), "http_url")
    _check(record.pid is None or 0 < record.pid < 2**31, "pid")
    _check(len(record.ranks) <= MAX_RANKS, "ranks")
    _check(record.is_ours or record.http_url is not None, "http_url")
    _check(record.is_ours or not record.ranks, "ranks")
    places = (record.events, record.events_replay)
    _check(all(place is None or is_zmq_address(place) for place in places), "events")
    _check(len(record.events_topic) <= MAX_TEXT_CHARACTERS and record.events_topic.isprintable(), "events_topic")
    numbers = {rank.dp_rank for rank in record.ranks}
    _check(len(numbers) == len(record.ranks) and all(0 <= number < 2**16 for number in numbers), "dp_rank")
    for rank in record.ranks:
        _check(rank.incarnation is None or ID.fullmatch(rank.incarnation), "ranks")
        addresses = (rank.wire, rank.events, rank.events_replay)
        _check(all(address is None or is_zmq_address(address) for address in addresses), "ranks")


def is_zmq_address(address: str) -> bool:
    """Whether it is one place that a socket can connect to: host and port, or a path that the kernel takes."""
    if tcp := TCP_ADDRESS.fullmatch(address):
        return 0 < int(tcp[1]) < 2**16
    ipc = IPC_ADDRESS.fullmatch(address)
    return ipc is not None and address.isprintable() and len(ipc[1].encode(errors="replace")) <= MAX_IPC_PATH_BYTES


def is_public_key(text: str) -> bool:
    """Whether it is Z85 of 32 bytes: every five characters are a number below 2 ** 32."""
    try:
        return len(text) == 40 and len(z85.decode(text)) == 32
    except (KeyError, ValueError, struct.error):
        return False


def is_http_url(url: str) -> bool:
    """Whether it is the base of an HTTP service: scheme, host, at most a path."""
    if len(url) > MAX_TEXT_CHARACTERS or not url.isprintable() or " " in url:
        return False
    try:
        parts = urlsplit(url)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and not parts.query and parts.port != 0
    except ValueError:  # a port that is none, a bracket that is not closed
        return False


def split_worker_url(url: str) -> tuple[Dialect, str]:
    """Return what a worker speaks, and its base URL: `http://...` is one of ours, `openai+http://...` another's."""
    found = OTHER_URL.fullmatch(url)
    return ("headrace", url) if found is None else (cast(Dialect, found[1]), found[2])


def is_worker_url(url: str) -> bool:
    return is_http_url(split_worker_url(url)[1])


def _check(holds: object, field: str) -> None:
    if not holds:
        raise RecordError(f"its {field} cannot be used")


def record_id(record: Record) -> str:
    return record.worker_id if isinstance(record, WorkerRecord) else record.gateway_id


class Sieve:
    """Makes a list of records out of what a registry holds. Says of each thing that it leaves out why, once."""

    def __init__(self) -> None:
        self._told: dict[str, str] = {}

    def complain(self, source: str, reason: object, *, what: str = "a record of the registry is left out") -> None:
        """Warn, unless that was the last complaint about the same source."""
        if self._told.get(source) != str(reason):
            if len(self._told) >= MAX_RECORDS:
                self._told.clear()
            self._told[source] = str(reason)
            log.warning("%s: %s: %s", what, source[:200].encode("unicode_escape").decode(), reason)

    def listed(self, found: Iterable[tuple[str, bytes | str]], kind: type[R]) -> tuple[R, ...]:
        """Decode (id, JSON) pairs: see `unique`. A record under another id than its own is left out."""
        records = []
        for name, data in found:
            try:
                record = decode_record(data, kind)
                if record_id(record) != name:
                    raise RecordError("it stands under another's id")
                records.append((name, record))
            except RecordError as error:
                self.complain(name, error)
        return self.unique(records)

    def unique(self, found: Iterable[tuple[str, R]]) -> tuple[R, ...]:
        """Return at most MAX_RECORDS, ordered by id; of two with one id the first stays."""
        records: dict[str, R] = {}
        for source, record in found:
            if record_id(record) in records:
                self.complain(source, f"the id {record_id(record)} is another's already")
            elif len(records) == MAX_RECORDS:
                self.complain(source, f"there are {MAX_RECORDS} records already")
                break
            else:
                records[record_id(record)] = record
        return tuple(records[name] for name in sorted(records))
