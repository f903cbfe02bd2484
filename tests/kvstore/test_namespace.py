"""What must miss: whatever makes KV differ makes namespace, block key or object key differ."""

from __future__ import annotations

from array import array
from collections.abc import Iterator

import msgspec
import pytest

from kvstore.keys import PUBLIC_SCOPE, KeyChain, block_key, owner_of, tenant_scope
from kvstore.layout import GroupLayout
from kvstore.namespace import GroupShape, Namespace, canonical
from kvstore.object_key import ObjectKey
from tests.support.kv_objects import DIGEST, NAMESPACE, PART, key_of

SECRET = b"s" * 32
GROUP = NAMESPACE.groups[0]

OTHER: dict[str, object] = {
    "model": "tiny-2",
    "weights_digest": "5e" * 31 + "5f",
    "weights_epoch": "1",
    "adapter": "a1" * 32,
    "kv_dtype": "bfloat16",
    "scales": "ab",
    "rope": canonical({"theta": 10000.0}),
    "block_size": 32,
    "numerics": "default/cpu",
    "layout": "tokens-heads-dim",
}
OTHER_GROUPS: dict[str, GroupShape] = {
    "kind": msgspec.structs.replace(GROUP, kind="latent"),
    "layers": msgspec.structs.replace(GROUP, layers=(0, 1)),
    "kv_heads": msgspec.structs.replace(GROUP, kv_heads=4),
    "head_dim": msgspec.structs.replace(GROUP, head_dim=16),
    "planes": msgspec.structs.replace(GROUP, planes=("k",)),
    "window_tokens": msgspec.structs.replace(GROUP, window_tokens=16),
    "ratio": msgspec.structs.replace(GROUP, ratio=4),
}


def variants() -> Iterator[Namespace]:
    for field, value in OTHER.items():
        yield msgspec.structs.replace(NAMESPACE, **{field: value})
    for group in OTHER_GROUPS.values():
        yield msgspec.structs.replace(NAMESPACE, groups=(group, *NAMESPACE.groups[1:]))
    yield msgspec.structs.replace(NAMESPACE, groups=NAMESPACE.groups[:1])
    yield msgspec.structs.replace(NAMESPACE, groups=NAMESPACE.groups[::-1])


def test_matrix_names_every_field() -> None:
    assert set(OTHER) | {"groups"} == set(Namespace.__struct_fields__)
    assert set(OTHER_GROUPS) == set(GroupShape.__struct_fields__)


def test_every_difference_is_another_namespace() -> None:
    digests = [NAMESPACE.digest, *(one.digest for one in variants())]
    assert len(set(digests)) == len(digests)


def test_digest_is_the_same_in_every_process() -> None:
    """Pinned: what is on disk is found again by every later version, or the version in the tag is raised."""
    assert DIGEST.hex() == "3ab2534d200af748625e0d73b073a990873829ad53a8bf801aed81b156c3e69c"


@pytest.mark.parametrize(
    ("field", "value"), [("weights_digest", ""), ("kv_dtype", "float64"), ("groups", (OTHER_GROUPS["ratio"],))]
)
def test_namespace_that_could_not_be_told_apart_is_refused(field: str, value: object) -> None:
    values = {**msgspec.structs.asdict(NAMESPACE), "block_size": 18, field: value}
    with pytest.raises(ValueError, match=r"weights|kv_dtype|ratio"):
        Namespace(**values)


def test_canonical_text_has_one_order() -> None:
    assert canonical({"b": [1.5, 2], "a": None}) == canonical({"a": None, "b": [1.5, 2]})
    with pytest.raises(ValueError, match="JSON"):
        canonical({"a": float("nan")})


def test_tenants_salts_and_the_public_scope_share_no_root() -> None:
    names = [("a", ""), ("a", "b"), ("ab", ""), ("", "ab"), ("b", ""), ("a", "b\0")]
    scopes = [tenant_scope(SECRET, tenant, salt) for tenant, salt in names]
    scopes += [PUBLIC_SCOPE, tenant_scope(b"t" * 32, "a", "")]
    assert len(set(scopes)) == len(scopes)
    assert {len(scope) for scope in scopes} == {32}
    assert len({scope[16:] for scope in scopes}) == len(scopes)


def test_a_tenants_salts_have_one_owner() -> None:
    assert owner_of(tenant_scope(SECRET, "a", "x")) == owner_of(tenant_scope(SECRET, "a", "y"))
    owners = [owner_of(tenant_scope(SECRET, tenant)) for tenant in ("a", "b", "")] + [owner_of(PUBLIC_SCOPE)]
    assert len(set(owners)) == len(owners)


def test_one_token_changes_every_later_block_key() -> None:
    tokens = list(range(64))
    changed = [*tokens[:20], 999, *tokens[21:]]
    keys, others = (KeyChain(PUBLIC_SCOPE, 16).extend(one) for one in (tokens, changed))
    assert [key == other for key, other in zip(keys, others, strict=True)] == [True, False, False, False]


def test_every_field_of_an_object_key_is_in_its_name() -> None:
    key = key_of(1)
    others = [
        msgspec.structs.replace(key, **change)
        for change in (
            {"namespace": b"n" * 32},
            {"owner": b"o" * 16},
            {"block": b"b" * 32},
            {"group": 1},
            {"span": key.span + 1},
            {"layer_start": 1},
            {"layer_stop": key.layer_stop + 1},
            {"head_start": 1},
            {"head_stop": key.head_stop + 1},
        )
    ]
    assert len(others) == len(ObjectKey.__struct_fields__)
    names = [one.name for one in [key, *others]]
    assert len(set(names)) == len(names)
    assert [ObjectKey.parse(name) for name in names] == [key, *others]
    assert all(set(name) <= set("0123456789abcdef/") for name in names)


@pytest.mark.parametrize("change", ["upper", "short", "long", "dots", "empty_range", "newline"])
def test_what_is_no_name_is_refused(change: str) -> None:
    name = key_of(1).name
    wrong = {
        "upper": name.replace("5", "F").upper(),
        "short": name[:-1],
        "long": name + "0",
        "dots": "../" + name[3:],
        "empty_range": name[:-8] + "00020002",
        "newline": name + "\n",
    }[change]
    with pytest.raises(ValueError, match=r"name|ranges"):
        ObjectKey.parse(wrong)


@pytest.mark.parametrize(
    "change", [{"group": 256}, {"span": 0}, {"layer_stop": 65536}, {"owner": b""}, {"block": b"x"}]
)
def test_object_keys_are_in_range(change: dict[str, int | bytes]) -> None:
    with pytest.raises(ValueError, match=r"group|span|ranges|bytes"):
        msgspec.structs.replace(key_of(1), **change)


def test_another_cut_has_other_names() -> None:
    """Engines that cut a group differently cannot read each other's objects, so they must not find them."""
    cuts = [GroupLayout(NAMESPACE, 0, target_bytes=size, head_parts=parts) for size in (2048, 8192) for parts in (1, 2)]
    leaves = [{part.key(DIGEST, bytes(16), bytes(32)).leaf for part in cut.parts(cut.span)} for cut in cuts]
    assert not leaves[0] & leaves[2]
    assert not leaves[2] & leaves[3]
    assert PART.object_bytes == PART.header_bytes + PART.payload_bytes


def test_a_chain_that_grows_has_the_keys_of_its_blocks() -> None:
    tokens = [number * 7919 % (1 << 32) for number in range(1000)]
    chain, parent, keys = KeyChain(PUBLIC_SCOPE, 16), PUBLIC_SCOPE, []
    for first in range(0, 992, 16):
        parent = block_key(parent, tokens[first : first + 16])
        keys.append(parent)
    for length in (0, 15, 16, 17, 400, 400, 1000):
        assert chain.extend(tokens[:length]) == keys[: length // 16]
    assert KeyChain(PUBLIC_SCOPE, 16).extend(array("I", tokens)) == keys
