"""Namespaces, layouts and objects for the store's tests: a model with a full group and one with a window."""

from __future__ import annotations

import random
from array import array

from kvstore.block_format import Identity, encode
from kvstore.keys import PUBLIC_SCOPE, KeyChain, owner_of
from kvstore.layout import GroupLayout, ObjectLayout
from kvstore.namespace import GroupShape, Namespace
from kvstore.object_key import ObjectKey

BLOCK_SIZE = 16
NAMESPACE = Namespace(
    model="tiny",
    weights_digest="5e" * 32,
    kv_dtype="float32",
    rope="{}",
    groups=(
        GroupShape("full", (0, 2), kv_heads=2, head_dim=8),
        GroupShape("sliding_window", (1, 3), kv_heads=2, head_dim=8, window_tokens=32),
    ),
    block_size=BLOCK_SIZE,
    numerics="invariant/cpu",
)
DIGEST = NAMESPACE.digest
LAYOUT = GroupLayout(NAMESPACE, 0, target_bytes=4096)
PART = LAYOUT.parts(LAYOUT.span)[0]


def identity_of(number: int, *, scope: bytes = PUBLIC_SCOPE, part: ObjectLayout = PART) -> Identity:
    """The object of the first block of a prompt that no other number has."""
    tokens = list(range(number, number + BLOCK_SIZE * part.span))
    keys = KeyChain(scope, BLOCK_SIZE).extend(tokens)
    return Identity(
        key=part.key(DIGEST, owner_of(scope), keys[-1]), parent=scope, first_token=0, token_ids=array("I", tokens)
    )


def key_of(number: int, *, scope: bytes = PUBLIC_SCOPE) -> ObjectKey:
    return identity_of(number, scope=scope).key


def payload_of(number: int, size_bytes: int = PART.payload_bytes) -> bytes:
    return random.Random(number).randbytes(size_bytes)


def object_of(number: int, *, scope: bytes = PUBLIC_SCOPE, part: ObjectLayout = PART) -> bytearray:
    """The bytes of a whole object, in one piece."""
    payload = memoryview(payload_of(number, part.payload_bytes))
    pieces = [payload[spec.offset : spec.offset + spec.size_bytes] for spec in part.segments]
    encoded = encode(identity_of(number, scope=scope, part=part), part, [(piece,) for piece in pieces])
    return bytearray(b"".join(encoded.parts))
