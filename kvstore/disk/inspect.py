"""A disk tier's directory from outside: what lies there, and whether it is what it should be.

Reads only, and needs no tier: for directories of processes that run as well as of those that are gone.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import msgspec

from kvstore.block_format import BlockHeader, check, read_header
from kvstore.disk.files import ObjectFiles, Scratch
from kvstore.disk.place import NAMESPACE_FILE, FoundObject, Place
from kvstore.errors import CorruptObjectError, TierUnusableError
from kvstore.layout import HEADER_BYTES

MAX_NAMESPACE_BYTES = 1 << 20
MAX_OBJECT_BYTES = 1 << 30
"""What is larger is no object, and need not be read to know it."""


class NamespaceSurvey(msgspec.Struct, frozen=True, kw_only=True):
    """What is kept of one namespace. `digest` is hex; `fields` are the namespace's own, None where nobody left them.
    Times are seconds of Unix time; when an object was last used is known to ten minutes."""

    digest: str
    objects: int
    size_bytes: int
    owners: int
    oldest_use_s: float
    newest_use_s: float
    fields: dict[str, object] | None


class Survey(msgspec.Struct, frozen=True, kw_only=True):
    """`unfinished`, `doomed` and `corrupt` count what lies in the directories beside the objects."""

    namespaces: list[NamespaceSurvey]
    unfinished: int
    doomed: int
    corrupt: int

    @property
    def objects(self) -> int:
        return sum(one.objects for one in self.namespaces)

    @property
    def size_bytes(self) -> int:
        return sum(one.size_bytes for one in self.namespaces)


def open_place(root: Path) -> Place:
    """Return the place at `root`. Raises TierUnusableError for a directory that is no disk tier's."""
    place = Place(root)
    if not place.objects.is_dir():
        raise TierUnusableError(f"{root} is not the directory of a disk tier")
    return place


def survey(place: Place) -> Survey:
    """Count what is there, by namespace. Raises OSError."""
    found: dict[bytes, list[FoundObject]] = {}
    for one in place.walk():
        found.setdefault(one.key.namespace, []).append(one)
    return Survey(
        namespaces=[_survey_one(place, digest, objects) for digest, objects in sorted(found.items())],
        unfinished=len(os.listdir(place.incoming)),
        doomed=len(os.listdir(place.doomed)),
        corrupt=len(os.listdir(place.corrupt)),
    )


def _survey_one(place: Place, digest: bytes, objects: list[FoundObject]) -> NamespaceSurvey:
    used = [one.modified_s for one in objects]
    return NamespaceSurvey(
        digest=digest.hex(),
        objects=len(objects),
        size_bytes=sum(one.size_bytes for one in objects),
        owners=len(Counter(one.key.owner for one in objects)),
        oldest_use_s=min(used),
        newest_use_s=max(used),
        fields=_fields(place, digest),
    )


def _fields(place: Place, digest: bytes) -> dict[str, object] | None:
    try:
        with open(place.objects / digest.hex() / NAMESPACE_FILE, "rb") as file:
            return msgspec.json.decode(file.read(MAX_NAMESPACE_BYTES), type=dict[str, object])
    except (OSError, msgspec.DecodeError):
        return None


def header_of(place: Place, found: FoundObject) -> BlockHeader:
    """Return an object's header. Raises OSError and CorruptObjectError."""
    with open(place.path_of(found.key), "rb") as file:
        data = memoryview(file.read(HEADER_BYTES))
        size = int.from_bytes(data[8:12], "little")
        if HEADER_BYTES < size <= found.length:
            data = memoryview(bytes(data) + file.read(size - HEADER_BYTES))
    header = read_header(data)
    if header.key != found.key:
        raise CorruptObjectError("identity", "the object of another key")
    return header


def verify(place: Place) -> Iterator[tuple[FoundObject, CorruptObjectError | OSError | None]]:
    """Read every object and check every byte; yield each with what is wrong with it. Encrypted objects are checked as
    they lie there. What is deleted meanwhile by its
    owner is left out. Raises OSError for a directory that cannot be read."""
    files, scratch, memory = ObjectFiles(place, direct=False), Scratch(), Scratch()
    for found in place.walk():
        if found.length > MAX_OBJECT_BYTES:
            yield found, CorruptObjectError("bounds", f"a file of {found.length} bytes")
            continue
        target = memory.take(found.length)[: found.length]
        try:
            # "Now" is when it was last used: looking is no use, and must not keep it from eviction.
            files.read(place.path_of(found.key), target, scratch, found.modified_s)
            check(target, found.key, codec=None)
        except FileNotFoundError:
            continue
        except (CorruptObjectError, OSError) as error:
            yield found, error
        else:
            yield found, None
