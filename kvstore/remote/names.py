"""What objects are called on a server, and how a whole namespace or owner is forgotten there at once.

    kv1:{NAMESPACE/OWNER/LEAF}:EPOCH    an object (kvstore/object_key.py); braces, so that a hash slot is of one object
    kv1:epochs                          a hash: how often each namespace, owner or pair of them was dropped

An object's epoch is the sum of the drops that it falls under. A drop counts one of them up, so that from then on
nobody, on whatever host, knows the old objects by their names; they are deleted at leisure.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from kvstore.object_key import ObjectKey

PREFIX = b"kv1:"
EPOCHS = b"kv1:epochs"
VERSION = b"version"
"""The field that is another one after every drop: who has seen it need not read the rest again."""

PATTERN = b"kv1:{*"
_NAME = re.compile(rb"kv1:\{([0-9a-f/]{1,300})\}:([0-9]{1,15})")

Selection = tuple[bytes | None, bytes | None]
"""Namespace and owner of a drop; None is all of them."""

ANY = "*"


def field_of(selection: Selection) -> bytes:
    namespace, owner = selection
    return f"{ANY if namespace is None else namespace.hex()}/{ANY if owner is None else owner.hex()}".encode()


def epoch_of(key: ObjectKey, epochs: Mapping[bytes, int]) -> int:
    """Return the sum of the drops that the object falls under."""
    selections: list[Selection] = [
        (namespace, owner) for namespace in (None, key.namespace) for owner in (None, key.owner)
    ]
    return sum(epochs.get(field_of(selection), 0) for selection in selections)


def server_name(key: ObjectKey, epoch: int) -> bytes:
    front, back = name_frame(key, epoch)
    return f"{front}{key.leaf}{back}".encode()


def name_frame(key: ObjectKey, epoch: int) -> tuple[str, str]:
    """Return what is before and behind an object's leaf in its name."""
    return f"kv1:{{{key.namespace.hex()}/{key.owner.hex()}/", f"}}:{epoch}"


def parse_name(name: bytes) -> tuple[ObjectKey, int]:
    """Return an object's key and epoch. Raises ValueError for the name of anything else."""
    found = _NAME.fullmatch(name)
    if found is None:
        raise ValueError("not the name of an object")
    return ObjectKey.parse(found[1].decode()), int(found[2])


def selected(key: ObjectKey, selection: Selection) -> bool:
    namespace, owner = selection
    return namespace in (None, key.namespace) and owner in (None, key.owner)
